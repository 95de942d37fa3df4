"""Damaged files: found, named, replaced by the replica; never anything that was not written.

Pages are overwritten and files cut at many places; whatever the store then reports must be true:
tokens are a prefix of what was written, and a group that was trained is not offered again.
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
    """A run's files, and where the store stood at the checkpoint of step 6 and at the end."""

    run: Path
    checkpoint: int
    end: int

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.run, target, dirs_exist_ok=True)
        return target / STORE


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """30 groups: 12 batched in steps 0 to 5 (two each), 12 scored, a checkpoint; then 6 partial."""
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
    """Page `page` (from 0) becomes zeros, or random bytes."""
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES) if rng is None else rng.randbytes(PAGE_BYTES))


@dataclass
class Seen:
    groups: int
    intact: int
    counted: int
    recovery: Recovery | None


def check_truth(path: Path, position: int | None, lineage: int = 1, step: int = 6) -> Seen:
    """Resume at step 6 and compare everything that is there with what was written."""

    async def scenario() -> Seen:
        store = TrajectoryStore.open(
            path, lineage=lineage, step=step, parent=0 if lineage else None, position=position
        )
        try:
            seen = Seen(0, 0, sum(store.counts().values()), store.recovery)
            for group in store.unconsumed_groups():
                if group.group_id >= GROUPS:
                    continue  # added below, in an earlier call
                assert group.group_id >= BATCHED, "a trained group is offered again"
                assert group.prompt.payload == {"answer": group.group_id}
                assert group.prompt.token_ids.tolist() == prompt(group.group_id).token_ids.tolist()
                seen.groups += 1
                for t in group.trajectories:
                    whole = expected(t.trajectory_id, LENGTHS[t.trajectory_id])
                    got = response(t)
                    assert got == whole[: len(got)], "tokens that were never written"
                    if t.state is S.SCORED:
                        assert got == whole
                        assert t.reward == float(t.trajectory_id)
                    else:
                        assert t.reward is None
                    seen.intact += got == whole
            added = store.add_group(prompt(), 1)
            assert added.group_id >= GROUPS, "an id is used twice"
            assert added.trajectories[0].trajectory_id >= GROUPS * SIZE, "an id is used twice"
            assert await store.sync() > (position or 0)
            return seen
        finally:
            await store.close()

    return asyncio.run(scenario())


def test_an_intact_file_is_opened_without_a_word(healthy: Healthy, tmp_path: Path) -> None:
    seen = check_truth(healthy.copy(tmp_path), healthy.checkpoint)
    whole = (GROUPS - BATCHED) * SIZE
    assert seen == Seen(GROUPS - BATCHED, whole, GROUPS * SIZE, None)


def test_the_sentence_names_the_file_the_damage_and_what_is_lost(
    healthy: Healthy, tmp_path: Path
) -> None:
    path = healthy.copy(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"trajectories.sqlite is damaged"):
        StoreReader(path).summaries()
    recovery = check_truth(path, healthy.checkpoint).recovery
    assert recovery is not None
    kept = tmp_path / (STORE + ".damaged-1")
    assert recovery.damaged_file == kept
    assert kept.read_bytes()[100:] == damaged[100:]
    assert f"trajectory store {path} is damaged (" in recovery.sentence
    assert "its replica takes its place, which ends at transaction" in recovery.sentence
    assert "trajectories from 48 on are lost" in recovery.sentence
    assert str(kept) in recovery.sentence
    assert check_truth(path, healthy.checkpoint, lineage=2).recovery is None


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_of_a_cut_file_everything_up_to_the_checkpoint_comes_back(
    healthy: Healthy, tmp_path: Path, share: float
) -> None:
    path = healthy.copy(tmp_path)
    with path.open("r+b") as file:
        file.truncate(max(1, int(path.stat().st_size * share)))
    seen = check_truth(path, healthy.checkpoint)
    assert seen.recovery is not None
    assert not seen.recovery.behind
    assert seen.groups == REPLICATED - BATCHED
    assert seen.intact == (REPLICATED - BATCHED) * SIZE


