"""Returns a run to an older checkpoint (`--resume RUN --from-step N`).

Every process of a run resumes from the newest checkpoint that it finds. So a rollback renames the
newer checkpoints once, before any process starts. The old names are restored only if the resume
does not start: on one machine because it fails before, with Slurm because the job is refused.

Invariants
- Everything that can be refused is refused before the first checkpoint is renamed.
- The newest checkpoint is renamed first, and each rename is durable before the next. A crash or
  power loss in between leaves a run that resumes from one of its checkpoints; the same command then
  renames the others.
- The trajectory store is not changed here. The resume starts a new lineage at the older checkpoint.
  In that lineage, trajectories on which the abandoned steps had trained can be trained on again.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_async.checkpoint.manifest import (
    Checkpoint,
    damaged_after,
    list_checkpoints,
    open_checkpoint,
)
from megatron_async.errors import UserError
from megatron_async.files.disk import force_to_disk
from megatron_async.run_directory import RunDirectory
from megatron_async.store.location import check_not_in_use
from megatron_async.store.reader import StoreReader
from megatron_async.store.state import check_serves


@dataclass(frozen=True)
class Rollback:
    """A return to an older checkpoint that has passed all checks. It is carried out by renaming the
    newer checkpoints.

    Attributes:
        target: The checkpoint to which the run returns.
        newer: Old and new path of each newer checkpoint: first the damaged ones, then the others
            from the newest to the oldest.
    """

    target: Checkpoint
    newer: tuple[tuple[Path, Path], ...]

    def carry_out(self) -> list[Path]:
        """Rename the newer checkpoints and return their new paths.

        Raises:
            UserError: A checkpoint cannot be renamed.
        """
        return [_rename_durably(*names) for names in self.newer]

    def undo(self) -> None:
        """Restore the old names of the checkpoints that `carry_out` has renamed, because the resume
        did not start.

        Raises:
            UserError: A checkpoint cannot be renamed.
        """
        for path, renamed in reversed(self.newer):
            if renamed.exists():
                _rename_durably(renamed, path)


def rollback_to(directory: RunDirectory, step: int) -> Rollback:
    """Check that a run can return to the checkpoint of `step`; return the rollback, which has
    renamed nothing yet.

    Raises:
        UserError: The run has no such checkpoint, or cannot resume from it.
    """
    kept = list_checkpoints(directory.checkpoints)
    index = next((i for i, checkpoint in enumerate(kept) if checkpoint.step == step), None)
    if index is None:
        raise UserError(
            f"--from-step is {step}, but {directory.path} has no checkpoint of that step; it has "
            f"{_steps(kept)}"
        )
    target = open_checkpoint(kept[index].path)
    check_not_in_use(directory.store_file)
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    check_serves(directory.store_file, content.tree, content.exported, target.manifest.version)
    damaged = {
        path: path.with_name(f"abandoned_damaged_{path.name}")
        for path in damaged_after(directory.checkpoints, step)
    }
    newer = {
        checkpoint.path: checkpoint.path.with_name(f"abandoned_{checkpoint.manifest.version}")
        for checkpoint in kept[:index]
    }
    moves = tuple((damaged | newer).items())
    for path, new in moves:
        if new.exists():
            raise UserError(
                f"--from-step is {step}, but checkpoint {path} cannot be renamed: {new} already "
                "exists"
            )
    return Rollback(target, moves)


def _steps(kept: Sequence[Checkpoint]) -> str:
    """Format the steps of the checkpoints `kept` for a message, such as "steps 2, 4" or "none"."""
    steps = sorted(checkpoint.step for checkpoint in kept)
    if not steps:
        return "none"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _rename_durably(path: Path, new: Path) -> Path:
    """Rename the checkpoint `path` to `new`, so that the new name survives a power loss; return
    `new`.

    Raises:
        UserError: The checkpoint cannot be renamed.
    """
    try:
        path.rename(new)
        # Without this, a power loss could restore the old name, and a resume would then use the
        # abandoned checkpoint.
        force_to_disk(new.parent)
        return new
    except OSError as error:
        raise UserError(
            f"checkpoint {path} cannot be renamed to {new}: {error.strerror}"
        ) from error
