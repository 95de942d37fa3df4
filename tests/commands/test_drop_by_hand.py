"""`megatron-async trajectories RUN --drop ID`: out of a run that has stopped, for good."""

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
    """Groups of two: 0 is trained and committed, 1 only trained; 2 was running."""
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
    """What a resume from the checkpoint finds."""

    async def scenario() -> dict[int, tuple[TrajectoryState, DropReason | None]]:
        store = TrajectoryStore.open(run.store_file, lineage=1, step=1, parent=0)
        assert store.recovery is None
        found = {i: store.load_trajectory(i) for i in range(6)}
        await store.close()
        return {i: (t.state, t.drop_reason) for i, t in found.items()}

    return asyncio.run(scenario())


GONE = (TrajectoryState.DROPPED, DropReason.USER)


@pytest.mark.parametrize("member", [4, 5])
def test_a_group_that_keeps_the_run_from_going_on_is_met_no_more(
    run: RunDirectory, member: int
) -> None:
    assert "dropped (user), with its group: 4, 5" in call(run, "--drop", str(member))
    with closing(StoreReader(run.store_file)) as reader:
        assert reader.trajectory(4).response_length == 70  # what it wrote can still be looked at
    found = states(run)
    assert found[4] == found[5] == GONE
    assert found[0][0] is TrajectoryState.BATCHED and found[2][0] is TrajectoryState.SCORED


def test_so_is_one_whose_batch_no_checkpoint_holds(run: RunDirectory) -> None:
    assert drop_group_of(run.store_file, 2, COMMITTED) == [2, 3]
    assert states(run)[2] == states(run)[3] == GONE


def test_what_a_checkpoint_holds_stays(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"trained in step 0, which checkpoint 0\.1 contains"):
        drop_group_of(run.store_file, 0, COMMITTED)
    assert {state for state, _ in states(run).values()}.isdisjoint({TrajectoryState.DROPPED})


def test_what_is_not_there_or_dropped_is_refused(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"--drop is 77, which is not a trajectory"):
        drop_group_of(run.store_file, 77, COMMITTED)
    drop_group_of(run.store_file, 4, COMMITTED)
    with pytest.raises(UserError, match=r"--drop is 5, .* already been dropped \(user\)"):
        drop_group_of(run.store_file, 5, COMMITTED)


def test_a_run_that_goes_on_is_refused_by_name_of_who_has_it(run: RunDirectory) -> None:
    with hold_run_lock(run, "train"), pytest.raises(UserError, match=r"is in use by .*train"):
        call(run, "--drop", "4")

    async def writing() -> None:
        store = TrajectoryStore.open(run.store_file)
        with pytest.raises(UserError, match="is in use by"):
            drop_group_of(run.store_file, 4, None)
        await store.close()

    asyncio.run(writing())


def test_it_is_not_combined_with_show(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="--drop 4 cannot be combined with --show 4"):
        call(run, "--drop", "4", "--show", "4")


def test_a_run_without_a_store_gets_none(run: RunDirectory) -> None:
    run.store_file.unlink()
    with pytest.raises(UserError, match=r"trajectory store .* does not exist"):
        call(run, "--drop", "4")
    assert not run.store_file.exists()


def test_the_newest_checkpoint_decides_what_is_committed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manifest:
        version = COMMITTED

    newest = Checkpoint(run.checkpoints / "step_000001", Manifest())  # type: ignore[arg-type]
    monkeypatch.setattr("megatron_async.commands.trajectories.list_checkpoints", lambda _: [newest])
    with pytest.raises(UserError, match=r"checkpoint 0\.1 contains"):
        call(run, "--drop", "1")
