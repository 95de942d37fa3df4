"""`megatron-async replay RUN_DIR`: feeds the recorded events of a run to the scheduler of the
installed code, to find out whether it decides as it did during the run.

Invariants
- An error that the scheduler raises is shown with its traceback at the event that caused it, and
  does not end the command.
- Nothing is written. The record of a run that is still running is replayed up to its last complete
  line.
- Each lineage (one start of the trainer) is replayed separately, as it was recorded. Each restart
  of the rollout manager within a lineage started a new record, and a long record consists of
  several files (`scheduler.record`). Each file is replayed separately, from its snapshot if it has
  one.
"""

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import typer

from megatron_async.errors import ComponentFailure, UserError
from megatron_async.run_directory import RunDirectory
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import (
    Divergence,
    Exchange,
    Raised,
    RecordedAction,
    read_record,
    record_files,
    replay,
)


@dataclass
class Timeline:
    """Collects a line for each batch and each unusual event of a replay."""

    lines: list[str] = field(default_factory=list)
    events: int = 0
    raised: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _tokens: int = 0

    def watch(self, exchange: Exchange) -> None:
        """Count one exchange, which is an event and the actions that the scheduler returned, and
        add its lines to the timeline."""
        self.events += 1
        for item in (exchange.event, *exchange.actions):
            self._counts[type(item).__name__] += 1
            if note := self._note(item, exchange.event):
                self.lines.append(f"{exchange.index:>9}  {note}")

    def saw_raise(self, exchange: Exchange, error: Exception) -> None:
        """Add an error, with its traceback, that the scheduler raised for the event of
        `exchange`."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self.raised.append(
            f"event {exchange.index} ({exchange.event}) makes the scheduler raise\n{text}"
        )

    def _note(self, item: ev.Event | RecordedAction, event: ev.Event) -> str | None:
        """Count `item`, which is `event` or one of its actions; return its line in the timeline, or
        None if it has no line."""
        match item:
            case ev.TokensArrived():
                self._tokens += item.count
            case ev.ManyAborted():
                self._counts["Aborted"] += len(item.requests)
                self._tokens += sum(sum(request[1::2]) for request in item.requests)
            case ev.EngineUp():
                return f"engine {item.engine_id} up with {item.version}"
            case ev.EnginesUp():
                names = ", ".join(engine.engine_id for engine in item.engines)
                return f"engines {names} up with {item.engines[0].version}"
            case ev.EngineDown():
                return f"engine {item.engine_id} down"
            case ev.UpdateRequested():
                return f"update {item.number} requested"
            case ev.WeightsPublished():
                return f"version {item.version} published"
            case ev.BatchTaken():
                return f"batch {item.step} fetched by the trainer"
            case ev.EmitBatch():
                counts, self._counts = self._counts, Counter()
                tokens, self._tokens = self._tokens, 0
                return (
                    f"batch {item.step} emitted: {len(item.group_ids)} groups; since the last "
                    f"batch {tokens} tokens, {counts['Submit']} submitted, {counts['Finished']} "
                    f"finished, {counts['Aborted']} aborted, {counts['Drop']} dropped, "
                    f"{counts['Restart']} restarted"
                )
            case Raised():
                return f"{event}: the scheduler raised {item.error}"
            case ev.Warn():
                return f"{item.name}: {item.message}"
        return None


def records_of(run_directory: Path, lineage: int | None) -> list[Path]:
    """Return the record files of a run, oldest lineage first; with `lineage`, only the files of
    that lineage.

    Raises:
        UserError: There are no records.
    """
    directory = RunDirectory(run_directory).events
    found = record_files(directory)
    known = sorted({key.lineage for key in found})
    if lineage is not None:
        if lineage not in known:
            raise UserError(
                f"--lineage is {lineage}, but {directory} has the lineages {known or 'none'}"
            )
        return [path for key, path in found.items() if key.lineage == lineage]
    if not found:
        raise UserError(
            f"{run_directory} has no recorded events (events/*.jsonl), which require "
            "telemetry.record_events true"
        )
    return list(found.values())


def replay_command(run_directory: Path, lineage: int | None, timeline: bool) -> None:
    """Replay each record of a run and print whether the scheduler acted as recorded.

    Args:
        run_directory: The run directory.
        lineage: Only the records of this lineage; None for all.
        timeline: Whether to print a line for each batch and each unusual event too.

    Raises:
        ComponentFailure: The scheduler acted differently from a record.
    """
    differs: Divergence | None = None
    for path in records_of(run_directory, lineage):
        if not path.exists():
            typer.echo(f"{path}: removed by the run meanwhile, to limit its records")
            continue
        if not path.stat().st_size:
            typer.echo(f"{path}: empty, because its manager ended before it could write")
            continue
        seen = Timeline()
        before = read_record(path)[0].events_before
        if before:
            typer.echo(f"{path}: from a snapshot after {before} events")
        found = replay(path, watch=seen.watch, raised=seen.saw_raise)
        if timeline:
            typer.echo(f"{path}: event index, description")
            for line in seen.lines:
                typer.echo(line)
        for error in seen.raised:
            typer.echo(f"{path}: {error}")
        if found is None:
            also = f"; {len(seen.raised)} of them raised the same error" if seen.raised else ""
            typer.echo(f"{path}: same actions for {seen.events} events{also}")
        else:
            typer.echo(f"{path}: {found}")
            differs = differs or found
    if differs is not None:
        raise ComponentFailure(f"the scheduler acts differently from the record: {differs}")
