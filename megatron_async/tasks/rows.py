"""Rows of files, read one at a time: JSONL, Parquet, directories of them, saved `datasets`.

Invariants
- Memory holds an index of a few bytes a row, never the rows: JSONL is read at recorded offsets,
  Arrow is memory-mapped. A large Parquet file becomes an Arrow file without a name that ends with
  the process, since its pages can only be read from their beginning.
- Every refusal names the setting, the file and the line or row.
- A row is JSON: nothing but texts, finite numbers, booleans, null, lists and mappings.
"""

import codecs
import datetime
import decimal
import itertools
import logging
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from megatron_async.config.files import parse_json, read_json_object
from megatron_async.errors import UserError, short_repr

Row = dict[str, Any]

MOST_BAD_ROWS_SHOWN: Final = 10
_logger = logging.getLogger(__name__)
_BATCH_ROWS: Final = 1000
_IN_MEMORY_BYTES: Final = 64 << 20
_SUFFIXES: Final = (".parquet", ".jsonl", ".json", ".ndjson", ".arrow")
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# Number and total of a shard, also before a hash: train-00000-of-00002.parquet, part_1_of_4.jsonl.
_SHARD: Final = re.compile(r"(?:^|[-_.])(\d+)[-_.]of[-_.](\d+)(?:[-_.][0-9a-f]{6,})?$")
# A part of the only split of its folder: part-00000.parquet.
_PART: Final = re.compile(r"(?:part|shard|chunk)[-_.]?\d.*|\d*")
_ROW: Final = re.compile(r"(?::|, row )(\d+)(?=\D)")
_LARGE_NUMBER = re.compile(rb"\d{19}")


class Rows(Protocol):
    """Rows in a fixed order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`. Raises UserError when it is no row."""

    def __iter__(self) -> Iterator[Row | UserError]:
        """Iterate over all rows, with the refusal of one that is none."""

    def where(self, index: int) -> str:
        """The place of row `index`, for a refusal."""


def open_rows(path: str, split: str, setting: str) -> Rows:
    """The rows at `path`; at least one. Raises UserError that begins with `setting`."""
    try:
        parts = [_file(file, setting) for file in data_files(path, split, setting)]
    except (OSError, ValueError) as error:
        raise UserError(f"{setting} {path!r} cannot be read: {error}") from error
    rows = parts[0] if len(parts) == 1 else _Chain(parts)
    if not len(rows):
        raise UserError(f"{setting} {path} holds no {'rows' if Path(path).is_dir() else 'lines'}")
    return rows


def data_files(path: str, split: str, setting: str) -> list[Path]:
    """Return the files with the rows of `path` in order. Raises UserError or OSError."""
    place = Path(path)
    if not path or not place.exists():
        raise UserError(f"{setting} {path!r} cannot be read: there is no such file")
    return _directory(place, split, setting) if place.is_dir() else [place]


def report_bad_rows(
    what: str, bad: list[str], of: int, mode: str, *, readable: bool = False
) -> None:
    """List the first ten bad rows of a file that has `of`; `bad` has a message for each of these.

    Rows with the same message are listed once.

    `mode` skip: they are left out. `readable`: some have the right columns. Raises UserError
    otherwise, and where no row is good.
    """
    found = f"{what}: {len(bad):,} of {of:,} rows cannot be used"
    left_out = mode == "skip" and len(bad) < of
    listed = _by_reason(bad[:MOST_BAD_ROWS_SHOWN])
    if left_out or len(listed) > 1:
        title = f"{found} and are left out (task.bad_rows)" if left_out else found
        if len(bad) > MOST_BAD_ROWS_SHOWN:
            listed.append(f"and {len(bad) - MOST_BAD_ROWS_SHOWN:,} more")
        _logger.warning("\n  ".join([f"{title}:", *listed]))
    if not left_out:
        sentence = f"{found}; {bad[0]}"
        if len(bad) < of:
            sentence += "; correct or remove such rows, or set task.bad_rows: skip"
        elif not readable:
            sentence += (
                "; rows are those of a Parquet file, or JSON objects in UTF-8, one a line; if they "
                "are, set `layout` or `columns` beside its path"
            )
        raise UserError(sentence)


