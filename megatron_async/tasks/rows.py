"""Reads rows one at a time from JSONL, Parquet or Arrow files, folders, and saved `datasets`.

Invariants
- Memory holds an index of a few bytes per row, never the rows: JSONL is read at recorded offsets,
  Arrow is memory-mapped. A large Parquet file is converted to an unnamed temporary Arrow file that
  disappears with the process, because the pages of a Parquet file can only be read from their
  beginning.
- Every error message names the setting, the file and the line or row.
- A row is JSON: it contains only strings, numbers, booleans, null, lists and mappings.
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
"""Values of a row by column name."""

MAX_BAD_ROWS_SHOWN: Final = 10
"""Number of bad rows that a report lists; further ones are only counted."""
_logger = logging.getLogger(__name__)
_BATCH_ROWS: Final = 1000
_IN_MEMORY_BYTES: Final = 64 << 20
_SUFFIXES: Final = (".parquet", ".jsonl", ".json", ".ndjson", ".arrow")
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# Matches the number of a shard and the total of shards at the end of a file name without its
# suffix, with or without a hash after them. Examples: train-00000-of-00002.parquet,
# part_1_of_4.jsonl.
_SHARD: Final = re.compile(r"(?:^|[-_.])(\d+)[-_.]of[-_.](\d+)(?:[-_.][0-9a-f]{6,})?$")
# Matches file names that do not name a split, so that the name of their folder does:
# part-00000.parquet, 0.parquet.
_PART: Final = re.compile(r"(?:part|shard|chunk)[-_.]?\d.*|\d*")
_ROW: Final = re.compile(r"(?::|, row )(\d+)(?=\D)")
"""Matches the line or row number in an error message."""
_LARGE_NUMBER = re.compile(rb"\d{19}")
"""Matches whole numbers that may exceed 64 bits."""


class Rows(Protocol):
    """Interface of a sequence of rows in a fixed order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Return row `index`.

        Raises:
            UserError: If the data there is not a valid row.
        """

    def __iter__(self) -> Iterator[Row | UserError]:
        """Iterate over all rows; in place of an invalid row, the error that describes it."""

    def where(self, index: int) -> str:
        """Return setting, file and line (or row number) of row `index`, for an error message."""


def open_rows(path: str, split: str, setting: str) -> Rows:
    """Open the rows in the file or folder `path`, of which there must be at least one.

    Args:
        path: A data file, a folder of data files, or a saved dataset.
        split: Split to read from a folder; empty if it has only one.
        setting: Name of the setting that has the path, for error messages.

    Raises:
        UserError: If the rows cannot be read or there are none; the message starts with `setting`.
    """
    try:
        opened = [_file(file, setting) for file in data_files(path, split, setting)]
    except (OSError, ValueError) as error:
        raise UserError(f"{setting} {path!r} cannot be read: {error}") from error
    rows = opened[0] if len(opened) == 1 else _Chain(opened)
    if not len(rows):
        raise UserError(f"{setting} {path} holds no {'rows' if Path(path).is_dir() else 'lines'}")
    return rows


def data_files(path: str, split: str, setting: str) -> list[Path]:
    """Return the files that have the rows of `path`, in the order of the rows.

    Raises:
        UserError: If there are none, or they do not form one complete split.
        OSError: If a folder cannot be read.
    """
    found = Path(path)
    if not path or not found.exists():
        raise UserError(f"{setting} {path!r} cannot be read: there is no such file")
    return _directory(found, split, setting) if found.is_dir() else [found]


def report_bad_rows(
    what: str, bad: list[str], of: int, mode: str, *, readable: bool = False
) -> None:
    """Report the rows of a file that cannot be used: as a warning, or as a UserError.

    The report counts the bad rows and lists the first ten. Rows with the same error are listed
    once.

    Args:
        what: Setting and path of the file.
        bad: An error message for each bad row.
        of: Number of rows in the file.
        mode: Value of `task.bad_rows`. With "skip", bad rows only cause a warning, unless all rows
            are bad.
        readable: Whether some bad rows have the expected columns. If not, and all rows are bad, the
            error suggests to check the file's format and to set `layout` or `columns`.

    Raises:
        UserError: If `mode` is not "skip", or if all rows are bad.
    """
    found = f"{what}: {len(bad):,} of {of:,} rows cannot be used"
    left_out = mode == "skip" and len(bad) < of
    listed = _by_reason(bad[:MAX_BAD_ROWS_SHOWN])
    if left_out or len(listed) > 1:
        title = f"{found} and are skipped (task.bad_rows)" if left_out else found
        if len(bad) > MAX_BAD_ROWS_SHOWN:
            listed.append(f"and {len(bad) - MAX_BAD_ROWS_SHOWN:,} more")
        _logger.warning("\n  ".join([f"{title}:", *listed]))
    if not left_out:
        message = f"{found}; {bad[0]}"
        if len(bad) < of:
            message += "; correct or remove such rows, or set task.bad_rows: skip"
        elif not readable:
            message += (
                "; the file must be Parquet, Arrow, or UTF-8 text with one JSON object per line; "
                "if it is, set `layout` or `columns` next to its path"
            )
        raise UserError(message)


def _by_reason(messages: Sequence[str]) -> list[str]:
    """Return the messages, with those that differ only in their row number merged into one.

    A merged message is the first of its kind, followed by the other row numbers.
    """
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
    """Open the rows of one file in the format that its content or its suffix indicates.

    Raises:
        UserError: If the file is not a regular, uncompressed file, or is invalid.
    """
    what = f"{setting} {file}"
    if file.exists() and not file.is_file():
        raise UserError(f"{what} is not a regular file; rows are read more than once")
    if file.suffix in _COMPRESSED:
        raise UserError(f"{what} is compressed; rows are read at any offset. Decompress the file.")
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
    """Return the data files in `folder` that belong to `split`, in the order of their rows.

    Raises:
        UserError: If there are none, if the split is ambiguous, or if shards are missing.
    """
    what = f"{setting} {folder}"
    if (folder / "dataset_dict.json").is_file():
        known = _names(folder / "dataset_dict.json", "splits", what)
        return _directory(folder / _chosen(split, known, what), "", setting)
    if (folder / "state.json").is_file():
        state = folder / "state.json"
        if read_json_object(state, f"{what}/state.json").get("_indices_data_files"):
            raise UserError(
                f"{what} is a saved dataset with a selection of rows, which cannot be read. Save "
                "it again after flatten_indices()."
            )
        return [folder / name for name in _names(state, "_data_files", what)]
    by_split: dict[str, list[Path]] = {}
    # The split of a file is in its name or in the name of its folder. Examples:
    # train-00000-of-00002.parquet, test.jsonl, train/0.parquet.
    for file in _data_files(folder):
        stem = _SHARD.sub("", _plain(file).stem)
        name = file.parent.name if _PART.fullmatch(stem) else stem
        by_split.setdefault(name, []).append(file)
    if not by_split:
        raise UserError(f"{what} holds no {', '.join(_SUFFIXES)} file and no saved dataset")
    files = by_split[_chosen(split, list(by_split), what)]
    _check_shards(files, what)
    return files


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below `folder`, sorted by path, without hidden files and hidden
    folders.

    A compressed file counts as data unless its decompressed copy is next to it.
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
    """Return the file's path without the suffix of a compression format."""
    return file.with_suffix("") if file.suffix in _COMPRESSED else file


