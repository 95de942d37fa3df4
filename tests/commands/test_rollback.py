"""Going back to an older checkpoint: what is refused, and what becomes of the newer ones.

The lineage that begins there is the one that every later resume goes on with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_async.checkpoint.manifest import (
    COPY_NAME,
    MANIFEST_NAME,
    Manifest,
    SavedLayout,
    finalize,
    find_latest,
    hash_file,
    step_directory,
)
from megatron_async.commands import rollback
from megatron_async.commands.rollback import rollback_to
from megatron_async.config import build_config
from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.launcher.preflight import check_resume
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import PolicyVersion
from tests.trajectory.builders import prompt, scored_group


def save(run: RunDirectory, lineage: int, step: int) -> None:
    """A finalized checkpoint with one file."""
    temporary = run.checkpoints / ".saving"
    temporary.mkdir(parents=True)
    (temporary / "weights").write_bytes(b"weights")
    files = {"weights": hash_file(temporary / "weights")}
    manifest = Manifest(lineage=lineage, step=step, layout=SavedLayout(1, 1, 1), files=files)
    finalize(temporary, step_directory(run.checkpoints, step), manifest)


@contextmanager
def lineage_of(
    run: RunDirectory, lineage: int, start: PolicyVersion | None
) -> Iterator[TrajectoryStore]:
    """The store of a lineage that goes on from `start`."""
    step, parent = (0, None) if start is None else (start.number, start.lineage)
    settings = StoreConfig(compact_after_checkpoints=1)
    store = TrajectoryStore.open(
        run.store_file, settings, lineage=lineage, step=step, parent=parent
    )
    try:
        yield store
    finally:
        asyncio.run(store.close())


def resume(run: RunDirectory) -> PolicyVersion:
    """Where a plain `--resume` goes on."""
    newest = find_latest(run.checkpoints)
    assert newest is not None
    return newest.manifest.version


def waiting(store: TrajectoryStore) -> list[int]:
    return [group.group_id for group in store.unconsumed_groups()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Six updates, update n on group n; checkpoints of steps 2, 4 and 6."""
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()

    async def train() -> None:
        store = TrajectoryStore.open(directory.store_file)
        for step in range(6):
            group = await scored_group(store)
            store.mark_batched([group.group_id], step)
        await store.close()

    asyncio.run(train())
    for step in (2, 4, 6):
        save(directory, 0, step)
    directory.lineage_file.write_text("0")
    return directory


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_newer_checkpoints_are_set_aside_and_the_next_resume_goes_on_from_the_step(
    run: RunDirectory,
) -> None:
    back = rollback_to(run, 2)
    assert names(run) == ["step_000002", "step_000004", "step_000006"], "nothing is changed yet"
    assert [place.name for place in back.carry_out()] == ["abandoned_0.6", "abandoned_0.4"]
    assert names(run) == ["abandoned_0.4", "abandoned_0.6", "step_000002"]
    assert resume(run) == (0, 2)


def test_what_the_abandoned_steps_trained_is_trained_once_along_the_new_line(
    run: RunDirectory,
) -> None:
    """With a death of the new lineage before its first checkpoint, and one after it."""
    rollback_to(run, 2).carry_out()
    with lineage_of(run, 1, resume(run)) as store:
        assert waiting(store) == [2, 3, 4, 5]
        store.mark_batched([5], 2)
    assert resume(run) == (0, 2), "never the abandoned step 6"
    with lineage_of(run, 2, resume(run)) as store:
        assert waiting(store) == [2, 3, 4, 5]
        store.mark_batched([4], 2)
        store.mark_batched([2], 3)
        asyncio.run(store.sync())
        save(run, 2, 4)
        store.mark_batched([3], 4)
    assert resume(run) == (2, 4)
    with lineage_of(run, 3, resume(run)) as store:
        assert waiting(store) == [3, 5]
        assert store.counts()["batched"] == 8  # of groups 0, 1, 4 and 2


