"""Tests `megatron-async trajectories RUN --drop ID`, which drops a group permanently from a stopped
run."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.checkpoint.manifest import Checkpoint
from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.launcher.run_lock import hold_run_lock
from megatron_async.run_directory import RunDirectory
from megatron_async.store.drop import drop_group_of
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState
from tests.commands.test_trajectories_command import call
from tests.trajectory.builders import append, prompt, scored_group


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Create a run with groups of two members: group 0 is trained and committed, group 1 is only
    trained, and group 2 was running."""
    config = build_config({"name": "run", "root": str(tmp_path), "model": {"path": "m"}})
    run = RunDirectory.create(config)

    async def scenario() -> None:
        store = TrajectoryStore.open(run.store_file)
        for step in range(2):
            group = await scored_group(store)
            store.mark_batched([group.group_id], step)
        (first, _) = store.add_group(prompt(), 2).trajectories
        store.begin_request(first.trajectory_id)
        append(store, first.trajectory_id, 0, 70)
        await store.close()

    asyncio.run(scenario())
    return run


COMMITTED = PolicyVersion(0, 1)


def states(run: RunDirectory) -> dict[int, tuple[TrajectoryState, DropReason | None]]:
    """Return state and drop reason of each trajectory, as a resume from the checkpoint finds
    them."""

    async def scenario() -> dict[int, tuple[TrajectoryState, DropReason | None]]:
        store = TrajectoryStore.open(run.store_file, lineage=1, step=1, parent=0)
        assert store.recovery is None
        found = {i: store.load_trajectory(i) for i in range(6)}
        await store.close()
        return {i: (t.state, t.drop_reason) for i, t in found.items()}

    return asyncio.run(scenario())


DROPPED_BY_USER = (TrajectoryState.DROPPED, DropReason.USER)


@pytest.mark.parametrize("member", [4, 5])
def test_drop_removes_unfinished_group_of_the_trajectory_from_the_run(
    run: RunDirectory, member: int
) -> None:
    assert "dropped (user), with its group: 4, 5" in call(run, "--drop", str(member))
    with closing(StoreReader(run.store_file)) as reader:
        assert reader.trajectory(4).response_length == 70  # Dropped tokens stay readable.
    found = states(run)
    assert found[4] == found[5] == DROPPED_BY_USER
    assert found[0][0] is TrajectoryState.BATCHED and found[2][0] is TrajectoryState.SCORED


def test_drop_accepts_batched_group_when_no_checkpoint_contains_its_batch(
    run: RunDirectory,
) -> None:
    assert drop_group_of(run.store_file, 2, COMMITTED) == [2, 3]
    assert states(run)[2] == states(run)[3] == DROPPED_BY_USER


def test_drop_refuses_group_when_a_checkpoint_contains_its_batch(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"trained in step 0, which checkpoint 0\.1 contains"):
        drop_group_of(run.store_file, 0, COMMITTED)
    assert {state for state, _ in states(run).values()}.isdisjoint({TrajectoryState.DROPPED})


def test_drop_refuses_unknown_and_already_dropped_trajectories(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"--drop is 77, which is not a trajectory"):
        drop_group_of(run.store_file, 77, COMMITTED)
    drop_group_of(run.store_file, 4, COMMITTED)
    with pytest.raises(UserError, match=r"--drop is 5, .* already been dropped \(user\)"):
        drop_group_of(run.store_file, 5, COMMITTED)


def test_drop_is_refused_with_the_holder_when_the_run_is_in_use(run: RunDirectory) -> None:
    with hold_run_lock(run, "train"), pytest.raises(UserError, match=r"is in use by .*train"):
        call(run, "--drop", "4")

    async def drop_while_open() -> None:
        store = TrajectoryStore.open(run.store_file)
        with pytest.raises(UserError, match="is in use by"):
            drop_group_of(run.store_file, 4, None)
        await store.close()

    asyncio.run(drop_while_open())


def test_drop_option_cannot_be_combined_with_show(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="--drop 4 cannot be combined with --show 4"):
        call(run, "--drop", "4", "--show", "4")


def test_drop_creates_no_store_when_the_run_has_none(run: RunDirectory) -> None:
    run.store_file.unlink()
    with pytest.raises(UserError, match=r"trajectory store .* does not exist"):
        call(run, "--drop", "4")
    assert not run.store_file.exists()


def test_drop_command_takes_the_committed_version_from_newest_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manifest:
        version = COMMITTED

    newest = Checkpoint(run.checkpoints / "step_000001", Manifest())  # type: ignore[arg-type]
    monkeypatch.setattr("megatron_async.commands.trajectories.list_checkpoints", lambda _: [newest])
    with pytest.raises(UserError, match=r"checkpoint 0\.1 contains"):
        call(run, "--drop", "1")