def _check_shards(files: Sequence[Path], what: str) -> None:
    """Raise a UserError if the numbered shards among `files` are incomplete.

    A shard is one of several files with numbered names such as `train-00000-of-00002.parquet`.
    Shards of two different totals under one name are refused too.
    """
    series: dict[str, dict[str, set[int]]] = {}
    for file in map(_plain, files):
        if shard := _SHARD.search(file.stem):
            name = str(file.parent / _SHARD.sub("", file.stem))
            series.setdefault(name, {}).setdefault(shard[2], set()).add(int(shard[1]))
    for name, shards in series.items():
        if len(shards) > 1:
            several = " and of ".join(sorted(shards))
            raise UserError(
                f"{what} holds shards of {several} of {name}: files of two sets. Keep one set."
            )
        [(total, present)] = shards.items()
        first = 1 if 0 not in present and int(total) in present else 0
        if missing := {*range(first, first + int(total))} - present:
            found = ", ".join(map(str, sorted(present)[:10]))
            raise UserError(
                f"{what} lacks {len(missing)} of {int(total)} shards of {name}; it has the shards "
                f"numbered {found}. Add the others, or rename the existing ones to use only them."
            )


def _names(file: Path, key: str, what: str) -> list[str]:
    """Return the names listed under `key` in a file that Hugging Face `datasets` wrote.

    They are names of splits or of files.

    Raises:
        UserError: If there is no such list.
    """
    entries = read_json_object(file, f"{what}/{file.name}").get(key)
    names: list[Any] = [
        entry.get("filename") if isinstance(entry, dict) else entry
        for entry in (entries if isinstance(entries, list) else [])
    ]
    if not names or not all(isinstance(name, str) and name.strip("./") for name in names):
        raise UserError(
            f"{what}: {key} in {file.name} is {short_repr(entries)}; in a directory that datasets "
            "saved it is a list of names"
        )
    return names


