"""`CheckpointManager`: save, find, load and retain the checkpoints of one run.

Invariants
- `save`, `wait`, `close`, `load` (and `newest` in a trainer rank) are collective: every rank calls
  them in the same order. `take_finalized` is not.
- At most one save is under way; the next one, `wait` and `close` wait for it, within
  `checkpoint.timeout_seconds`.
- A save that failed raises on every rank at the next of these calls, and no earlier checkpoint
  has changed. Pruning happens only after a commit.
- Finding verifies every file (ranks share the reading); one with a damaged file is reported and the
  one before it is used.
- Loading verifies every tensor: what the ranks hold afterwards is what they held at the save.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_async.checkpoint.collective import first_error, shared_faults
from megatron_async.checkpoint.manifest import (
    Checkpoint,
    CorruptCheckpoint,
    Manifest,
    check_manifests,
    first_intact,
    list_checkpoints,
    prune,
    step_directory,
)
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import reason_and_file
from megatron_async.runtime.host_buffers import HostBuffers
from megatron_async.trajectory.types import PolicyVersion

if TYPE_CHECKING:  # Megatron is imported where it is used: finding a checkpoint does not need it.
    from megatron_async.checkpoint.state import Checkpointable
    from megatron_async.checkpoint.writer import SaveJob

logger = logging.getLogger(__name__)

_TEMPORARY_PREFIX = ".saving_"


@dataclass(frozen=True)
class Finalized:
    """A commit: the manifest of `step` exists now, and these can still be restored."""

    step: int
    kept: tuple[PolicyVersion, ...]


class CheckpointManager:
    """Checkpoints in `root`, the run's `checkpoints/`."""

    def __init__(
        self, root: Path | str, config: CheckpointConfig, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: all ranks, with a limit for waits for the slowest one's disk."""
        self._root = Path(root)
        self._config = config
        self._group = group
        self._job: SaveJob | None = None
        self._pinned = HostBuffers()  # the save before has ended when the next one begins
        self._first_save = True
        self._finalized: list[Finalized] = []

    # ------------------------------------------------------------ saving

    def save(self, trainer: Checkpointable, extra: Mapping[str, Any]) -> None:
        """Copy the trainer's state and write it, in the background where configured.

        `extra` is any JSON object and belongs to the caller; rank 0's is kept. Raises
        ComponentFailure when this save (synchronous) or the previous one (asynchronous) failed,
        TypeError when `extra` is not JSON.
        """
        from megatron_async.checkpoint.state import current_layout
        from megatron_async.checkpoint.writer import SaveJob, prepare

        self.wait()
        version = trainer.version
        manifest = Manifest(
            lineage=version.lineage,
            step=version.number,
            layout=current_layout(),
            files={},
            trainer=trainer.progress(),
            extra=dict(extra),
        )
        manifest.to_json()  # Raises here rather than in the background.
        temporary = self._root / f"{_TEMPORARY_PREFIX}{version}"
        self._make_room(temporary, version.number)
        self._job = SaveJob(
            prepare(trainer, self._pinned),
            manifest,
            temporary,
            step_directory(self._root, version.number),
            self._config.timeout_seconds,
        )
        self._job.start()
        if not self._config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is committed. Raises ComponentFailure when it failed."""
        job, self._job = self._job, None
        if job is None:
            return
        job.join()
        self._note(job)
        failed = first_error(job.error, self._group)
        if failed is None:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)
        dist.barrier()
        raise self._failure(job.manifest.step, failed)

    def close(self) -> None:
        """Close it before the process group ends."""
        self.wait()

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return step_directory(self._root, step)

    def take_finalized(self) -> list[Finalized]:
        """Rank 0: commits since the last call, oldest first. Not collective, never waits."""
        if self._job is not None and self._job.done:
            self._note(self._job)
        taken, self._finalized = self._finalized, []
        return taken

    def _note(self, job: SaveJob) -> None:
        """Remember and prune after a commit, once (only rank 0 sees a checkpoint)."""
        checkpoint, job.checkpoint = job.checkpoint, None
        if checkpoint is None:
            return
        prune(self._root, self._config.keep)
        kept = tuple(sorted(c.manifest.version for c in list_checkpoints(self._root)))
        self._finalized.append(Finalized(checkpoint.step, kept))

    def _failure(self, step: int, error: str) -> ComponentFailure:
        newest = next(iter(list_checkpoints(self._root)), None)
        last = "there is none before it" if newest is None else f"the last good is {newest.path}"
        return ComponentFailure(
            f"checkpoint of step {step} in {self._root} could not be written ({error}); {last}"
        )

    def _make_room(self, temporary: Path, step: int) -> None:
        """An empty directory to write to; before the first save, what dead processes left goes.

        Rank 0 makes it; an OSError there fails the save on every rank.
        """
        problem = None
        if dist.get_rank() == 0:
            try:
                if self._first_save:
                    for path in self._root.glob(f"{_TEMPORARY_PREFIX}*"):
                        logger.warning("removing %s, a checkpoint that was never finished", path)
                        shutil.rmtree(path)
                temporary.mkdir(parents=True)
            except OSError as error:
                problem = reason_and_file(error)
        if (failed := first_error(problem, self._group)) is not None:
            raise self._failure(step, failed)
        self._first_save = False

    # ------------------------------------------------------------ loading

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, every file verified; None when there is none at all.

        Collective where torch.distributed is initialized. Raises UserError when there are
        checkpoints and every one of them is corrupt, or the newest's manifest is.
        """
        check_manifests(self._root)
        candidates = list_checkpoints(self._root)
        found = first_intact(candidates, partial(shared_faults, group=self._group))
        if found is None and candidates:
            raise UserError(f"every checkpoint in {self._root} is corrupt")
        return found

    def newer_than(self, checkpoint: Checkpoint | None) -> list[Checkpoint]:
        """Return the checkpoints that `newest` passed over for this one."""
        version = None if checkpoint is None else checkpoint.manifest.version
        found = list_checkpoints(self._root)
        return [one for one in found if version is not None and one.manifest.version > version]

    def load(self, trainer: Checkpointable, checkpoint: Checkpoint) -> None:
        """Weights, optimizer, progress; random states where the layout is the one that saved.

        Raises UserError when the checkpoint is of another model, holds weights alone, or when what
        was loaded is not what was saved.
        """
        from megatron_async.checkpoint.state import current_layout, load_state

        saved, current = checkpoint.manifest.layout, current_layout()
        if saved != current:
            logger.warning(
                "checkpoint %s was saved at %s and is loaded at %s: random states start anew",
                checkpoint.path,
                saved,
                current,
            )
        try:
            load_state(trainer, checkpoint, with_random=saved == current, group=self._group)
        except CorruptCheckpoint as error:
            raise UserError(
                f"checkpoint {checkpoint.path} cannot be loaded: {error}; --from-step goes back to "
                "an older one"
            ) from error
        trainer.restore_progress(checkpoint.manifest.trainer)