def test_the_newest_checkpoint_may_be_named_too(run: RunDirectory) -> None:
    assert rollback_to(run, 6).carry_out() == []
    assert resume(run) == (0, 6)


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--from-step is 2, .* it has none$"):
        rollback_to(RunDirectory(tmp_path), 2)


def test_a_name_that_is_taken_is_refused_before_anything_is_set_aside(run: RunDirectory) -> None:
    """Somebody copied an abandoned checkpoint back where they should have moved it."""
    (run.checkpoints / "abandoned_0.4").mkdir()
    (run.checkpoints / "abandoned_0.4" / "kept").touch()
    with pytest.raises(UserError, match=r"_000004 cannot be renamed: .*_0\.4 already exists$"):
        rollback_to(run, 2)
    assert resume(run) == (0, 6)


def test_each_is_aside_for_good_before_the_next(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss brings back what was not made durable: never an older one without the newer."""
    durable = []
    monkeypatch.setattr(rollback, "force_to_disk", lambda path: durable.append(names(run)))
    rollback_to(run, 2).carry_out()
    assert durable == [
        ["abandoned_0.6", "step_000002", "step_000004"],
        ["abandoned_0.4", "abandoned_0.6", "step_000002"],
    ]


def test_a_corrupt_checkpoint_is_refused_and_the_newer_ones_stay(run: RunDirectory) -> None:
    (step_directory(run.checkpoints, 4) / "weights").write_bytes(b"weighty")
    with pytest.raises(UserError, match=r"step_000004 is corrupt: weights"):
        rollback_to(run, 4)
    assert resume(run) == (0, 6)


def test_a_damaged_manifest_is_refused_and_going_back_sets_it_aside(run: RunDirectory) -> None:
    for name in (MANIFEST_NAME, COPY_NAME):
        (step_directory(run.checkpoints, 6) / name).write_text("{")
    with pytest.raises(
        UserError, match=r"step_000006 is damaged: .*--from-step \(available: 4, 2\)"
    ):
        check_resume(run, build_config({}))
    check_resume(run, build_config({}), from_step=4)
    assert [place.name for place in rollback_to(run, 4).carry_out()] == [
        "abandoned_damaged_step_000006"
    ]
    check_resume(run, build_config({}))
    assert resume(run) == (0, 4)


@pytest.mark.parametrize("content", [None, "", "\0\0", "-1", "two"])
def test_a_lost_number_of_the_lineage_is_refused_by_name(
    run: RunDirectory, content: str | None
) -> None:
    if content is None:
        run.lineage_file.unlink()
    else:
        run.lineage_file.write_text(content)
    for refused in (lambda: check_resume(run, build_config({})), run.next_lineage):
        with pytest.raises(UserError, match=r"lineage, the number of the run's newest lineage, "):
            refused()
    run.lineage_file.write_text("4")
    assert run.next_lineage() == 5


def test_a_run_that_goes_on_is_refused(run: RunDirectory) -> None:
    with lineage_of(run, 1, PolicyVersion(0, 6)), pytest.raises(UserError, match=r"is in use by"):
        rollback_to(run, 2)


def test_a_checkpoint_whose_trajectories_were_exported_is_refused(run: RunDirectory) -> None:
    """A run keeps checkpoints that it reported to the store; this one came back from elsewhere."""

    async def compact(store: TrajectoryStore) -> None:
        store.add_group(prompt(), 1)
        await store.checkpoint_finalized(6, [PolicyVersion(0, 4), PolicyVersion(0, 6)])
        await store.close()

    store = TrajectoryStore.open(
        run.store_file, StoreConfig(compact_after_checkpoints=1), lineage=1, step=6, parent=0
    )
    asyncio.run(compact(store))
    with pytest.raises(UserError, match=r"checkpoint 0\.2 cannot be resumed from: .* exported"):
        rollback_to(run, 2)
    assert rollback_to(run, 4).target.step == 4