def _chosen(split: str, known: Sequence[str], what: str) -> str:
    """Return the split to read: `split`, or the only one of `known` if `split` is empty.

    Raises:
        UserError: If `split` does not exist, or is empty although there are several splits.
    """
    if split in known:
        return split
    if not split and len(known) == 1:
        return known[0]
    asked = f"no split {split!r}" if split else "several splits"
    raise UserError(f"{what} has {asked}: set split to one of {', '.join(known)}")


class _Chain:
    """Rows of several files as one sequence."""

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
        """Return the file that row `index` is in, and the row's index in that file."""
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


# ------------------------------------------------------------ JSONL


class _JsonlRows:
    """Rows of a file with one JSON object per line, read from disk when requested.

    Only a newline ends a line, because JSON strings may contain U+2028 and U+0085.
    """

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
        # orjson is fast, but it rounds whole numbers of more than 64 bits. Lines with such numbers,
        # and lines that orjson refuses, go to `parse_json` below, which also describes errors
        # better.
        if not _LARGE_NUMBER.search(line):
            with suppress(orjson.JSONDecodeError):
                row = orjson.loads(line)
        try:
            row = parse_json(line.decode(), self.where(index)) if row is None else row
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(index)} is not UTF-8 text (byte {error.start})"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{self.where(index)} must be a JSON object, got {type(row).__name__}")
        return row

    def where(self, index: int) -> str:
        return f"{self._what}:{self._numbers[index]}"


# ------------------------------------------------------------ Parquet and Arrow


def _arrow() -> Any:
    """Import and return pyarrow, here because the import is slow and JSONL files do not need it."""
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def _arrow_rows(file: Path, what: str, read: Callable[[Any, Path, str], Any]) -> Rows:
    """Return the rows of the Arrow table that `read` reads from `file`.

    Raises:
        UserError: If the file cannot be read or has a column of bytes.
    """
    arrow = _arrow()
    try:
        return _Table(read(arrow, file, what), what)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error


def _read_parquet(arrow: Any, file: Path, what: str) -> Any:
    """Return the Arrow table of a Parquet file: a small one in memory, a large one memory-mapped.

    The memory-mapped table is in a temporary file that has no name and disappears with the process.
    """
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
    """Return the table of an Arrow file or an Arrow stream, memory-mapped."""
    mapped = arrow.memory_map(str(file))
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    opened = arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)
    _check_schema(opened.schema, what)
    return opened.read_all()


class _Table:
    """Rows of an Arrow table, converted to JSON values when requested."""

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
        """Yield up to `count` rows from row `begin` on; for an invalid row, yield a UserError."""
        for index, row in enumerate(self._table.slice(begin, count).to_pylist(), begin):
            try:
                yield {name: _column(name, value) for name, value in row.items()}
            except ValueError as error:
                yield UserError(f"{self.where(index)}: {error}")


def _check_schema(schema: Any, what: str) -> None:
    """Raise a UserError if a column holds bytes, as image and audio columns of `datasets` do."""
    types = _arrow().types
    for field in schema:
        if _holds_bytes(field.type, types):
            raise UserError(
                f"{what}: column {field.name!r} has the type {field.type}, which is for data such "
                "as images; only text can be trained on. Remove the column."
            )


def _holds_bytes(kind: Any, types: Any) -> bool:
    """Return whether an Arrow type contains bytes at any depth.

    `types` is the module `pyarrow.types`.
    """
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
    """Return an Arrow column's value as JSON; remove nulls from chat messages and tools.

    In a list of mappings, Arrow gives every mapping the keys of all others, with null where a
    mapping lacked the key. A chat message or tool must not have such additional keys.
    """
    found = _json(value)
    first = found[0] if isinstance(found, list) and found else None
    padded = name == "tools" or (isinstance(first, dict) and "role" in first)
    return _without_null(found) if padded else found


def _without_null(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _json(value: Any) -> Any:
    """Return a Python value that Arrow produced as JSON: dates and decimals become strings.

    Raises:
        ValueError: If the value has no JSON form.
    """
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
