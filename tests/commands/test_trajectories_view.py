"""The listing and the detail view, from a real store."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from megatron_async.commands import trajectories as view
from megatron_async.errors import UserError
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    LEFT,
    DropReason,
    FinishReason,
    PolicyVersion,
    TrajectoryState,
)
from tests.store.test_episodes import forked
from tests.trajectory.builders import STORE, append, current, prompt, scored_group


def printed(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(renderable)
    return stream.getvalue()


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    """Group 0 batched, group 1: one partial over two versions, one dropped."""

    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE)
        group = await scored_group(store, count=30)
        store.mark_batched([group.group_id], 0)
        store.add_group(prompt(5), 2)
        store.begin_request(2)
        append(store, 2, 0, 3)
        append(store, 2, 3, 4, PolicyVersion(0, 2))
        store.append(
            current(store, 2), [9], [0.0], PolicyVersion(0, 2), "env", from_environment=True
        )
        store.end_request(current(store, 2))
        store.drop(3, DropReason.STALE)
        await store.close()

    asyncio.run(scenario())
    return StoreReader(tmp_path / STORE)


def test_an_episode_is_a_conversation_with_authors_versions_and_masks(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE)
        await forked(store)
        await store.close()

    asyncio.run(scenario())
    with closing(StoreReader(tmp_path / STORE)) as reader:
        found = reader.trajectory(0)
        shown = view.details(found, lambda ids: "|".join(map(str, ids)))
    turns = (found.turns[0], replace(found.turns[1], answer={LEFT: True}), found.turns[2])
    left = printed(view.details(replace(found, turns=turns), str))
    assert left.count("mask 1") == 2, "a turn that is left is not trained"
    text = " ".join(printed(shown).split())
    assert "turn 0, begins segment 0: environment, 2 tokens, mask 0 1|2" in text
    policy = "segment 3: policy 0.1 on e0, 2 tokens, mean log-prob -0.065, mask 1 6|7"
    assert f"turn 1, follows turn 0 segment 2: environment, 1 tokens, mask 0 5 {policy}" in text
    assert "turn 2 ended by stop, reward 1" in text


def test_the_listing_counts_and_shows_each_trajectory(reader: StoreReader) -> None:
    text = printed(view.listing(reader.summaries()))
    assert "4 trajectories: 1 partial, 2 batched, 1 dropped" in text
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows[0] == ["0", "0", "30", "0", "batched", "(step", "0)", "0.0", "stop"]
    assert rows[2] == ["2", "1", "8", "partial", "0.0", "to", "0.2"]
    assert rows[3] == ["3", "1", "0", "dropped", "(stale)"]


def test_a_state_can_be_picked_and_long_lists_are_cut(reader: StoreReader) -> None:
    everything = reader.summaries()
    partial = printed(view.listing(everything, state=TrajectoryState.PARTIAL))
    assert "batched (step" not in partial
    assert "0.0 to 0.2" in partial
    assert "no running trajectories" in printed(
        view.listing(everything, state=TrajectoryState.RUNNING)
    )
    assert "3 older ones are not shown" in printed(view.listing(everything, limit=1))
    assert [s.trajectory_id for s in reader.summaries(TrajectoryState.DROPPED)] == [3]


def test_one_trajectory_is_shown_with_prompt_segments_versions_and_reward(
    reader: StoreReader,
) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "<" + "|".join(map(str, token_ids)) + ">"

    text = printed(view.details(reader.trajectory(2), decode))
    assert "2 (group 1)" in text
    assert "<5|6|7|8>" in text
    assert "segment 0: policy 0.0 on e0, 3 tokens, mean log-prob" in text
    assert "segment 1: policy 0.2 on e0, 4 tokens" in text
    assert "segment 2: environment, 1 tokens" in text
    assert "not scored" in text
    done = printed(view.details(reader.trajectory(1), decode))
    assert "batched (step 0)" in done
    assert FinishReason.STOP.value in done
    assert "right" in done


def test_an_unknown_trajectory_is_refused(reader: StoreReader) -> None:
    with pytest.raises(UserError, match="trajectory 77 is not in"):
        reader.trajectory(77)
