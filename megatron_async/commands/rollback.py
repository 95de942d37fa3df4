"""Going back: a run goes on from an older checkpoint that it keeps (`--resume RUN --from-step N`).

Every process of a run goes on from the newest checkpoint that it finds. So going back is to take
the newer ones out of its sight, once, before anything starts: they get another name and stay there,
unless a resume on one machine fails before it has begun, or Slurm refuses the job of one.

Invariants
- Everything that can be refused is refused before the first name changes.
- The newest goes first, each durably before the next. A crash or a power loss in between leaves a
  run that goes on from one of its checkpoints, and the same command goes on with the rest.
- What the abandoned steps had trained is scored again by the line that a resume begins: nothing
  here touches the store.
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
    """The checkpoint to go on from, and the directories of newer ones with their new names.

    `newer`: newest first, after those whose manifest is damaged.
    """

    target: Checkpoint
    newer: tuple[tuple[Path, Path], ...]

    def carry_out(self) -> list[Path]:
        """Set the newer ones aside; returns where they are now. Raises UserError."""
        return [_set_aside(*names) for names in self.newer]

    def undo(self) -> None:
        """Bring back what was set aside, of a resume that did not begin. Raises UserError."""
        for path, place in reversed(self.newer):
            if place.exists():
                _set_aside(place, path)


def rollback_to(directory: RunDirectory, step: int) -> Rollback:
    """Changes nothing. Raises UserError when the run cannot go on from `step`."""
    kept = list_checkpoints(directory.checkpoints)
    place = next((i for i, checkpoint in enumerate(kept) if checkpoint.step == step), None)
    if place is None:
        raise UserError(
            f"--from-step is {step}, and {directory.path} keeps no checkpoint of that step; "
            f"it keeps {_steps(kept)}"
        )
    target = open_checkpoint(kept[place].path)
    check_not_in_use(directory.store_file)
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    check_serves(directory.store_file, content.tree, content.exported, target.manifest.version)
    damaged = {
        path: path.with_name(f"abandoned_damaged_{path.name}")
        for path in damaged_after(directory.checkpoints, step)
    }
    newer = {
        one.path: one.path.with_name(f"abandoned_{one.manifest.version}") for one in kept[:place]
    }
    moves = tuple((damaged | newer).items())
    for path, taken in moves:
        if taken.exists():
            raise UserError(
                f"--from-step is {step}, and checkpoint {path} cannot be set aside: {taken} exists "
                "already"
            )
    return Rollback(target, moves)


def _steps(kept: Sequence[Checkpoint]) -> str:
    steps = sorted(checkpoint.step for checkpoint in kept)
    if not steps:
        return "none"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _set_aside(path: Path, place: Path) -> Path:
    try:
        path.rename(place)
        # else a power loss may bring it back, and a plain resume would go on from it
        force_to_disk(place.parent)
        return place
    except OSError as error:
        raise UserError(
            f"checkpoint {path} cannot be set aside as {place}: {error.strerror}"
        ) from error
