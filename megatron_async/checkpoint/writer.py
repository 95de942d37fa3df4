"""A save by one rank: an in-memory copy, then files, then (on rank 0) the commit.

Invariants
- `prepare` copies this rank's part of the state and nothing else; it needs no other rank. `SaveJob`
  only touches that copy and files, so that it may run in a background thread while training changes
  the weights.
- Checksums are of the copy that is written, or of what it was copied from at that moment.
- Ranks report to each other through small status files in the temporary directory (a shared file
  system, as any checkpoint needs), so a commit needs no collective.
- The manifest is written last, by rank 0, after every rank's files are complete and all pieces
  together are every tensor once. A save that fails at any point leaves the earlier checkpoints as
  they were.
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
from megatron_async.checkpoint.files import RankFiles, header_room, piece_key
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
    """Report of a rank whose part is done; `error` is None when it succeeded."""

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    tensors: Mapping[str, TensorTally] = field(default_factory=dict)
    error: str | None = None


_STATUS: Final = TypeAdapter(RankStatus)


@dataclass(frozen=True, eq=False)
class CopiedPiece:
    """A piece in host memory. Its checksum is computed on the GPU that it came from, or later."""

    piece: TensorPiece
    on_device: Tensor | None

    @classmethod
    def of(cls, live: TensorPiece, place: int, pinned: HostBuffers) -> "CopiedPiece":
        """Copy it; from a GPU to where the save before has copied its piece of this number."""
        values = live.values
        if not values.is_cuda:
            return cls(replace(live, values=values.to("cpu", copy=True)), None)
        return cls(replace(live, values=pinned.copy(place, values)), live.checksum())

    def checksum(self) -> int:
        return int(self.piece.checksum() if self.on_device is None else self.on_device)


@dataclass
class Prepared:
    """A rank's copy of its part; `error` is set when there is nothing to be saved.

    `names`: the tensors of all ranks.
    """

    pieces: list[CopiedPiece]
    random: Mapping[str, Tensor]
    names: frozenset[str]
    error: str | None = None


def prepare(trainer: Checkpointable, pinned: HostBuffers) -> Prepared:
    """Copy the live tensors to host memory; what was prepared before in `pinned` is overwritten."""
    try:
        check_rounding(trainer)
    except CorruptCheckpoint as error:
        return Prepared([], {}, frozenset(), str(error))
    live = (piece for shard in saved_shards(trainer) for piece in shard.pieces())
    pieces = [CopiedPiece.of(piece, place, pinned) for place, piece in enumerate(live)]
    return Prepared(pieces, random_state(), tensor_names(trainer))


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
        self.manifest = manifest
        self.temporary = temporary
        self._target = target
        self._deadline = time.monotonic() + timeout_seconds
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self.error: str | None = "it did not end"
        self.checkpoint: Checkpoint | None = None

    @property
    def done(self) -> bool:
        """Return whether the thread has ended."""
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
        except (OSError, CorruptCheckpoint) as error:
            self.error = reason_and_file(error)

    def _write_share(self) -> None:
        try:
            tensors = self._write_files()
            files = {path.name: hash_file(path) for path in self._own_files()}
        except (OSError, CorruptCheckpoint) as error:
            # Make room first: on a full disk the report itself would not fit.
            for path in self._own_files():
                path.unlink(missing_ok=True)
            # A path may be no UTF-8, and a report is.
            message = reason_and_file(error).encode(errors="backslashreplace").decode()
            self._report(RankStatus(error=message))
            raise
        self._report(RankStatus(files, tensors))

    def _write_files(self) -> dict[str, TensorTally]:
        """Write this rank's pieces and random states, and release them. Raises OSError."""
        if self._prepared.error is not None:
            raise CorruptCheckpoint(self._prepared.error)
        save_random_state(self._prepared.random, self.temporary, self._rank)
        pieces, self._prepared.pieces = self._prepared.pieces, []
        tallies: dict[str, TensorTally] = {}
        room = sum(header_room(_key(copied.piece)) for copied in pieces)
        with RankFiles(self.temporary, self._rank, room) as files:
            for copied in pieces:
                piece = copied.piece
                files.add(_key(piece), piece.values)
                known = tally(tallies, piece.name, piece.shape, piece.values.dtype)
                known.add(copied.checksum(), piece.values.numel())
            files.finish()
        return tallies

    def _own_files(self) -> list[Path]:
        return sorted(self.temporary.glob(f"*_{self._rank:05d}.*safetensors"))

    def _report(self, status: RankStatus) -> None:
        write_atomically(self._status_path(self._rank), _STATUS.dump_json(status))

    def _commit(self) -> None:
        """Rank 0, once all ranks have reported success."""
        files: dict[str, FileRecord] = {}
        tensors: dict[str, TensorTally] = {}
        for rank in range(self._world_size):
            status = self._await_status(rank)
            if status.error is not None:
                raise OSError(f"rank {rank}: {status.error}")
            files.update(status.files)
            for name, known in status.tensors.items():
                total = tensors.setdefault(name, TensorTally(known.dtype, known.shape))
                total.add(known.checksum, known.elements)
        for name in sorted(self._prepared.names - tensors.keys()):
            raise CorruptCheckpoint(f"tensor {name} is held by no rank")
        records: dict[str, TensorRecord] = {n: t.record(n) for n, t in tensors.items()}
        for rank in range(self._world_size):
            self._status_path(rank).unlink()
        manifest = replace(self.manifest, files=files, tensors=records)
        self.checkpoint = finalize(self.temporary, self._target, manifest)

    def _await_status(self, rank: int) -> RankStatus:
        path = self._status_path(rank)
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"rank {rank} did not report its files within the time limit")
            time.sleep(_POLL_SECONDS)
        return _STATUS.validate_json(path.read_bytes())

    def _status_path(self, rank: int) -> Path:
        return self.temporary / f"status_{rank:05d}.json"


def _key(piece: TensorPiece) -> str:
    return piece_key(piece.name, piece.offsets)
