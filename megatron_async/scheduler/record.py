"""Records the scheduler's events and actions in files, and replays them against the current code.

A file has one JSON value per line. The first line contains the version of the format, the
schedule's settings, the first step and the policy version. Every other line contains an event and
its actions, each as `[name, fields...]`:

    {"e": ["Finished", 17], "a": [["Score", 17], ["Submit", 93, "engine-0", false]]}

With a clock, a third key `t` is the time in seconds since the epoch; a replay ignores it. If the
scheduler raised an exception, the line has `["Raised", "..."]` instead of actions.

A record contains the events of one process of the rollout manager. It is divided into files
`events/<lineage>[.<lost>[.<segment>]].jsonl`. `lost` is the number of manager processes that the
lineage had lost before this one, and `segment` counts the files of one record; an omitted number is
0. From the second file on, the first line also contains a snapshot of the scheduler and the number
of events before it. So each file can be replayed without the earlier files, which are removed after
a while.

Invariants
- Every event is recorded. If the scheduler raised an exception, the record is flushed at once.
- Reading a record returns events and actions equal to those that were written, in the types that
  their fields declare. A line with a missing or unknown field, or with a value of another type, is
  refused with its number.
- A last line that a crash cut short is ignored. A damaged line anywhere else is refused with its
  number.
- `replay` has no side effect except reading the file.
- No file is ever overwritten, and the name of a removed file is never used again.
- All files of a directory together, of all lineages, have at most `most_bytes` bytes plus the size
  of a snapshot; the oldest files are removed first. Files of the current record that contain none
  of the last `keep_steps` steps may be removed too. The file that is being written is never
  removed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import msgspec

from megatron_async.config import RunConfig
from megatron_async.config.schedule import ScheduleConfig
from megatron_async.errors import UserError
from megatron_async.files.disk import JsonLinesFile, writing
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scheduler.snapshot import freeze, thaw
from megatron_async.trajectory.types import PolicyVersion

_T = TypeVar("_T")

_SEGMENTS = 4
"""A new file is started after this fraction, 1 / `_SEGMENTS`, of the steps or bytes that are kept,
so that the oldest part of a record can be removed as a whole file."""
FORMAT = "megatron_async.schedule"
FORMAT_VERSION = 11
"""Version of the file format. It is increased when a field of an event, an action or the schedule
in the header changes; files of other versions are refused."""
# A run keeps the recorded events of its last `KEPT_STEPS` steps, in at most `MAX_BYTES` bytes; the
# oldest are removed first. Fifty steps are enough to see what led to a state of the scheduler.
KEPT_STEPS = 50
MAX_BYTES = 512 << 20


class Raised(ev.Message, frozen=True):
    """Entry that a record has instead of actions if the scheduler raised an exception; `error` is
    the exception's `repr`."""

    error: str

    def __str__(self) -> str:
        return f"the exception {self.error}"


RecordedAction = ev.Action | Raised


