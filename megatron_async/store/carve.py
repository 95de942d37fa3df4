"""Finds the store's rows in a damaged SQLite file, page by page, without its b-trees.

SQLite reaches a row through its table's root page and inner pages; if one of these is gone, so is
everything below it. Here every page is looked at by itself: each one that is a table leaf is taken
apart by the published file format (https://www.sqlite.org/fileformat2.html, sections 1.5, 1.6, 2.1
and 4), and what comes out counts only if its CRC says that it is a row of one of our tables.

Invariants
- Nothing is yielded whose CRC is wrong. Rows may come twice, in old and new forms.
- Frames of the write-ahead log replace pages, up to the last commit that is in it.
- Pages of the free list (deleted content) are passed over as far as the list can be read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from megatron_async.store import schema as schema
from megatron_async.store.schema import (
    FORMER_TABLES,
    TABLES,
    DamagedStore,
    Row,
    Value,
)

_LEAF = 0x0D
_FILE_HEADER = 100
_WAL_HEADER = 32
_FRAME_HEADER = 24
_MOST_ROWS_FIRST = (*reversed(TABLES.items()), *FORMER_TABLES.items())
_INT_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


class Pages:
    """The pages of a database file and its write-ahead log, numbered from 1."""

    def __init__(self, path: Path, wal: Path) -> None:
        """Raises OSError when a file that exists cannot be read."""
        self._open = ExitStack()
        self._main = self._map(path)
        self._wal = self._map(wal)
        self.size = schema.PAGE_BYTES
        self._frames = self._committed_frames()
        self.count = max([-(-len(self._main) // self.size), *self._frames])

    def close(self) -> None:
        """Release the files."""
        self._open.close()

    def _map(self, path: Path) -> bytes | mmap.mmap:
        if not path.exists() or path.stat().st_size == 0:
            return b""
        file = self._open.enter_context(path.open("rb"))
        return self._open.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _committed_frames(self) -> dict[int, int]:
        """Page -> offset of its newest content in the log, of frames before the last commit."""
        committed: dict[int, int] = {}
        waiting: dict[int, int] = {}
        salts = bytes(self._wal[16:24])
        step = _FRAME_HEADER + self.size
        for start in range(_WAL_HEADER, len(self._wal) - step + 1, step):
            number, pages_after_commit = struct.unpack_from(">II", self._wal, start)
            if self._wal[start + 8 : start + 16] != salts or number == 0:
                break  # what follows is left over from an earlier round of the log
            waiting[number] = start + _FRAME_HEADER
            if pages_after_commit:
                committed.update(waiting)
                waiting.clear()
        return committed

    def page(self, number: int) -> bytes:
        """Content of a page; zeros where the file ends too early."""
        if number in self._frames:
            start = self._frames[number]
            return bytes(self._wal[start : start + self.size])
        start = (number - 1) * self.size
        return bytes(self._main[start : start + self.size]).ljust(self.size, b"\0")

    def free(self) -> set[int]:
        """Pages of the free list, as far as it can be followed."""
        found: set[int] = set()
        trunk = int.from_bytes(self.page(1)[32:36], "big")
        while 1 < trunk <= self.count and trunk not in found:
            found.add(trunk)
            content = self.page(trunk)
            following, leaves = struct.unpack_from(">II", content)
            if leaves > self.size // 4 - 2:
                break
            found.update(struct.unpack_from(f">{leaves}I", content, 8))
            trunk = following
        return found


def carve(pages: Pages) -> Iterator[tuple[str, int, Row]]:
    """(table, key, row without CRC) of every intact row; the key of a chunk is its rowid."""
    free = pages.free()
    for number in range(1, pages.count + 1):
        content = pages.page(number)
        header = _FILE_HEADER if number == 1 else 0
        if number in free or content[header] != _LEAF:
            continue
        cells = int.from_bytes(content[header + 3 : header + 5], "big")
        if cells > pages.size // 4:
            continue
        for i in range(cells):
            at = header + 8 + 2 * i
            try:
                found = _row(pages, content, int.from_bytes(content[at : at + 2], "big"))
            except (IndexError, struct.error, UnicodeDecodeError, ValueError):
                continue  # not a cell: damaged, or never one of ours
            if found is not None:
                yield found


def _row(pages: Pages, content: bytes, at: int) -> tuple[str, int, Row] | None:
    size, at = _varint(content, at)
    rowid, at = _varint(content, at)
    values = _record(_payload(pages, content, at, size))
    for table, columns in _MOST_ROWS_FIRST:
        if len(columns) != len(values):
            continue
        if table == "chunks":
            row: list[Value] = values[1:]
        else:
            row = [rowid, *values[1:]]
            for i, column in enumerate(columns):
                number = row[i]
                if column.endswith(" REAL") and isinstance(number, int):
                    row[i] = float(number)
        try:
            return table, rowid, schema.opened(table, row)
        except DamagedStore:
            continue
    return None


def _payload(pages: Pages, content: bytes, at: int, size: int) -> bytes:
    """A cell's payload, the part on overflow pages included."""
    usable = pages.size
    largest = usable - 35
    if size <= largest:
        return content[at : at + size]
    if size > pages.count * usable:
        raise ValueError("longer than the file")
    smallest = (usable - 12) * 32 // 255 - 23
    local = smallest + (size - smallest) % (usable - 4)
    local = local if local <= largest else smallest
    parts = [content[at : at + local]]
    following = int.from_bytes(content[at + local : at + local + 4], "big")
    left = size - local
    while left > 0:
        if not 1 < following <= pages.count:
            raise ValueError("a broken chain of overflow pages")
        overflow = pages.page(following)
        parts.append(overflow[4 : 4 + left])
        left -= len(parts[-1])
        following = int.from_bytes(overflow[:4], "big")
    return b"".join(parts)


def _record(payload: bytes) -> list[Value]:
    header_size, at = _varint(payload, 0)
    types = []
    while at < header_size:
        kind, at = _varint(payload, at)
        types.append(kind)
    values: list[Value] = []
    for kind in types:
        value, at = _value(payload, at, kind)
        values.append(value)
    return values


def _value(payload: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind == 0:
        return None, at
    if kind in _INT_BYTES:
        end = at + _INT_BYTES[kind]
        return int.from_bytes(payload[at:end], "big", signed=True), end
    if kind == 7:
        return struct.unpack_from(">d", payload, at)[0], at + 8
    if kind in (8, 9):
        return kind - 8, at
    if kind < 12:
        raise ValueError("a reserved serial type")
    end = at + (kind - 12) // 2
    if end > len(payload):
        raise ValueError("a value passes the end of its record")
    return (payload[at:end] if kind % 2 == 0 else payload[at:end].decode()), end


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(8):
        byte = content[at + i]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + i + 1
    return value << 8 | content[at + 8], at + 9
