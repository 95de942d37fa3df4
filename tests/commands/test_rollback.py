"""Tests the rollback to an older checkpoint: the refusals, the renaming of newer checkpoints, and
the lineages of later resumes.

Every later resume continues the lineage that starts at the older checkpoint.
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
    """Write a finalized checkpoint that has one file."""
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
    """Open the store for a lineage that continues from `start`; None starts a run."""
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
    """Return the version from which a plain `--resume` continues."""
    newest = find_latest(run.checkpoints)
    assert newest is not None
    return newest.manifest.version


def waiting(store: TrajectoryStore) -> list[int]:
    return [group.group_id for group in store.unconsumed_groups()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Create a run of six updates, in which update n trains group n, with checkpoints of steps 2, 4
    and 6."""
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


def test_rollback_renames_newer_checkpoints_and_resume_uses_the_step(
    run: RunDirectory,
) -> None:
    back = rollback_to(run, 2)
    assert names(run) == ["step_000002", "step_000004", "step_000006"], (
        "planning must not rename any checkpoint"
    )
    assert [path.name for path in back.carry_out()] == ["abandoned_0.6", "abandoned_0.4"]
    assert names(run) == ["abandoned_0.4", "abandoned_0.6", "step_000002"]
    assert resume(run) == (0, 2)


def test_groups_of_abandoned_steps_are_trained_once_on_the_new_lineage(
    run: RunDirectory,
) -> None:
    """The new lineage dies twice: before its first checkpoint, and after it."""
    rollback_to(run, 2).carry_out()
    with lineage_of(run, 1, resume(run)) as store:
        assert waiting(store) == [2, 3, 4, 5]
        store.mark_batched([5], 2)
    assert resume(run) == (0, 2), "the abandoned step 6 must not be used"
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
        assert store.counts()["batched"] == 8  # Members of groups 0, 1, 4 and 2.


def test_rollback_to_the_newest_checkpoint_renames_no_checkpoint(run: RunDirectory) -> None:
    assert rollback_to(run, 6).carry_out() == []
    assert resume(run) == (0, 6)


def test_rollback_is_refused_when_the_run_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--from-step is 2, .* it has none$"):
        rollback_to(RunDirectory(tmp_path), 2)


def test_rollback_renames_no_checkpoint_when_a_target_name_exists(run: RunDirectory) -> None:
    """The name exists if a user has copied an abandoned checkpoint back instead of moving it."""
    (run.checkpoints / "abandoned_0.4").mkdir()
    (run.checkpoints / "abandoned_0.4" / "kept").touch()
    with pytest.raises(UserError, match=r"_000004 cannot be renamed: .*_0\.4 already exists$"):
        rollback_to(run, 2)
    assert resume(run) == (0, 6)


def test_rollback_makes_each_rename_durable_before_the_next(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss undoes renames that are not durable; it must never restore an older checkpoint
    without the newer ones."""
    durable = []
    monkeypatch.setattr(rollback, "force_to_disk", lambda path: durable.append(names(run)))
    rollback_to(run, 2).carry_out()
    assert durable == [
        ["abandoned_0.6", "step_000002", "step_000004"],
        ["abandoned_0.4", "abandoned_0.6", "step_000002"],
    ]


def test_rollback_to_a_corrupt_checkpoint_is_refused_and_renames_none(run: RunDirectory) -> None:
    (step_directory(run.checkpoints, 4) / "weights").write_bytes(b"weighty")
    with pytest.raises(UserError, match=r"step_000004 is corrupt: weights"):
        rollback_to(run, 4)
    assert resume(run) == (0, 6)


def test_damaged_manifest_refuses_a_resume_and_is_renamed_by_a_rollback(run: RunDirectory) -> None:
    for name in (MANIFEST_NAME, COPY_NAME):
        (step_directory(run.checkpoints, 6) / name).write_text("{")
    with pytest.raises(
        UserError, match=r"step_000006 is damaged: .*--from-step \(available: 4, 2\)"
    ):
        check_resume(run, build_config({}))
    check_resume(run, build_config({}), from_step=4)
    assert [path.name for path in rollback_to(run, 4).carry_out()] == [
        "abandoned_damaged_step_000006"
    ]
    check_resume(run, build_config({}))
    assert resume(run) == (0, 4)


@pytest.mark.parametrize("content", [None, "", "\0\0", "-1", "two"])
def test_resume_is_refused_when_the_lineage_file_is_missing_or_damaged(
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


def test_rollback_is_refused_when_the_store_is_in_use(run: RunDirectory) -> None:
    with lineage_of(run, 1, PolicyVersion(0, 6)), pytest.raises(UserError, match=r"is in use by"):
        rollback_to(run, 2)


def test_rollback_is_refused_when_trajectories_of_the_step_were_exported(run: RunDirectory) -> None:
    """A run keeps the checkpoints that it has reported to the store. This checkpoint was not
    reported; it came back from elsewhere."""

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
