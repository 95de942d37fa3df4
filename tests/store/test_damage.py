"""Tests that a damaged database is detected, named in a message, and replaced by the replica.

Pages are overwritten and files truncated at many places. In every case the resumed store must be
right: a trajectory's tokens are a prefix of those that were written, and a group that was trained
    is
not returned for training again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.store.reader import StoreReader
from megatron_async.store.recovery import Recovery
from megatron_async.store.schema import PAGE_BYTES
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, PolicyVersion, TrajectoryState
from tests.trajectory.builders import (
    REPLICA,
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
GROUPS, SIZE, BATCHED, REPLICATED = 30, 2, 12, 24
LENGTHS = {i: 200 + 37 * (i % 11) for i in range(GROUPS * SIZE)}


@dataclass(frozen=True)
class Healthy:
    """The files of a run, and the store's position at the checkpoint of step 6 and at the end."""

    run: Path
    checkpoint: int
    end: int

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.run, target, dirs_exist_ok=True)
        return target / STORE


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """A run of 30 groups: 12 batched (two in each of steps 0 to 5) and 12 scored, then 6 partial.

    The checkpoint of step 6, and its replica, are made before the 6 partial groups are added.
    """
    run = tmp_path_factory.mktemp("healthy")

    async def scenario() -> Healthy:
        store = TrajectoryStore.open(run / STORE)
        for g in range(REPLICATED):
            step = min(g // 2, 6)
            group = store.add_group(prompt(g), SIZE)
            for t in group.trajectories:
                i = t.trajectory_id
                store.begin_request(i)
                append(store, i, 0, 64, PolicyVersion(0, step))
                append(store, i, 64, LENGTHS[i] - 64, PolicyVersion(0, step))
                store.end(i, FinishReason.STOP)
                await store.sync()
                await store.set_reward(i, float(i))
            if g < BATCHED and g % 2:
                store.mark_batched([g - 1, g], g // 2)
        checkpoint = await store.sync(durable=True)
        store.replicate()
        await store._replicator.finish()
        for g in range(REPLICATED, GROUPS):
            for t in store.add_group(prompt(g), SIZE).trajectories:
                store.begin_request(t.trajectory_id)
                append(store, t.trajectory_id, 0, LENGTHS[t.trajectory_id])
                store.end_request(current(store, t.trajectory_id))
        end = await store.sync()
        await store.close()
        return Healthy(run, checkpoint, end)

    return asyncio.run(scenario())


def overwrite(path: Path, page: int, rng: random.Random | None) -> None:
    """Overwrite page `page` (from 0) of a file with zeros, or with random bytes from `rng`."""
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES) if rng is None else rng.randbytes(PAGE_BYTES))


@dataclass
class ResumeResult:
    groups: int
    intact: int
    counted: int
    recovery: Recovery | None


def resume_and_compare(
    path: Path, position: int | None, lineage: int = 1, step: int = 6
) -> ResumeResult:
    """Resume a run and compare everything in the store with what the run `healthy` wrote."""

    async def scenario() -> ResumeResult:
        store = TrajectoryStore.open(
            path, lineage=lineage, step=step, parent=0 if lineage else None, position=position
        )
        try:
            result = ResumeResult(0, 0, sum(store.counts().values()), store.recovery)
            for group in store.unconsumed_groups():
                if group.group_id >= GROUPS:
                    continue  # An earlier call of this function added the group, below.
                assert group.group_id >= BATCHED, "a group that was trained is live again"
                assert group.prompt.payload == {"answer": group.group_id}
                assert group.prompt.token_ids.tolist() == prompt(group.group_id).token_ids.tolist()
                result.groups += 1
                for t in group.trajectories:
                    whole = expected(t.trajectory_id, LENGTHS[t.trajectory_id])
                    got = response(t)
                    assert got == whole[: len(got)], "the store has tokens that were never written"
                    if t.state is S.SCORED:
                        assert got == whole
                        assert t.reward == float(t.trajectory_id)
                    else:
                        assert t.reward is None
                    if got == whole:
                        result.intact += 1
            added = store.add_group(prompt(), 1)
            assert added.group_id >= GROUPS, "an id is used twice"
            assert added.trajectories[0].trajectory_id >= GROUPS * SIZE, "an id is used twice"
            assert await store.sync() > (position or 0)
            return result
        finally:
            await store.close()

    return asyncio.run(scenario())


def test_intact_database_is_opened_without_recovery(healthy: Healthy, tmp_path: Path) -> None:
    result = resume_and_compare(healthy.copy(tmp_path), healthy.checkpoint)
    whole = (GROUPS - BATCHED) * SIZE
    assert result == ResumeResult(GROUPS - BATCHED, whole, GROUPS * SIZE, None)


def test_recovery_message_names_file_damage_and_losses(healthy: Healthy, tmp_path: Path) -> None:
    path = healthy.copy(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"trajectories.sqlite is damaged"):
        StoreReader(path).summaries()
    recovery = resume_and_compare(path, healthy.checkpoint).recovery
    assert recovery is not None
    kept = tmp_path / (STORE + ".damaged-1")
    assert recovery.damaged_file == kept
    assert kept.read_bytes()[100:] == damaged[100:]
    assert f"trajectory store {path} is damaged (" in recovery.message
    assert "it is replaced by its replica, which ends at transaction" in recovery.message
    assert "trajectories from 48 on are lost" in recovery.message
    assert str(kept) in recovery.message
    assert resume_and_compare(path, healthy.checkpoint, lineage=2).recovery is None


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_truncated_database_is_restored_up_to_the_checkpoint(
    healthy: Healthy, tmp_path: Path, share: float
) -> None:
    path = healthy.copy(tmp_path)
    with path.open("r+b") as file:
        file.truncate(max(1, int(path.stat().st_size * share)))
    result = resume_and_compare(path, healthy.checkpoint)
    assert result.recovery is not None
    assert not result.recovery.behind
    assert result.groups == REPLICATED - BATCHED
    assert result.intact == (REPLICATED - BATCHED) * SIZE