def test_a_replica_that_is_behind_the_trainer_offers_nothing_again(
    healthy: Healthy, tmp_path: Path
) -> None:
    """The trainer goes on on its lineage: batches since the checkpoint are in no file now."""
    path = healthy.copy(tmp_path)
    path.write_bytes(b"")
    seen = check_truth(path, healthy.end, lineage=0, step=8)
    assert seen.recovery is not None
    assert seen.recovery.behind
    assert seen.groups == 0
    assert "(24 to 47) are set aside, since they may have been trained" in seen.recovery.sentence
    assert f"(the run has seen transaction {healthy.end})" in seen.recovery.sentence
    again = check_truth(path, healthy.end + 1, lineage=1, step=8)
    assert (again.groups, again.recovery) == (0, None)


@pytest.mark.parametrize("replica", ["missing", "damaged"])
def test_without_a_replica_a_damaged_store_begins_anew(
    healthy: Healthy, tmp_path: Path, replica: str
) -> None:
    path = healthy.copy(tmp_path)
    overwrite(path, 7, None)
    if replica == "missing":
        (tmp_path / REPLICA).unlink()
    else:
        overwrite(tmp_path / REPLICA, 5, None)
    seen = check_truth(path, healthy.checkpoint)
    assert seen.recovery is not None
    assert (seen.groups, seen.recovery.behind) == (0, True)
    assert "it begins anew" in seen.recovery.sentence
    assert ("and its replica is damaged" in seen.recovery.sentence) == (replica == "damaged")


@pytest.mark.slow
@pytest.mark.one_core
def test_every_single_page_may_be_lost(healthy: Healthy, tmp_path: Path) -> None:
    """One page after the other, zeros and noise: the damage is found, and reported as it is."""
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
        seen = check_truth(path, healthy.checkpoint)
        found += seen.recovery is not None
        whole = REPLICATED if seen.recovery is not None else GROUPS
        assert seen.intact == (whole - BATCHED) * SIZE
        shutil.rmtree(directory)
    assert found >= pages * 3 // 4  # other pages hold tokens of trained groups, which are not read


def test_flipped_bits_inside_tokens_are_noticed(healthy: Healthy, tmp_path: Path) -> None:
    """SQLite itself does not check the content of a page."""
    path = healthy.copy(tmp_path)
    data = bytearray(path.read_bytes())
    tokens, logprobs = tokens_of(40, 64, LENGTHS[40] - 64)
    at = data.find(tokens.tobytes() + logprobs.tobytes())
    assert at > 0
    data[at + 8] ^= 1
    path.write_bytes(data)
    seen = check_truth(path, healthy.checkpoint)
    assert seen.recovery is not None
    assert "a row of table chunks does not have its checksum" in seen.recovery.sentence
    assert "trajectories 48 to 59 are lost" in seen.recovery.sentence
    assert seen.intact == (REPLICATED - BATCHED) * SIZE


def test_tokens_that_are_missing_are_noticed(healthy: Healthy, tmp_path: Path) -> None:
    path = healthy.copy(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM chunks WHERE trajectory_id = 40 AND seq = 0")
        connection.commit()
    seen = check_truth(path, healthy.checkpoint)
    assert seen.recovery is not None
    assert "tokens of trajectory 40 are missing" in seen.recovery.sentence
    assert seen.intact == (REPLICATED - BATCHED) * SIZE


async def test_a_lost_log_is_noticed_by_the_position_of_the_checkpoint(tmp_path: Path) -> None:
    """Without its log the file is a valid older one; trained groups must not come back from it."""

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
    assert f"(the run has seen transaction {position})" in again.recovery.sentence
    assert again.unconsumed_groups() == []  # group 0 was trained and may be among them
    assert (await again.sync()) > position
    await again.close()


def test_a_replacement_that_was_killed_half_way_is_made_again(
    healthy: Healthy, tmp_path: Path
) -> None:
    path = healthy.copy(tmp_path)
    path.rename(tmp_path / (STORE + ".damaged-1"))  # the copy of the replica has no name yet
    (tmp_path / (STORE + ".restored")).write_bytes(b"half")
    seen = check_truth(path, healthy.checkpoint)
    assert seen.recovery is not None
    assert "is not there any more; its replica takes its place" in seen.recovery.sentence
    assert seen.intact == (REPLICATED - BATCHED) * SIZE
