"""The tensor files of a checkpoint: pieces in safetensors format, written rank by rank.

A rank writes one file for each precision. The key of a piece is the tensor's name and the place
where the piece begins: `exp_avg/decoder.layers.3.mlp.linear_fc2.weight@128,0`. The headers of the
files are all there is: no index, and nothing that runs when it is read (no pickle).

Invariants
- What is read goes through a small buffer into its place; files are not mapped, so that memory does
  not grow with them.
- Whatever the files hold, a tensor is read whole or the checkpoint is refused as corrupt in one
  sentence.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from megatron_async.checkpoint.manifest import CorruptCheckpoint, file_in

SUFFIX = ".safetensors"
PREFIX = "rank_"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_ENTRY_BYTES = 160  # of a header's entry beside its key: type, shape, two offsets
_BAND_BYTES = 1 << 24
_OPEN_FILES = 64


class PieceFile:
    """A file that grows piece by piece; its header is written last, into room left for it."""

    def __init__(self, path: Path, dtype: torch.dtype, room: int) -> None:
        self._dtype = _NAMES[dtype]
        self._file: BinaryIO = path.open("wb")
        self._room = -(-room // 8) * 8
        self._entries: dict[str, dict[str, Any]] = {}
        self._bytes = 0
        self._file.seek(_LENGTH.size + self._room)

    def add(self, key: str, piece: Tensor) -> None:
        """Append. Raises OSError."""
        begin, self._bytes = self._bytes, self._bytes + piece.nbytes
        self._entries[key] = {
            "dtype": self._dtype,
            "shape": list(piece.shape),
            "data_offsets": [begin, self._bytes],
        }
        self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Write the header; all of it is on disk afterwards. Raises OSError."""
        header = json.dumps(self._entries, separators=(",", ":")).encode().ljust(self._room)
        self._file.seek(0)
        self._file.write(_LENGTH.pack(self._room) + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RankFiles:
    """The files of one rank: one for each precision, made when its first piece comes."""

    def __init__(self, folder: Path, rank: int, room: int) -> None:
        """`room` is at least the sum of `header_room` over the pieces that will come."""
        self._stem = folder / f"{PREFIX}{rank:05d}"
        self._room = room
        self._files: dict[torch.dtype, PieceFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def add(self, key: str, piece: Tensor) -> None:
        """Append. Raises OSError."""
        dtype = piece.dtype
        if dtype not in self._files:
            path = Path(f"{self._stem}.{_NAMES[dtype].lower()}{SUFFIX}")
            self._files[dtype] = PieceFile(path, dtype, self._room)
        self._files[dtype].add(key, piece)

    def finish(self) -> None:
        """Finish every file of this rank. Raises OSError."""
        for file in self._files.values():
            file.finish()


def piece_key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def header_room(key: str) -> int:
    """Bytes that a piece takes in its file's header, at most."""
    return len(json.dumps(key)) + _ENTRY_BYTES


@dataclass(frozen=True)
class _Stored:
    """A piece in a file: from byte `begin` on."""

    path: Path
    begin: int
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class PieceReader:
    """Reads any box of any tensor of a checkpoint, out of the pieces that it meets."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """Reads the headers of `files`, those of the manifest. Raises CorruptCheckpoint."""
        self._open: dict[Path, BinaryIO] = {}
        self._pieces: dict[str, list[_Stored]] = {}
        for name in sorted(files):
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                for tensor, stored in _header(folder, name):
                    self._pieces.setdefault(tensor, []).append(stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def read(self, name: str, offsets: Sequence[int], into: Tensor) -> None:
        """Fill `into` (its dtype may be another) with the box at `offsets` of tensor `name`.

        Raises CorruptCheckpoint when the pieces do not cover it.
        """
        covered = 0
        for stored in self._pieces.get(name, ()):
            overlap = _overlap(stored, offsets, into.shape)
            if overlap is not None:
                covered += self._copy(stored, *overlap, into)
        if covered != into.numel():
            raise CorruptCheckpoint(
                f"tensor {name} has {covered} of the {into.numel()} elements of {list(into.shape)} "
                f"at {list(offsets)}"
            )

    def _copy(self, stored: _Stored, theirs: "_Slices", ours: "_Slices", into: Tensor) -> int:
        """Band by band of whole rows of the piece; returns the number of elements."""
        rows = theirs[0]
        width = prod(stored.shape[1:])
        row_bytes = width * stored.dtype.itemsize
        band = max(1, _BAND_BYTES // row_bytes)
        target = into[ours]
        for first in range(rows.start, rows.stop, band):
            count = min(band, rows.stop - first)
            content = bytearray(count * row_bytes)
            try:
                file = self._file(stored.path)
                file.seek(stored.begin + first * row_bytes)
                length = file.readinto(content)  # type: ignore[attr-defined]
            except OSError as error:
                raise CorruptCheckpoint(f"{stored.path.name} cannot be read: {error}") from error
            if length != len(content):
                raise CorruptCheckpoint(f"{stored.path.name} ends early")
            part = torch.frombuffer(content, dtype=stored.dtype).view(count, *stored.shape[1:])
            begin = first - rows.start
            target[begin : begin + count].copy_(part[:, *theirs[1:]])
        return target.numel()

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = path.open("rb")
        return self._open[path]


def _header(folder: Path, name: str) -> Iterator[tuple[str, _Stored]]:
    """The pieces of one file. Raises CorruptCheckpoint."""
    try:
        path = file_in(folder, name)
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > size:
                raise ValueError(f"its header has {length} bytes by its own account")
            entries = json.loads(file.read(length))
        for key, entry in entries.items():
            yield _piece(path, _LENGTH.size + length, size, key, entry)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise CorruptCheckpoint(f"{name} cannot be read: {error}") from error


def _piece(path: Path, data: int, size: int, key: str, entry: Any) -> tuple[str, _Stored]:
    """Read an entry of a header: the tensor, and its piece. Raises ValueError and others."""
    tensor, _, place = key.rpartition("@")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(int(count) for count in entry["shape"])
    offsets = tuple(int(number) for number in place.split(","))
    begin, end = (data + int(number) for number in entry["data_offsets"])
    fits = data <= begin <= end <= size and end - begin == prod(shape) * dtype.itemsize
    if not fits or len(shape) != len(offsets) or min(shape, default=0) < 1:
        raise ValueError(f"{key} is not {entry}")
    return tensor, _Stored(path, begin, dtype, offsets, shape)


_Slices = tuple[slice, ...]


def _overlap(
    stored: _Stored, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[_Slices, _Slices] | None:
    """Intersection of a piece and a box, as slices of either."""
    if len(stored.offsets) != len(offsets):
        return None
    theirs, ours = [], []
    for begin, length, offset, size in zip(
        stored.offsets, stored.shape, offsets, shape, strict=True
    ):
        first, last = max(begin, offset), min(begin + length, offset + size)
        if first >= last:
            return None
        theirs.append(slice(first - begin, last - begin))
        ours.append(slice(first - offset, last - offset))
    return tuple(theirs), tuple(ours)
