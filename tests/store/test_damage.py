"""Damaged files: found, named, and what is intact comes back; never anything that was not written.

Pages are overwritten and files cut at many places; whatever the store then says must be true:
tokens are a prefix of what was written, and a group that was trained is not offered again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.store.reader import StoreReader
from megatron_async.store.schema import PAGE_BYTES, chunk_data
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, PolicyVersion, TrajectoryState
from tests.trajectory.builders import (
    STORE,
    append,
    current,
    expected,
    prompt,
    response,
    scored_group,
    tokens_of,
)

S = TrajectoryState
GROUPS, SIZE, BATCHED = 30, 2, 12
LENGTHS = {i: 200 + 37 * (i % 11) for i in range(GROUPS * SIZE)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 groups: 12 batched in steps 0 to 5 (two each), 12 scored, the rest partial."""
    run = tmp_path_factory.mktemp("healthy")

    async def scenario() -> None:
        store = TrajectoryStore.open(run / STORE)
        for g in range(GROUPS):
            if g < 24:
                step = min(g // 2, 6)
                group = store.add_group(prompt(g), SIZE)
                for t in group.trajectories:
                    i = t.trajectory_id
                    store.begin_request(i)
                    append(store, i, 0, 64, PolicyVersion(0, step))
                    append(store, i, 64, LENGTHS[i] - 64, PolicyVersion(0, step))
                    await store.finish(i, FinishReason.STOP)
                    await store.set_reward(i, float(i))
            else:
                for t in store.add_group(prompt(g), SIZE).trajectories:
                    store.begin_request(t.trajectory_id)
                    append(store, t.trajectory_id, 0, LENGTHS[t.trajectory_id])
                    store.end_request(current(store, t.trajectory_id))
            if g < BATCHED and g % 2:
                store.mark_batched([g - 1, g], g // 2)
        await store.close()

    asyncio.run(scenario())
    return run / STORE


def overwrite(path: Path, page: int, rng: random.Random | None) -> None:
    """Page `page` (from 0) becomes zeros, or random bytes."""
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES) if rng is None else rng.randbytes(PAGE_BYTES))


def check_truth(path: Path, *, damaged: bool | None) -> dict[str, int]:
    """Resume at step 6 and compare everything that is there with what was written."""

    async def scenario() -> dict[str, int]:
        store = TrajectoryStore.open(path, lineage=1, step=6)
        try:
            assert damaged is None or (store.recovery is not None) == damaged
            seen = {"groups": 0, "intact": 0, "lost": GROUPS * SIZE}
            for group in store.unconsumed_groups():
                assert group.group_id >= BATCHED, "a trained group is offered again"
                assert group.prompt.payload == {"answer": group.group_id}
                assert group.prompt.token_ids.tolist() == prompt(group.group_id).token_ids.tolist()
                seen["groups"] += 1
                for t in group.trajectories:
                    whole = expected(t.trajectory_id, LENGTHS[t.trajectory_id])
                    got = response(t)
                    assert got == whole[: len(got)], "tokens that were never written"
                    if t.state is S.SCORED:
                        assert got == whole
                        assert t.reward == float(t.trajectory_id)
                    else:
                        assert t.reward is None
                    seen["intact"] += got == whole
            seen["lost"] = GROUPS * SIZE - sum(store.counts().values())
            ids = [t.trajectory_id for t in store.add_group(prompt(), 1).trajectories]
            assert min(ids) >= GROUPS * SIZE, "an id is used twice"
            return seen
        finally:
            await store.close()

    return asyncio.run(scenario())


def test_an_intact_file_is_opened_without_a_word(healthy: Path, tmp_path: Path) -> None:
    path = shutil.copy(healthy, tmp_path / STORE)
    seen = check_truth(Path(path), damaged=False)
    assert seen == {"groups": GROUPS - BATCHED, "intact": (GROUPS - BATCHED) * SIZE, "lost": 0}


