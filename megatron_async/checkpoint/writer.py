"""Writes one rank's share of a checkpoint: copies the state in memory and writes the copy to files.
Rank 0 also commits the checkpoint.

Invariants
- `prepare` copies this rank's share of the state, without communication with other ranks. `SaveJob`
  uses only that copy and files, so it may run in a background thread while training changes the
  weights.
- A checksum is computed from the copy that is written, or on the GPU from the values at the moment
  at which they are copied.
- Ranks report to rank 0 through small status files in the temporary directory, so that a commit in
  the background needs no collective operation. The directory is on a shared file system, which a
  checkpoint of several nodes needs in any case.
- Rank 0 writes the manifest last, after every rank's files are complete and a check that all slices
  together contain every element of every tensor once. A save that fails at any point leaves earlier
  checkpoints unchanged.
- Every wait has a time limit.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megatron_async.checkpoint.checksum import TensorTally, tally
from megatron_async.checkpoint.files import RankFiles, max_entry_bytes, piece_key
from megatron_async.checkpoint.manifest import (
    Checkpoint,
    CorruptCheckpoint,
    FileRecord,
    Manifest,
    TensorRecord,
    finalize,
    hash_file,
    write_atomically,
)
from megatron_async.checkpoint.random_state import random_state, save_random_state
from megatron_async.checkpoint.state import (
    Checkpointable,
    TensorPiece,
    check_rounding,
    saved_shards,
    tensor_names,
)
from megatron_async.files.disk import reason_and_file
from megatron_async.runtime.host_buffers import HostBuffers

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class RankStatus:
    """Report of one rank to rank 0 that it has written its share of a checkpoint, or why it failed.

    Attributes:
        files: Records of the files it wrote, by name.
        tensors: Checksums and element counts of the slices that it wrote, by the name of their
            tensor.
        error: The reason of the failure; None if the rank succeeded.
    """

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    tensors: Mapping[str, TensorTally] = field(default_factory=dict)
    error: str | None = None


_STATUS: Final = TypeAdapter(RankStatus)


@dataclass(frozen=True, eq=False)
class CopiedPiece:
    """Copy of a slice of a tensor in host memory.

    Attributes:
        piece: The copied slice.
        on_device: Checksum of the slice, if it was copied from a GPU and computed there; None if it
            is computed later from the copy.
    """

    piece: TensorPiece
    on_device: Tensor | None

    @classmethod
    def of(cls, live: TensorPiece, number: int, pinned: HostBuffers) -> "CopiedPiece":
        """Copy a slice to host memory. A slice on a GPU is copied into a pinned buffer that is kept
        from save to save.

        Args:
            live: The slice to copy.
            number: Number of the slice, which selects its buffer in `pinned`.
            pinned: Buffers of earlier saves, which are overwritten.
        """
        values = live.values
        if not values.is_cuda:
            return cls(replace(live, values=values.to("cpu", copy=True)), None)
        return cls(replace(live, values=pinned.copy(number, values)), live.checksum())

    def checksum(self) -> int:
        """Return the checksum of the slice."""
        return int(self.piece.checksum() if self.on_device is None else self.on_device)


@dataclass
class Prepared:
    """A rank's in-memory copy of its share of a checkpoint.

    Attributes:
        pieces: Copies of the slices that the rank saves.
        random: States of the rank's random generators.
        names: Names of the tensors that all ranks together save.
        error: Reason why the checkpoint must not be saved; None if the copy is valid.
    """

    pieces: list[CopiedPiece]
    random: Mapping[str, Tensor]
    names: frozenset[str]
    error: str | None = None


def prepare(trainer: Checkpointable, pinned: HostBuffers) -> Prepared:
    """Copy this rank's share of the trainer's state to host memory, and return the copy.

    This overwrites the copy of the previous call with the same `pinned` buffers.
    """
    try:
        check_rounding(trainer)
    except CorruptCheckpoint as error:
        return Prepared([], {}, frozenset(), str(error))
    live = (piece for shard in saved_shards(trainer) for piece in shard.pieces())
    pieces = [CopiedPiece.of(piece, number, pinned) for number, piece in enumerate(live)]
    return Prepared(pieces, random_state(), tensor_names(trainer))


class SaveJob:
    """Writes a rank's share of a checkpoint from its copy in memory. On rank 0 it also waits for
    the other ranks and commits the checkpoint.

    `start` runs the job in a thread, `run` in the caller's thread. After `join`, `error` is the
    error message of a failed save, otherwise None. On rank 0, `checkpoint` is the committed
    checkpoint.
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
        self.manifest = manifest
        self.temporary = temporary
        self._target = target
        self._deadline = time.monotonic() + timeout_seconds
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self.error: str | None = "the save did not end"
        self.checkpoint: Checkpoint | None = None

    @property
    def done(self) -> bool:
        """Whether the job's thread has ended."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start writing the files in a background thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the job's thread has ended. If it has not ended at the job's deadline, set
        `error` and return."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self.error = "the files were not written within checkpoint.timeout_seconds"

    def run(self) -> None:
        """Write this rank's files and report them; on rank 0 commit the checkpoint.

        A disk error, or the reason why the state must not be saved, is stored in `error`.
        """
        try:
            self._write_share()
            if self._rank == 0:
                self._commit()
            self.error = None
        except (OSError, CorruptCheckpoint) as error:
            self.error = reason_and_file(error)

    def _write_share(self) -> None:
        """Write this rank's files, and report success or failure to rank 0 in a status file.

        Raises:
            OSError: If the files cannot be written. This rank's files are then removed.
            CorruptCheckpoint: If the state must not be saved (`Prepared.error`).
        """
        try:
            tensors = self._write_files()
            files = {path.name: hash_file(path) for path in self._own_files()}
        except (OSError, CorruptCheckpoint) as error:
            # Remove the files first: on a full disk there would be no space for the report.
            for path in self._own_files():
                path.unlink(missing_ok=True)
            # The message may contain a path that is not valid UTF-8, but the report must be valid.
            message = reason_and_file(error).encode(errors="backslashreplace").decode()
            self._report(RankStatus(error=message))
            raise
        self._report(RankStatus(files, tensors))

    def _write_files(self) -> dict[str, TensorTally]:
        """Write this rank's slices of tensors and its random states, and release the memory of the
        slices; return the checksum and the number of elements of each tensor, over these slices.

        Raises:
            OSError: If a file cannot be written.
            CorruptCheckpoint: If the state must not be saved (`Prepared.error`).
        """
        if self._prepared.error is not None:
            raise CorruptCheckpoint(self._prepared.error)
        save_random_state(self._prepared.random, self.temporary, self._rank)
        pieces, self._prepared.pieces = self._prepared.pieces, []
        tallies: dict[str, TensorTally] = {}
        header_bytes = sum(max_entry_bytes(_key(copied.piece)) for copied in pieces)
        with RankFiles(self.temporary, self._rank, header_bytes) as files:
            for copied in pieces:
                piece = copied.piece
                files.add(_key(piece), piece.values)
                total = tally(tallies, piece.name, piece.shape, piece.values.dtype)
                total.add(copied.checksum(), piece.values.numel())
            files.finish()
        return tallies

    def _own_files(self) -> list[Path]:
        """Return the files that this rank has written so far."""
        return sorted(self.temporary.glob(f"*_{self._rank:05d}.*safetensors"))

    def _report(self, status: RankStatus) -> None:
        """Write this rank's status file."""
        write_atomically(self._status_path(self._rank), _STATUS.dump_json(status))

    def _commit(self) -> None:
        """Wait until all ranks have reported success, then write the manifest and commit. Rank 0
        only.

        Raises:
            OSError: If a rank has failed or does not report in time, or the manifest cannot be
                written.
            CorruptCheckpoint: If the slices of all ranks together lack elements of a tensor or
                contain some twice.
        """
        files: dict[str, FileRecord] = {}
        tensors: dict[str, TensorTally] = {}
        for rank in range(self._world_size):
            status = self._await_status(rank)
            if status.error is not None:
                raise OSError(f"rank {rank}: {status.error}")
            files.update(status.files)
            for name, written in status.tensors.items():
                total = tensors.setdefault(name, TensorTally(written.dtype, written.shape))
                total.add(written.checksum, written.elements)
        for name in sorted(self._prepared.names - tensors.keys()):
            raise CorruptCheckpoint(f"tensor {name} was saved by no rank")
        records: dict[str, TensorRecord] = {n: t.record(n) for n, t in tensors.items()}
        for rank in range(self._world_size):
            self._status_path(rank).unlink()
        manifest = replace(self.manifest, files=files, tensors=records)
        self.checkpoint = finalize(self.temporary, self._target, manifest)

    def _await_status(self, rank: int) -> RankStatus:
        """Wait for the status file of `rank` and return its content.

        Raises:
            TimeoutError: If the file does not appear within the time limit of the save.
        """
        path = self._status_path(rank)
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise TimeoutError(
                    f"rank {rank} did not report its files within checkpoint.timeout_seconds"
                )
            time.sleep(_POLL_SECONDS)
        return _STATUS.validate_json(path.read_bytes())

    def _status_path(self, rank: int) -> Path:
        """Return the path of the status file of `rank`."""
        return self.temporary / f"status_{rank:05d}.json"


def _key(piece: TensorPiece) -> str:
    """Return the key of a slice in a tensor file."""
    return piece_key(piece.name, piece.offsets)