class Header(msgspec.Struct, frozen=True, rename={"config": "schedule"}):
    """First line of a record file: the scheduler's arguments, the number of events in earlier files
    of the record (`events_before`), and the scheduler's state after these events (`snapshot`; None
    in the first file)."""

    config: ScheduleConfig
    first_step: int
    version: PolicyVersion
    events_before: int = 0
    snapshot: dict[str, Any] | None = None

    def scheduler(self) -> Scheduler:
        """Create a scheduler in the state in which it received the first event of the file.

        Raises:
            UserError: The snapshot was written by a version of this program whose classes have
                other fields.
        """
        scheduler = Scheduler(self.config, first_step=self.first_step, version=self.version)
        if self.snapshot is not None:
            thaw(self.snapshot, scheduler)
        return scheduler


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a record file: an event (e), its actions (a), and its time (t)."""

    e: ev.Event
    a: Sequence[RecordedAction]
    t: float | None = None


_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True)
class Exchange:
    """An event and the actions that it caused.

    Attributes:
        index: Number of the event, counted from 0 at the start of the record.
        at: Time in seconds since the epoch; None if the record has no times.
    """

    index: int
    event: ev.Event
    actions: tuple[RecordedAction, ...]
    at: float | None = None


@dataclass(frozen=True)
class Divergence:
    """The first action of a replay that differs from the record. If one side has fewer actions, its
    missing action is None."""

    index: int
    event: ev.Event
    position: int
    recorded: RecordedAction | None
    replayed: RecordedAction | None

    def __str__(self) -> str:
        return (
            f"event {self.index} ({self.event}): recorded action {self.position} is "
            f"{self.recorded or 'missing'}, the replayed one is {self.replayed or 'missing'}"
        )


class RecordKey(NamedTuple):
    """The numbers in the name of a record file; keys sort in the order in which the files were
    written."""

    lineage: int
    lost: int = 0
    segment: int = 0

    @property
    def name(self) -> str:
        """Name of the record file."""
        parts = list(self)
        while len(parts) > 1 and not parts[-1]:
            parts.pop()
        return ".".join(map(str, parts)) + ".jsonl"


def record_key(path: Path) -> RecordKey | None:
    """Return the key of a record file; None for other files."""
    parts = path.name.removesuffix(".jsonl").split(".")
    if not all(part.isdecimal() and part.isascii() for part in parts) or len(parts) > 3:
        return None
    key = RecordKey(*map(int, parts))
    return key if key.name == path.name else None


def record_files(directory: Path) -> dict[RecordKey, Path]:
    """Return all record files of a directory, oldest first."""
    keyed = ((record_key(path), path) for path in directory.glob("*.jsonl"))
    return dict(sorted((key, path) for key, path in keyed if key is not None))


class RecordFiles:
    """Manages the files of one record: it names the next file, and removes files that are no longer
    needed."""

    def __init__(self, directory: Path, lineage: int, *, keep_steps: int, most_bytes: int) -> None:
        earlier = [key.lost for key in record_files(directory) if key.lineage == lineage]
        self._directory = directory
        self._key = RecordKey(lineage, max(earlier, default=-1) + 1, -1)
        self._steps_each = -(-keep_steps // _SEGMENTS)
        self._most_bytes = most_bytes
        self._steps = 0

    def open_next(self) -> JsonLinesFile:
        """Create the next file of the record, and remove files that need not be kept any longer.

        Raises:
            CannotWrite: The file cannot be created.
        """
        self._steps = 0
        self._key = self._key._replace(segment=self._key.segment + 1)
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
            stream = JsonLinesFile(self._directory / self._key.name, new=True)
            self._prune()
        return stream

    def full(self, actions: Sequence[object], size: int) -> bool:
        """Count a training step if `actions` emit a batch; return whether the record should
        continue in a new file.

        `size` is the number of bytes in the current file.
        """
        if any(isinstance(action, ev.EmitBatch) for action in actions):
            self._steps += 1
            if self._steps >= self._steps_each:
                return True
        return size * _SEGMENTS >= self._most_bytes

    def _prune(self) -> None:
        files = record_files(self._directory)
        del files[self._key]
        room = self._most_bytes - self._most_bytes // _SEGMENTS
        for key, path in reversed(files.items()):
            same = key[:2] == self._key[:2]
            with suppress(FileNotFoundError):
                room -= path.stat().st_size
                if room < 0 or (same and key.segment < self._key.segment - _SEGMENTS):
                    path.unlink()


class Recorder:
    """Writes one record of a scheduler's events and actions, to a stream or to a run's record
    files. The caller flushes and closes the record.

    Every file but the first begins with a snapshot of the scheduler, which takes 40 ms to write
    with 4,096 requests in flight.
    """

    def __init__(
        self,
        to: TextIO | RecordFiles,
        config: ScheduleConfig,
        *,
        first_step: int,
        version: PolicyVersion,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._files = to if isinstance(to, RecordFiles) else None
        self._stream: TextIO | JsonLinesFile = to.open_next() if isinstance(to, RecordFiles) else to
        self._events = 0
        self._size = 0
        self._header: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "schedule": config.model_dump(mode="json"),
            "first_step": first_step,
            "version": list(version),
        }
        self._write(self._header)
        # Write the header at once, because a file without it cannot be read as a record.
        self.flush()

    def step(self, scheduler: Scheduler, event: ev.Event) -> list[ev.Action]:
        """Call `scheduler.step(event)` and record it; an exception is recorded and raised again."""
        try:
            actions = scheduler.step(event)
        except Exception as error:
            self.write(event, [Raised(repr(error))])
            self.flush()
            raise
        self.write(event, actions)
        if self._files is not None and self._files.full(actions, self._size):
            self._go_on(self._files, scheduler)
        return actions

    def _go_on(self, files: RecordFiles, scheduler: Scheduler) -> None:
        """Close the current file and continue the record in the next file, which starts with a
        snapshot of `scheduler`."""
        self._stream.close()
        self._stream = files.open_next()
        self._write({**self._header, "events_before": self._events, "snapshot": freeze(scheduler)})
        self._size = 0

    def write(self, event: ev.Event, actions: Sequence[RecordedAction]) -> None:
        """Record an event and its actions."""
        self._events += 1
        at = None if self._clock is None else round(self._clock(), 4)
        self._size += self._write(_Line(event, actions, at))

    def flush(self) -> None:
        """Pass buffered lines to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file to which events and actions are recorded."""
        self._stream.close()

    def _write(self, line: dict[str, Any] | _Line) -> int:
        return self._stream.write(_ENCODE(line).decode() + "\n")


def new_record(
    directory: Path | None,
    config: RunConfig,
    version: PolicyVersion,
    clock: Callable[[], float] | None = None,
) -> Recorder | None:
    """Start the next record of the lineage of `version` in `directory`; return None without a
    directory.

    Raises:
        CannotWrite: If the file cannot be created.
    """
    if directory is None:
        return None
    files = RecordFiles(
        directory,
        version.lineage,
        keep_steps=KEPT_STEPS,
        most_bytes=MAX_BYTES,
    )
    return Recorder(
        files, config.resolved_schedule, first_step=version.number, version=version, clock=clock
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; an incomplete last line, which a crash may
    leave, is left out.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"schedule record {path} cannot be read: {error.strerror}") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            yield number, line


def read_record(path: Path) -> tuple[Header, Iterator[Exchange]]:
    """Read a record file; return its header and an iterator over its exchanges.

    Raises:
        UserError: If the file is not a record, or is damaged.
    """
    lines = _lines(path)
    number, text = next(lines, (0, b"null"))
    first = _decoded(path, number, text, msgspec.json.decode)
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise UserError(f"{path} is not a schedule record")
    if first.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"schedule record {path} has format_version {first.get('format_version')}; this "
            f"program reads {FORMAT_VERSION}"
        )
    try:
        header = msgspec.convert(first, Header, dec_hook=_schedule)
    except msgspec.ValidationError as error:
        raise UserError(f"schedule record {path}: its header is invalid ({error})") from error
    return header, _exchanges(path, lines, header.events_before)


def _schedule(_: type, settings: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(settings)


def _decoded(path: Path, number: int, text: bytes, decode: Callable[[bytes], _T]) -> _T:
    """Decode the text of line `number`.

    Raises:
        UserError: If the line is damaged.
    """
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise UserError(
            f"schedule record {path}: line {number} is not an event with its actions ({error})"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"schedule record {path} is damaged in line {number}") from error


def _line(text: bytes) -> _Line:
    line = _DECODE(text)
    # If the re-encoded line differs, decoding has filled in the default of a field that the text
    # lacks.
    if msgspec.json.decode(_ENCODE(line)) != msgspec.json.decode(text):
        raise msgspec.ValidationError("a field is missing")
    return line


def _exchanges(path: Path, lines: Iterator[tuple[int, bytes]], before: int) -> Iterator[Exchange]:
    for number, text in lines:
        line = _decoded(path, number, text, _line)
        yield Exchange(before + number - 2, line.e, tuple(line.a), line.t)


def replay(
    path: Path,
    make: Callable[[Header], Scheduler] | None = None,
    watch: Callable[[Exchange], None] | None = None,
    raised: Callable[[Exchange, Exception], None] | None = None,
) -> Divergence | None:
    """Send the events of a record to a scheduler; return the first action that differs from the
    recorded actions, or None.

    If the record has an exception, the replay continues after it, because the run may have sent
    more events to the scheduler before it ended.

    Args:
        path: The record file.
        make: Function that creates the scheduler from the header; None uses the current code.
        watch: Function that is called with every exchange before it is replayed.
        raised: Function that is called with an exchange and the exception that the scheduler raises
            in its replay.

    Raises:
        UserError: The file is not a record, is damaged, or has a snapshot of another version of
            this program.
    """
    header, exchanges = read_record(path)
    try:
        scheduler = make(header) if make is not None else header.scheduler()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"schedule record {path}: its snapshot is damaged ({error!r})") from error
    except UserError as error:
        raise UserError(f"schedule record {path}: {error}") from error
    for exchange in exchanges:
        if watch is not None:
            watch(exchange)
        actions: Sequence[RecordedAction]
        try:
            actions = scheduler.step(exchange.event)
        except Exception as error:  # noqa: BLE001  (a replay shows every defect)
            actions = [Raised(repr(error))]
            if raised is not None:
                raised(exchange, error)
        found = first_difference(exchange, actions)
        if found is not None:
            return found
    return None


def first_difference(exchange: Exchange, actions: Sequence[RecordedAction]) -> Divergence | None:
    """Return the first difference between `actions` and the recorded actions; None if they are
    equal."""
    for position, (before, now) in enumerate(zip_longest(exchange.actions, actions)):
        if before != now or type(before) is not type(now):
            return Divergence(exchange.index, exchange.event, position, before, now)
    return None