def test_the_sentence_names_the_file_the_damage_and_where_it_is_kept(
    healthy: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(healthy, tmp_path / STORE))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"trajectories.sqlite is damaged"):
        StoreReader(path).summaries()

    async def scenario() -> None:
        store = TrajectoryStore.open(path, lineage=1, step=6)
        assert store.recovery is not None
        sentence = store.recovery.sentence
        assert str(path) in sentence
        assert "was damaged (" in sentence
        assert "trajectories were recovered" in sentence
        kept = store.recovery.damaged_file
        assert kept.name == STORE + ".damaged-1"
        assert str(kept) in sentence
        assert kept.read_bytes()[100:] == damaged[100:]
        await store.close()
        again = TrajectoryStore.open(path, lineage=2, step=6)
        assert again.recovery is None
        await again.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_cut_file_gives_back_its_first_part(healthy: Path, tmp_path: Path, share: float) -> None:
    path = Path(shutil.copy(healthy, tmp_path / STORE))
    with path.open("r+b") as file:
        file.truncate(max(1, int(path.stat().st_size * share)))
    seen = check_truth(path, damaged=True)
    if share >= 0.9:
        assert seen["groups"] >= 10
        assert seen["intact"] >= 20


@pytest.mark.slow
def test_every_single_page_may_be_lost(healthy: Path, tmp_path: Path) -> None:
    """One page after the other, zeros and noise: what is said is true, most of it comes back."""
    rng = random.Random(7)
    pages = healthy.stat().st_size // PAGE_BYTES
    damages: list[Callable[[Path, int], None]] = [
        lambda path, page: overwrite(path, page, None),
        lambda path, page: overwrite(path, page, rng),
    ]
    whole = 0
    for page in range(pages):
        directory = tmp_path / str(page)
        directory.mkdir()
        path = Path(shutil.copy(healthy, directory / STORE))
        damages[page % 2](path, page)
        seen = check_truth(path, damaged=None)  # a page may hold nothing that is in use
        whole += seen["lost"] == 0
        shutil.rmtree(directory)
    assert whole >= pages // 2


def test_flipped_bits_inside_tokens_are_noticed(healthy: Path, tmp_path: Path) -> None:
    """SQLite itself does not check the content of a page."""
    path = Path(shutil.copy(healthy, tmp_path / STORE))
    data = bytearray(path.read_bytes())
    tokens, logprobs = tokens_of(40, 64, LENGTHS[40] - 64)
    at = data.find(chunk_data([tokens], [logprobs]))
    assert at > 0
    data[at + 8] ^= 1
    path.write_bytes(data)

    async def scenario() -> None:
        store = TrajectoryStore.open(path, lineage=1, step=6)
        assert store.recovery is not None
        assert store.recovery.cut_trajectories == 1
        found = store.load_trajectory(40)
        assert found.state is S.PARTIAL
        assert response(found) == expected(40, 64)
        await store.close()

    asyncio.run(scenario())


def test_a_lost_log_is_noticed_by_the_position_of_the_checkpoint(tmp_path: Path) -> None:
    """Without its log the file is a valid older one; trained groups must not come back from it."""

    async def scenario() -> None:
        run = tmp_path / "run"
        store = TrajectoryStore.open(run / STORE)
        groups = [await scored_group(store) for _ in range(2)]
        store.mark_batched([groups[0].group_id], 0)
        position = await store.sync(durable=True)
        crashed = tmp_path / "crashed"
        crashed.mkdir()
        shutil.copy(run / STORE, crashed / STORE)
        shutil.copy(run / (STORE + "-wal"), crashed / (STORE + "-wal"))
        await store.close()

        log = crashed / (STORE + "-wal")
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size // 3)
        again = TrajectoryStore.open(crashed / STORE, lineage=1, step=1, position=position)
        assert again.recovery is not None
        assert f"the checkpoint was made at {position}" in again.recovery.sentence
        assert again.unconsumed_groups() == []  # group 0 was trained and may be among them
        assert (await again.sync()) > position
        await again.close()

    asyncio.run(scenario())


def test_a_salvage_that_was_killed_is_finished_at_the_next_open(
    healthy: Path, tmp_path: Path
) -> None:
    shutil.copy(healthy, tmp_path / (STORE + ".salvaged"))  # the last rename did not happen
    seen = check_truth(tmp_path / STORE, damaged=False)
    assert seen["lost"] == 0