def _by_reason(messages: Sequence[str]) -> list[str]:
    """Return the first of all messages that differ in their row only, with the other rows."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        row = _ROW.search(message)
        reason = message if row is None else message[: row.start()] + message[row.end() :]
        others = groups.setdefault(reason, [])
        others.append(row[1] if row and others else message)
    texts = []
    for first, *others in groups.values():
        texts.append(f"{first} (and in {', '.join(others)})" if others else first)
    return texts


def _file(file: Path, setting: str) -> Rows:
    what = f"{setting} {file}"
    if file.exists() and not file.is_file():
        raise UserError(f"{what} is no regular file: rows are read more than once")
    if file.suffix in _COMPRESSED:
        raise UserError(f"{what} is compressed; decompress it, since rows are read at any place")
    with file.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"PAR1"):
        return _arrow_rows(file, what, _read_parquet)
    if magic == b"ARROW1" or file.suffix == ".arrow":
        return _arrow_rows(file, what, _map)
    if file.suffix == ".parquet":
        raise UserError(f"{what} is not a Parquet file")
    return _JsonlRows(file, what)


def _directory(folder: Path, split: str, setting: str) -> list[Path]:
    what = f"{setting} {folder}"
    if (folder / "dataset_dict.json").is_file():
        known = _names(folder / "dataset_dict.json", "splits", what)
        return _directory(folder / _chosen(split, known, what), "", setting)
    if (folder / "state.json").is_file():
        state = folder / "state.json"
        if read_json_object(state, f"{what}/state.json").get("_indices_data_files"):
            raise UserError(f"{what} holds a selection of rows: save it after flatten_indices()")
        return [folder / name for name in _names(state, "_data_files", what)]
    by_split: dict[str, list[Path]] = {}
    for file in _data_files(folder):  # train-00000-of-00002.parquet, test.jsonl, train/0.parquet
        stem = _SHARD.sub("", _plain(file).stem)
        name = file.parent.name if _PART.fullmatch(stem) else stem
        by_split.setdefault(name, []).append(file)
    if not by_split:
        raise UserError(f"{what} holds no {', '.join(_SUFFIXES)} file and no saved dataset")
    files = by_split[_chosen(split, list(by_split), what)]
    _check_shards(files, what)
    return files


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below `folder` in order, without hidden ones and hidden folders.

    A compressed file counts as data unless it lies next to its decompressed copy.
    """
    files = {
        file
        for file in folder.rglob("*")
        if _plain(file).suffix in _SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }
    return sorted(file for file in files if _plain(file) == file or _plain(file) not in files)


def _plain(file: Path) -> Path:
    """Return the name of the file without the suffix of a compression."""
    return file.with_suffix("") if file.suffix in _COMPRESSED else file


def _check_shards(files: Sequence[Path], what: str) -> None:
    """Refuse files of which the names show that others are missing. Raises UserError."""
    series: dict[str, dict[str, set[int]]] = {}
    for file in map(_plain, files):
        if shard := _SHARD.search(file.stem):
            name = str(file.parent / _SHARD.sub("", file.stem))
            series.setdefault(name, {}).setdefault(shard[2], set()).add(int(shard[1]))
    for name, shards in series.items():
        if len(shards) > 1:
            several = " and of ".join(sorted(shards))
            raise UserError(f"{what} holds shards of {several} of {name}; keep one set")
        [(total, present)] = shards.items()
        first = 1 if 0 not in present and int(total) in present else 0
        if missing := {*range(first, first + int(total))} - present:
            found = ", ".join(map(str, sorted(present)[:10]))
            raise UserError(
                f"{what} lacks {len(missing)} of {int(total)} shards of {name}; found are those "
                f"with the numbers {found}. Add the others, or rename these to use them alone."
            )


def _names(file: Path, key: str, what: str) -> list[str]:
    """The names of splits or files that `datasets` has written."""
    entries = read_json_object(file, f"{what}/{file.name}").get(key)
    names: list[Any] = [
        entry.get("filename") if isinstance(entry, dict) else entry
        for entry in (entries if isinstance(entries, list) else [])
    ]
    if not names or not all(isinstance(name, str) and name.strip("./") for name in names):
        raise UserError(
            f"{what}: {file.name} has {key} {short_repr(entries)}; a directory that datasets has "
            "saved lists names there"
        )
    return names


def _chosen(split: str, known: Sequence[str], what: str) -> str:
    if split in known:
        return split
    if not split and len(known) == 1:
        return known[0]
    asked = f"no split {split!r}" if split else "several splits"
    raise UserError(f"{what} has {asked}: set split to one of {', '.join(known)}")


