"""Provides `CheckpointManager`, which saves, finds, loads and prunes the checkpoints of one run.

Invariants
- `save`, `wait`, `close` and `load` are collective: every rank calls them in the same order. So is
  `newest` if torch.distributed is initialized. `take_finalized` is not collective.
- At most one save is running. The next `save`, `wait` or `close` waits until it has ended, at most
  until `checkpoint.timeout_seconds` after its start.
- The error of a failed save is raised on every rank by the next of these three calls. A failed save
  leaves earlier checkpoints unchanged, because old checkpoints are removed only after a newer one
  is committed.
- The search for the newest checkpoint reads and verifies every file, with the files divided over
  the ranks. A checkpoint with a damaged file is logged, and the one before it is tried.
- Loading compares the checksum of every tensor, so after it the ranks together have exactly the
  values that were saved.
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

# Megatron is imported only where it is used, since finding a checkpoint does not need it.
if TYPE_CHECKING:
    from megatron_async.checkpoint.state import Checkpointable
    from megatron_async.checkpoint.writer import SaveJob

logger = logging.getLogger(__name__)

_TEMPORARY_PREFIX = ".saving_"


@dataclass(frozen=True)
class Finalized:
    """A checkpoint that was committed: its manifest exists.

    Attributes:
        step: Policy number of the checkpoint's weights, which is the number of training steps.
        kept: Versions of the checkpoints that can still be restored after this commit, ascending.
    """

    step: int
    kept: tuple[PolicyVersion, ...]


class CheckpointManager:
    """Saves, finds and loads the checkpoints in the directory `root` (a run's `checkpoints/`), and
    removes old ones."""

    def __init__(
        self, root: Path | str, config: CheckpointConfig, group: dist.ProcessGroup | None = None
    ) -> None:
        """Set up the manager; no file is read or written yet.

        Args:
            root: The run's `checkpoints/`.
            config: The settings `checkpoint.*`.
            group: Process group of all ranks, whose time limit is long enough to wait for the rank
                with the slowest disk; None means the default group.
        """
        self._root = Path(root)
        self._config = config
        self._group = group
        self._job: SaveJob | None = None
        # All saves use the same buffers, because each save waits for the end of the previous one.
        self._pinned = HostBuffers()
        self._first_save = True
        self._finalized: list[Finalized] = []

    # ------------------------------------------------------------ saving

    def save(self, trainer: Checkpointable, extra: Mapping[str, Any]) -> None:
        """Copy the trainer's state to memory and write it to disk as a checkpoint.

        Collective. A previous save that still runs is awaited first. With `checkpoint.asynchronous`
        this returns after the copy, and the files are written in the background.

        Args:
            trainer: The trainer to save.
            extra: JSON object that the manifest stores for the caller; only rank 0's is stored.

        Raises:
            ComponentFailure: If the previous save failed, the directory for this save cannot be
                created, or, without `checkpoint.asynchronous`, this save failed.
            TypeError: If `extra` cannot be written as JSON.
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
        # Raise TypeError here if `extra` is not JSON, rather than later in the background.
        manifest.to_json()
        temporary = self._root / f"{_TEMPORARY_PREFIX}{version}"
        self._make_temporary(temporary, version.number)
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
        """Wait until the running save is committed on rank 0; return at once if none is running.
        Collective.

        Raises:
            ComponentFailure: If the save failed on any rank.
        """
        job, self._job = self._job, None
        if job is None:
            return
        job.join()
        self._record_commit(job)
        failed = first_error(job.error, self._group)
        if failed is None:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)
        dist.barrier()
        raise self._failure(job.manifest.step, failed)

    def close(self) -> None:
        """Wait for the running save. Call `close` before the process group is destroyed."""
        self.wait()

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of policy number `step`."""
        return step_directory(self._root, step)

    def take_finalized(self) -> list[Finalized]:
        """Return the checkpoints that were committed since the last call, oldest first. Only rank 0
        commits, so the result is empty on other ranks.

        Not collective, and never waits.
        """
        if self._job is not None and self._job.done:
            self._record_commit(self._job)
        taken, self._finalized = self._finalized, []
        return taken

    def _record_commit(self, job: SaveJob) -> None:
        """Add the checkpoint that `job` has committed to the result of the next `take_finalized`,
        and remove old checkpoints.

        Do nothing if the job has committed nothing, as on every rank but 0, or if its commit was
        recorded already.
        """
        checkpoint, job.checkpoint = job.checkpoint, None
        if checkpoint is None:
            return
        prune(self._root, self._config.keep)
        kept = tuple(sorted(c.manifest.version for c in list_checkpoints(self._root)))
        self._finalized.append(Finalized(checkpoint.step, kept))

    def _failure(self, step: int, error: str) -> ComponentFailure:
        """Return the error to be raised for a failed save of `step`; its message names the newest
        checkpoint that exists."""
        newest = next(iter(list_checkpoints(self._root)), None)
        last = (
            "no earlier checkpoint exists"
            if newest is None
            else f"the newest finalized checkpoint is {newest.path}"
        )
        return ComponentFailure(
            f"checkpoint of step {step} in {self._root} could not be written ({error}); {last}"
        )

    def _make_temporary(self, temporary: Path, step: int) -> None:
        """Create the empty directory `temporary`, into which all ranks write the checkpoint of
        `step`.

        Before the first save, also remove the temporary directories of saves that were interrupted.
        Only rank 0 creates and removes directories; the other ranks wait for the outcome.

        Raises:
            ComponentFailure: On every rank, if rank 0 fails.
        """
        problem = None
        if dist.get_rank() == 0:
            try:
                if self._first_save:
                    for path in self._root.glob(f"{_TEMPORARY_PREFIX}*"):
                        logger.warning("removing %s, left by an interrupted save", path)
                        shutil.rmtree(path)
                temporary.mkdir(parents=True)
            except OSError as error:
                problem = reason_and_file(error)
        if (failed := first_error(problem, self._group)) is not None:
            raise self._failure(step, failed)
        self._first_save = False

    # ------------------------------------------------------------ loading

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose files are all intact; None if there is no checkpoint.

        Collective if torch.distributed is initialized.

        Raises:
            UserError: If checkpoints exist and all are corrupt, or if a checkpoint with a damaged
                manifest has a larger step than all checkpoints with readable manifests.
        """
        check_manifests(self._root)
        candidates = list_checkpoints(self._root)
        found = first_intact(candidates, partial(shared_faults, group=self._group))
        if found is None and candidates:
            raise UserError(f"every checkpoint in {self._root} is corrupt")
        return found

    def newer_than(self, checkpoint: Checkpoint | None) -> list[Checkpoint]:
        """Return the checkpoints that are newer than `checkpoint`. If `checkpoint` is the result of
        `newest`, these are the corrupt checkpoints that it has skipped.

        The result is empty if `checkpoint` is None.
        """
        version = None if checkpoint is None else checkpoint.manifest.version
        found = list_checkpoints(self._root)
        return [
            checkpoint
            for checkpoint in found
            if version is not None and checkpoint.manifest.version > version
        ]

    def load(self, trainer: Checkpointable, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's weights, optimizer state and progress into the trainer.

        Collective. The states of random generators are loaded only if the layout (the division of
        the model over ranks) is the same as when the checkpoint was saved, because each rank has
        its own.

        Raises:
            UserError: If the checkpoint is of another model, has only weights and no optimizer
                state, or the loaded values are not those that were saved.
        """
        from megatron_async.checkpoint.state import current_layout, load_state

        saved, current = checkpoint.manifest.layout, current_layout()
        if saved != current:
            logger.warning(
                "checkpoint %s was saved at %s and is loaded at %s; random states are not restored",
                checkpoint.path,
                saved,
                current,
            )
        try:
            load_state(trainer, checkpoint, with_random=saved == current, group=self._group)
        except CorruptCheckpoint as error:
            raise UserError(
                f"checkpoint {checkpoint.path} cannot be loaded: {error}. Use --from-step to go "
                "back to an older checkpoint"
            ) from error
        trainer.restore_progress(checkpoint.manifest.trainer)
