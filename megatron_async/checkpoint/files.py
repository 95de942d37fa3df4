"""Reads and writes the tensor files of a checkpoint, which contain slices of tensors in safetensors
format.

Each rank writes one file for each precision. In a file, the key of a slice consists of the tensor's
name and the index at which the slice begins:
`exp_avg/decoder.layers.3.mlp.linear_fc2.weight@128,0`. Which slices exist is found from the headers
of all files; there is no other index. Files contain no pickles, so reading them executes no code.

Invariants
- Content is read through a small buffer into its destination; files are not memory-mapped, so that
  memory use does not grow with the files.
- Whatever the files contain, either a tensor is read completely, or CorruptCheckpoint is raised
  with a message that names the damage.
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
# Upper bound of the size of a header's entry for one slice without its key: type, shape and two
# offsets.
_ENTRY_BYTES = 160
_BAND_BYTES = 1 << 24
_OPEN_FILES = 64


class PieceFile:
    """One safetensors file to which slices of tensors are appended; its header is written last.

    At the start of the file, `header_bytes` bytes are reserved for the header.
    """

    def __init__(self, path: Path, dtype: torch.dtype, header_bytes: int) -> None:
        self._dtype = _NAMES[dtype]
        self._file: BinaryIO = path.open("wb")
        self._header_bytes = -(-header_bytes // 8) * 8
        self._entries: dict[str, dict[str, Any]] = {}
        self._bytes = 0
        self._file.seek(_LENGTH.size + self._header_bytes)

    def add(self, key: str, piece: Tensor) -> None:
        """Append a slice of a tensor to the file under `key`.

        Raises:
            OSError: If the file cannot be written.
        """
        begin, self._bytes = self._bytes, self._bytes + piece.nbytes
        self._entries[key] = {
            "dtype": self._dtype,
            "shape": list(piece.shape),
            "data_offsets": [begin, self._bytes],
        }
        self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Write the header and force the whole file to disk.

        Raises:
            OSError: If the file cannot be written.
        """
        header = json.dumps(self._entries, separators=(",", ":")).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(_LENGTH.pack(self._header_bytes) + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RankFiles:
    """The tensor files of one rank: one for each precision, created when its first slice is added.

    It is a context manager that closes the files.
    """

    def __init__(self, folder: Path, rank: int, header_bytes: int) -> None:
        """Set up the files of a rank; no file is created yet.

        Args:
            folder: The directory of the files.
            rank: The rank, which is part of the file names.
            header_bytes: Number of bytes to reserve for a header: at least the sum of
                `max_entry_bytes` over the slices that will be added.
        """
        self._stem = folder / f"{PREFIX}{rank:05d}"
        self._header_bytes = header_bytes
        self._files: dict[torch.dtype, PieceFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def add(self, key: str, piece: Tensor) -> None:
        """Append a slice of a tensor under `key` to the file of its precision.

        Raises:
            OSError: If the file cannot be written.
        """
        dtype = piece.dtype
        if dtype not in self._files:
            path = Path(f"{self._stem}.{_NAMES[dtype].lower()}{SUFFIX}")
            self._files[dtype] = PieceFile(path, dtype, self._header_bytes)
        self._files[dtype].add(key, piece)

    def finish(self) -> None:
        """Write the headers of all files of this rank and force the files to disk.

        Raises:
            OSError: If a file cannot be written.
        """
        for file in self._files.values():
            file.finish()


def piece_key(name: str, offsets: Sequence[int]) -> str:
    """Return the key of a slice in a file: the tensor's name and the index at which the slice
    begins."""
    return f"{name}@{','.join(map(str, offsets))}"


def max_entry_bytes(key: str) -> int:
    """Return an upper bound for the number of bytes of this key's entry in the header of a file."""
    return len(json.dumps(key)) + _ENTRY_BYTES


@dataclass(frozen=True)
class _Stored:
    """A slice of a tensor in a file.

    Attributes:
        path: The file.
        begin: Number of the slice's first byte in the file.
        offsets: Index of the slice's first element in the whole tensor.
        shape: Shape of the slice.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class PieceReader:
    """Reads any box (rectangular slice) of any tensor of a checkpoint, from those stored slices
    that overlap it.

    It is a context manager that closes the files.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """Read the headers of all tensor files. `files` are the names of all files of the
        checkpoint, from its manifest; the tensor files among them are recognized by their names.

        Raises:
            CorruptCheckpoint: If a header cannot be read.
        """
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
        """Fill `into` with the box (rectangular slice) of tensor `name` that begins at index
        `offsets` and has the shape of `into`.

        `into` may have another dtype, to which the values are cast.

        Raises:
            CorruptCheckpoint: If the stored slices do not cover the box exactly.
        """
        covered = 0
        for stored in self._pieces.get(name, ()):
            overlap = _overlap(stored, offsets, into.shape)
            if overlap is not None:
                covered += self._copy(stored, *overlap, into)
        if covered != into.numel():
            raise CorruptCheckpoint(
                f"tensor {name} has {covered} of the {into.numel()} elements of the box of shape "
                f"{list(into.shape)} at index {list(offsets)}"
            )

    def _copy(self, stored: _Stored, theirs: "_Slices", ours: "_Slices", into: Tensor) -> int:
        """Copy the overlap of a stored slice and the requested box into `into`; return its number
        of elements.

        The rows of the slice that overlap are read completely, some at a time, so that the buffer
        has a limited size.

        Args:
            theirs: The overlap as indices of the stored slice.
            ours: The overlap as indices of `into`.
        """
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
            rows_read = torch.frombuffer(content, dtype=stored.dtype).view(count, *stored.shape[1:])
            begin = first - rows.start
            target[begin : begin + count].copy_(rows_read[:, *theirs[1:]])
        return target.numel()

    def _file(self, path: Path) -> BinaryIO:
        """Return an open file for `path`. If it is not open and too many files are, close the one
        that was opened first."""
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = path.open("rb")
        return self._open[path]


def _header(folder: Path, name: str) -> Iterator[tuple[str, _Stored]]:
    """Read the header of one tensor file; generate each slice with the name of its tensor.

    Raises:
        CorruptCheckpoint: If the file or its header cannot be read.
    """
    try:
        path = file_in(folder, name)
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > size:
                raise ValueError(f"its header claims {length} bytes, and the file has {size}")
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
    """Parse one entry of a file's header; return the tensor's name and its slice in the file.

    Args:
        data: Number of the first byte after the header.
        size: Size of the file in bytes.

    Raises:
        ValueError: If the entry's offsets, shape and key contradict each other or the size of the
            file; a malformed entry may also raise KeyError, TypeError or AttributeError.
    """
    tensor, _, index = key.rpartition("@")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(int(count) for count in entry["shape"])
    offsets = tuple(int(number) for number in index.split(","))
    begin, end = (data + int(number) for number in entry["data_offsets"])
    fits = data <= begin <= end <= size and end - begin == prod(shape) * dtype.itemsize
    if not fits or len(shape) != len(offsets) or min(shape, default=0) < 1:
        raise ValueError(f"entry {key} contradicts its key or the file: {entry}")
    return tensor, _Stored(path, begin, dtype, offsets, shape)


_Slices = tuple[slice, ...]


def _overlap(
    stored: _Stored, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[_Slices, _Slices] | None:
    """Return the intersection of a stored slice and a box: as indices of the stored slice, and as
    indices of the box. Return None if it is empty."""
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
