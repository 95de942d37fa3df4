"""One save of one rank: an in-memory copy, then files, then (on rank 0) the commit.

Invariants
- All collectives happen in `prepare`, on the caller's thread; `SaveJob` itself only touches files
  and may run in a background thread while training changes the weights.
- Ranks tell each other through small status files in the temporary directory (a shared file
  system, as any checkpoint needs), so a commit needs no collective.
- The manifest is written last, by rank 0, after every rank's files are complete. A save that fails
  at any point leaves the earlier checkpoints as they were.
- Every wait has a time limit.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megatron_async.checkpoint.manifest import (
    Checkpoint,
    FileRecord,
    Manifest,
    finalise,
    hash_file,
    write_atomically,
)
from megatron_async.checkpoint.state import ShardedState

_POLL_SECONDS = 0.02


class RankWriter(FileSystemWriter):
    """torch's file writer, with planning and writing taken apart.

    One thread per rank: with more, torch loses an error that is raised in the others.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self._plan: SavePlan | None = None
        self._planner: SavePlanner | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called at the end of planning, by Megatron's `save_state_dict_async_plan`."""
        self._plan, self._planner = plan, planner

    def write(self) -> list[WriteResult]:
        """Write this rank's shards and release them. Raises OSError."""
        assert self._plan is not None and self._planner is not None
        results: list[WriteResult] = self.write_data(self._plan, self._planner).wait()
        self._plan = self._planner = None
        return results


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports when its part is done; `error` is None when it succeeded."""

    files: Mapping[str, FileRecord]
    error: str | None


@dataclass
class Prepared:
    """The copy in memory of one rank's share. `common` and `metadata` matter on rank 0."""

    writer: RankWriter
    metadata: Metadata | None
    common: Mapping[str, Any]


def prepare(state: ShardedState, temporary: Path, *, validate: bool) -> Prepared:
    """Collective. Copy the live tensors to host memory and plan who writes what.

    `temporary` must exist. `validate` checks that the shards cover every tensor exactly once.
    """
    sharded, common = save_preprocess(state, validate)
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            leaf.data = leaf.data.detach().to("cpu", copy=True)
    sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = RankWriter(temporary)
    (_, metadata, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(sharded, False),
        writer,
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    return Prepared(writer, metadata, _copied(common))


def _copied(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """The few unsharded values (parameter groups), cut off from the live ones."""
    copied: Mapping[str, Any] = pickle.loads(pickle.dumps(common))
    return copied


class SaveJob:
    """Writes a prepared share; on rank 0 also waits for the others and commits.

    `start` runs it in a thread, `run` in the caller's. After `join`, `error` is None or a
    sentence, and `checkpoint` is the committed checkpoint (rank 0 only).
    """

    def __init__(
        self,
        prepared: Prepared,
        manifest: Manifest,
        temporary: Path,
        target: Path,
        timeout_seconds: float,
    ) -> None:
        self._prepared = prepared
        self._manifest = manifest
        self._temporary = temporary
        self._target = target
        self._deadline = time.monotonic() + timeout_seconds
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self.error: str | None = "it did not end"
        self.checkpoint: Checkpoint | None = None

    @property
    def step(self) -> int:
        """The step that is being saved."""
        return self._manifest.step

    @property
    def temporary(self) -> Path:
        """The directory that becomes the checkpoint."""
        return self._temporary

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Write in the background."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the files are written, at most the time limit of the save."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self.error = "the files were not written within the time limit"

    def run(self) -> None:
        """Write, report, commit. Errors of the disk end up in `error`."""
        try:
            self._write_share()
            if self._rank == 0:
                self._commit()
            self.error = None
        except (OSError, RuntimeError, pickle.PickleError) as error:
            self.error = _describe(error)

    def _write_share(self) -> None:
        try:
            results = self._prepared.writer.write()
            names = {result.storage_data.relative_path for result in results}
            files = {name: hash_file(self._temporary / name) for name in sorted(names)}
            write_atomically(self._results_path(self._rank), pickle.dumps(results))
            status = RankStatus(files, None)
        except (OSError, RuntimeError) as error:
            # Make room first: on a full disk the report itself would not fit.
            for path in self._temporary.glob(f"__{self._rank}_*"):
                path.unlink(missing_ok=True)
            self._report(RankStatus({}, _describe(error)))
            raise
        self._report(status)

    def _report(self, status: RankStatus) -> None:
        write_atomically(self._status_path(self._rank), json.dumps(asdict(status)).encode())

    def _commit(self) -> None:
        """Rank 0, once all ranks have reported success."""
        files: dict[str, FileRecord] = {}
        results: list[list[WriteResult]] = []
        for rank in range(self._world_size):
            status = self._await_status(rank)
            if status.error is not None:
                raise OSError(f"rank {rank}: {status.error}")
            files.update(status.files)
            results.append(pickle.loads(self._results_path(rank).read_bytes()))
        assert self._prepared.metadata is not None
        self._prepared.writer.finish(self._prepared.metadata, results)
        torch.save(self._prepared.common, self._temporary / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._temporary))
        for rank in range(self._world_size):
            self._status_path(rank).unlink()
            self._results_path(rank).unlink()
        for path in sorted(self._temporary.iterdir()):
            if path.name not in files:
                files[path.name] = hash_file(path)
                _sync(path)
        manifest = replace(
            self._manifest, files=files, written_at=datetime.now(UTC).isoformat(timespec="seconds")
        )
        self.checkpoint = finalise(self._temporary, self._target, manifest)

    def _await_status(self, rank: int) -> RankStatus:
        path = self._status_path(rank)
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"rank {rank} did not report its files within the time limit")
            time.sleep(_POLL_SECONDS)
        content = json.loads(path.read_text())
        return RankStatus(
            {name: FileRecord(**record) for name, record in content["files"].items()},
            content["error"],
        )

    def _status_path(self, rank: int) -> Path:
        return self._temporary / f"rank_{rank:05d}.json"

    def _results_path(self, rank: int) -> Path:
        return self._temporary / f"rank_{rank:05d}.results"


def _describe(error: BaseException) -> str:
    """The operating system's words where there are any.

    torch's zip writer fails with a RuntimeError of its own while it handles the OSError.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}" if cause is None else str(cause)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
