"""Tests agents in a run: the tokens that engines are sent and send, and what is stored and
trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_async.errors import UserError
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Trajectory
from tests.environments.inside import InProcessBackend
from tests.rollout.episode_runs import (
    LOOPS,
    SECONDS,
    Run,
    assert_engines_and_store_agree,
    assert_trained_once,
    configured,
    episodes_of,
    tokenizer,
    with_agent,
)

__all__ = ["LOOPS", "SECONDS", "tokenizer"]


@pytest.mark.parametrize("preset", ["sync", "copris", "pipeline", "async"])
@pytest.mark.parametrize("program", ["talks_on", "parallel"])
async def test_requested_stored_and_trained_tokens_of_episodes_are_equal(
    tmp_path: Path, tokenizer: Path, preset: str, program: str
) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", program, preset))
    batches: list[TokenBatch] = []
    await one.begin(ResumePoint(0))
    batches.extend(await one.train(range(3)))
    warned = one.manager._driver.statistics.warnings.keys()
    assert not warned & {"agent", "environment_failed", "superseded_append"}
    await one.manager.stop()
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_trained_once(batches, episodes)
    ended = [e for e in episodes.values() if e.state == "batched"]
    calls = {"talks_on": 4, "parallel": 6}[program]
    assert {len(e.turns) for e in ended} == {calls}
    assert {len(e.branches()) for e in ended} == {1 if program == "talks_on" else calls}
    assert {e.reward for e in ended} == {1.0 if program == "talks_on" else 6.0}
    if program == "parallel":
        assert batches[-1].extra_metrics["rollout/forks_repeated"] > 0
        assert batches[-1].extra_metrics["rollout/forks"] > 0
    else:
        assert "rollout/forks" not in batches[-1].extra_metrics


@pytest.mark.parametrize("program", ["talks_on", "drifts"])
async def test_episodes_survive_when_an_environment_worker_dies(
    tmp_path: Path, tokenizer: Path, program: str
) -> None:
    log = tmp_path / "answers"
    agent = {"arguments": {"log": str(log)}}
    config = with_agent(tokenizer, tmp_path / "rows.jsonl", program, agent=agent)
    one = Run(tmp_path, config, backend=InProcessBackend(before=53, after=71))
    batches: list[TokenBatch] = []
    await one.begin(ResumePoint(0))
    batches.extend(await one.train(range(8)))
    counts = one.manager._driver.statistics.counts.episodes
    assert counts["restored"] > 0
    assert counts["workers_lost"] > 0
    assert counts["turns_replayed"] > 0
    assert (counts["turns_abandoned"] > 0) == (program == "drifts")
    assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
    await one.manager.stop()
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_trained_once(batches, episodes)
    if program == "talks_on":
        assert_log_agrees(log, episodes)


def assert_log_agrees(log: Path, episodes: dict[int, Trajectory]) -> None:
    """Check that every response in a program's log is stored in an episode with the same prompt."""
    stored = {
        (e.prompt.payload["question"], 2 * turn.number + 1, turn.answer["text"])
        for e in episodes.values()
        for turn in e.turns
        if turn.answer is not None
    }
    unfinished = {
        e.prompt.payload["question"] for e in episodes.values() if e.state not in ("batched",)
    }
    for line in log.read_text().splitlines():
        prompt, position, text = json.loads(line)
        assert (prompt, position, text) in stored or prompt in unfinished


async def test_agent_gets_an_error_when_its_first_call_is_too_long_for_engines(
    tmp_path: Path, tokenizer: Path
) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", "shortens"))
    await one.begin(ResumePoint(0))
    await one.train(range(1))
    warned = one.manager._driver.statistics.warnings.keys()
    assert not warned & {"environment_failed"}
    await one.manager.stop()
    ended = [e for e in episodes_of(one).values() if e.state == "batched"]
    assert {(e.reward, len(e.turns), e.finish_reason) for e in ended} == {(200.0, 1, "length")}


async def test_agent_is_reported_once_when_it_requests_another_temperature(
    tmp_path: Path, tokenizer: Path
) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", "cool"))
    await one.begin(ResumePoint(0))
    await one.train(range(1))
    assert one.manager._driver.statistics.warnings["agent"] == (
        "an agent sets another temperature; the run's sampling.temperature 1 is used"
    )
    await one.manager.stop()


def test_settings_are_refused_when_they_contradict_an_agent(
    tmp_path: Path, tokenizer: Path
) -> None:
    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=re.escape(sentence)):
            with_agent(tokenizer, tmp_path / "rows.jsonl", "solve", **changes)

    refused("has one weight for a whole response", algorithm={"recipe": "rapid"})
    refused("it shapes the length", algorithm={"overlong": {"buffer_share": 0.5}})
    refused("set only one of them", agent={"command": ["true"]})
    refused("agent.name is 'solve'; it must be", agent={"name": "solve"})
    with pytest.raises(UserError, match=r"episode.max_turns is set, but environment.name"):
        configured(tokenizer, environment={"name": ""}, episode={"max_turns": 3})
    with pytest.raises(UserError, match="are both set"):
        configured(tokenizer, agent="agent.py:solve")