class _Chain:
    """Rows of several files as those of one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Row | UserError]:
        return itertools.chain.from_iterable(self._parts)

    def __getitem__(self, index: int) -> Row:
        part, place = self._at(index)
        return part[place]

    def where(self, index: int) -> str:
        part, place = self._at(index)
        return part.where(place)

    def _at(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


# ------------------------------------------------------------ JSONL


class _JsonlRows:
    """Objects, one a line; only a newline ends a line, as JSON may hold U+2028 and U+0085."""

    def __init__(self, file: Path, what: str) -> None:
        self._what = what
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._begins, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as lines:
            for number, line in enumerate(lines, start=1):
                end += len(line)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    self._begins.append(end - len(text))
                    self._ends.append(end - int(text.endswith(b"\n")))
                    self._numbers.append(number)

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[Row | UserError]:
        for index in range(len(self)):
            try:
                yield self[index]
            except UserError as error:
                yield error

    def __getitem__(self, index: int) -> Row:
        begin = self._begins[index]
        line = os.pread(self._descriptor, self._ends[index] - begin, begin)
        row = None
        if not _LARGE_NUMBER.search(line):  # orjson rounds whole numbers of more than 64 bits
            with suppress(orjson.JSONDecodeError):  # `parse_json` names what is wrong
                row = orjson.loads(line)
        try:
            row = parse_json(line.decode(), self.where(index)) if row is None else row
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(index)} is not UTF-8 text (byte {error.start})"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{self.where(index)} must be an object, got {type(row).__name__}")
        return row

    def where(self, index: int) -> str:
        return f"{self._what}:{self._numbers[index]}"


# ------------------------------------------------------------ Parquet and Arrow


def _arrow() -> Any:
    """pyarrow; only who has such files waits for its import."""
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def _arrow_rows(file: Path, what: str, read: Callable[[Any, Path, str], Any]) -> Rows:
    arrow = _arrow()
    try:
        return _Table(read(arrow, file, what), what)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error


def _read_parquet(arrow: Any, file: Path, what: str) -> Any:
    source = arrow.parquet.ParquetFile(file)
    _check_schema(source.schema_arrow, what)
    groups = (source.metadata.row_group(i) for i in range(source.metadata.num_row_groups))
    if sum(group.total_byte_size for group in groups) <= _IN_MEMORY_BYTES:
        return source.read()
    with tempfile.NamedTemporaryFile(prefix="megatron-async-rows-", suffix=".arrow") as spilled:
        with arrow.ipc.new_file(spilled.name, source.schema_arrow) as writer:
            for batch in source.iter_batches(_BATCH_ROWS):
                writer.write_batch(batch)
        return _map(arrow, Path(spilled.name), what)


def _map(arrow: Any, file: Path, what: str) -> Any:
    """An Arrow file or stream, memory-mapped."""
    mapped = arrow.memory_map(str(file))
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    opened = arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)
    _check_schema(opened.schema, what)
    return opened.read_all()


class _Table:
    """Rows of an Arrow table."""

    def __init__(self, table: Any, what: str) -> None:
        self._table = table
        self._what = what

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row | UserError]:
        for begin in range(0, len(self), _BATCH_ROWS):
            yield from self._rows(begin, _BATCH_ROWS)

    def __getitem__(self, index: int) -> Row:
        (row,) = self._rows(index, 1)
        if isinstance(row, UserError):
            raise row
        return row

    def where(self, index: int) -> str:
        return f"{self._what}, row {index + 1}"

    def _rows(self, begin: int, count: int) -> Iterator[Row | UserError]:
        for index, row in enumerate(self._table.slice(begin, count).to_pylist(), begin):
            try:
                yield {name: _column(name, value) for name, value in row.items()}
            except ValueError as error:
                yield UserError(f"{self.where(index)}: {error}")


def _check_schema(schema: Any, what: str) -> None:
    """Refuse columns of bytes, images and sounds as `datasets` has them. Raises UserError."""
    types = _arrow().types
    for field in schema:
        if _holds_bytes(field.type, types):
            raise UserError(
                f"{what}: column {field.name!r} holds {field.type}, such as images: only text can "
                "be trained on; remove the column"
            )


def _holds_bytes(kind: Any, types: Any) -> bool:
    """Return whether an Arrow type holds bytes at any depth. `types`: module `pyarrow.types`."""
    if isinstance(kind, _arrow().ExtensionType):
        return _holds_bytes(kind.storage_type, types)
    if types.is_dictionary(kind):
        return _holds_bytes(kind.value_type, types)
    if types.is_nested(kind):
        return any(_holds_bytes(kind.field(i).type, types) for i in range(kind.num_fields))
    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _column(name: str, value: Any) -> Any:
    """Return a column's value as JSON has it.

    In messages and tools every object has the fields of all others, those that it lacks as null:
    they are left out.
    """
    found = _json(value)
    first = found[0] if isinstance(found, list) and found else None
    named = name == "tools" or (isinstance(first, dict) and "role" in first)
    return _without_null(found) if named else found


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _json(value: Any) -> Any:
    """A value of Arrow as JSON has it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(inner) for inner in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    raise ValueError(f"{short_repr(value)} is neither text nor number")