def test_live_groups_are_excluded_when_the_replica_is_behind_the_trainer(
    healthy: Healthy, tmp_path: Path
) -> None:
    """The trainer continues its lineage; batches since the checkpoint are in no file any more."""
    path = healthy.copy(tmp_path)
    path.write_bytes(b"")
    result = resume_and_compare(path, healthy.end, lineage=0, step=8)
    assert result.recovery is not None
    assert result.recovery.behind
    assert result.groups == 0
    assert "(24 to 47) are excluded from training" in result.recovery.message
    assert f"(the trainer has seen transaction {healthy.end})" in result.recovery.message
    again = resume_and_compare(path, healthy.end + 1, lineage=1, step=8)
    assert (again.groups, again.recovery) == (0, None)


@pytest.mark.parametrize("replica", ["missing", "damaged"])
def test_damaged_store_starts_empty_when_it_has_no_usable_replica(
    healthy: Healthy, tmp_path: Path, replica: str
) -> None:
    path = healthy.copy(tmp_path)
    overwrite(path, 7, None)
    if replica == "missing":
        (tmp_path / REPLICA).unlink()
    else:
        overwrite(tmp_path / REPLICA, 5, None)
    result = resume_and_compare(path, healthy.checkpoint)
    assert result.recovery is not None
    assert (result.groups, result.recovery.behind) == (0, True)
    assert "the store starts empty" in result.recovery.message
    assert ("and its replica is damaged" in result.recovery.message) == (replica == "damaged")


@pytest.mark.slow
@pytest.mark.one_core
def test_store_content_is_correct_when_any_single_page_is_overwritten(
    healthy: Healthy, tmp_path: Path
) -> None:
    """Each page in turn is overwritten with zeros or random bytes."""
    rng = random.Random(7)
    pages = (healthy.run / STORE).stat().st_size // PAGE_BYTES
    damages: list[Callable[[Path, int], None]] = [
        lambda path, page: overwrite(path, page, None),
        lambda path, page: overwrite(path, page, rng),
    ]
    found = 0
    for page in range(pages):
        directory = tmp_path / str(page)
        path = healthy.copy(directory)
        damages[page % 2](path, page)
        result = resume_and_compare(path, healthy.checkpoint)
        whole = GROUPS
        if result.recovery is not None:
            found += 1
            whole = REPLICATED
        assert result.intact == (whole - BATCHED) * SIZE
        shutil.rmtree(directory)
    # The other pages contain tokens of trained groups, which opening does not read.
    assert found >= pages * 3 // 4


def test_flipped_bit_in_tokens_is_detected(healthy: Healthy, tmp_path: Path) -> None:
    """SQLite itself does not check the content of a page."""
    path = healthy.copy(tmp_path)
    data = bytearray(path.read_bytes())
    tokens, logprobs = tokens_of(40, 64, LENGTHS[40] - 64)
    at = data.find(tokens.tobytes() + logprobs.tobytes())
    assert at > 0
    data[at + 8] ^= 1
    path.write_bytes(data)
    result = resume_and_compare(path, healthy.checkpoint)
    assert result.recovery is not None
    assert "a row of table chunks has a wrong checksum" in result.recovery.message
    assert "trajectories 48 to 59 are lost" in result.recovery.message
    assert result.intact == (REPLICATED - BATCHED) * SIZE


def test_missing_chunk_is_detected(healthy: Healthy, tmp_path: Path) -> None:
    path = healthy.copy(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM chunks WHERE trajectory_id = 40 AND seq = 0")
        connection.commit()
    result = resume_and_compare(path, healthy.checkpoint)
    assert result.recovery is not None
    assert "tokens of trajectory 40 are missing" in result.recovery.message
    assert result.intact == (REPLICATED - BATCHED) * SIZE


async def test_truncated_log_is_detected_by_the_position_of_the_checkpoint(tmp_path: Path) -> None:
    """Without its log the database is a valid older state, from which nothing may be trained."""

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
    assert f"(the trainer has seen transaction {position})" in again.recovery.message
    # Group 0 was trained, so no group that may be group 0 is returned.
    assert again.unconsumed_groups() == []
    assert (await again.sync()) > position
    await again.close()


def test_replacement_by_replica_is_repeated_when_a_kill_interrupted_it(
    healthy: Healthy, tmp_path: Path
) -> None:
    path = healthy.copy(tmp_path)
    # The kill came before the copy of the replica got the database's name.
    path.rename(tmp_path / (STORE + ".damaged-1"))
    (tmp_path / (STORE + ".restored")).write_bytes(b"half")
    result = resume_and_compare(path, healthy.checkpoint)
    assert result.recovery is not None
    assert "no longer exists; it is replaced by its replica" in result.recovery.message
    assert result.intact == (REPLICATED - BATCHED) * SIZE
