"""`megatron-async replay RUN_DIR`: recorded scheduler events, fed to today's scheduler.

Invariants
- What the scheduler raises is shown with its traceback, at its event, and ends nothing else.
- Nothing is written; a run that is still going on may be replayed up to its last complete line.
- Every lineage of the run is replayed by itself, as it was recorded; each restart of the rollout
  manager within a lineage began a record of its own, and a long record has several files
  (`scheduler.record`). Each file is replayed by itself, from its snapshot if it has one.
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
    """Watches exchanges; one line for each batch and each thing out of the ordinary."""

    lines: list[str] = field(default_factory=list)
    events: int = 0
    raised: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _tokens: int = 0

    def watch(self, exchange: Exchange) -> None:
        """Take one exchange."""
        self.events += 1
        for thing in (exchange.event, *exchange.actions):
            self._counts[type(thing).__name__] += 1
            if note := self._note(thing, exchange.event):
                self.lines.append(f"{exchange.index:>9}  {note}")

    def saw_raise(self, exchange: Exchange, error: Exception) -> None:
        """Take what today's scheduler raised at an exchange."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self.raised.append(f"event {exchange.index} ({exchange.event}) makes it raise\n{text}")

    def _note(self, thing: ev.Event | RecordedAction, event: ev.Event) -> str | None:
        """Count tokens; return the line about an event, or about an action that follows `event`."""
        match thing:
            case ev.TokensArrived():
                self._tokens += thing.count
            case ev.ManyAborted():
                self._counts["Aborted"] += len(thing.requests)
                self._tokens += sum(sum(request[1::2]) for request in thing.requests)
            case ev.EngineUp():
                return f"engine {thing.engine_id} up with {thing.version}"
            case ev.EnginesUp():
                names = ", ".join(engine.engine_id for engine in thing.engines)
                return f"engines {names} up with {thing.engines[0].version}"
            case ev.EngineDown():
                return f"engine {thing.engine_id} down"
            case ev.UpdateRequested():
                return f"update {thing.number} requested"
            case ev.WeightsPublished():
                return f"version {thing.version} published"
            case ev.BatchTaken():
                return f"batch {thing.step} taken by the trainer"
            case ev.EmitBatch():
                counts, self._counts = self._counts, Counter()
                tokens, self._tokens = self._tokens, 0
                return (
                    f"batch {thing.step} emitted: {len(thing.group_ids)} groups; since the last "
                    f"one {tokens} tokens, {counts['Submit']} submitted, {counts['Finished']} "
                    f"finished, {counts['Aborted']} aborted, {counts['Drop']} dropped, "
                    f"{counts['Restart']} restarted"
                )
            case Raised():
                return f"{event}: the scheduler raised {thing.error}"
            case ev.Warn():
                return f"{thing.name}: {thing.message}"
        return None


def records_of(run_directory: Path, lineage: int | None) -> list[Path]:
    """Record files, oldest lineage first. Raises UserError when there is none."""
    directory = RunDirectory(run_directory).events
    found = record_files(directory)
    known = sorted({key.lineage for key in found})
    if lineage is not None:
        if lineage not in known:
            raise UserError(f"--lineage {lineage}: {directory} has lineages {known or 'none'}")
        return [path for key, path in found.items() if key.lineage == lineage]
    if not found:
        raise UserError(
            f"{run_directory} has no recorded events (events/*.jsonl): the run needs "
            "telemetry.record_events true"
        )
    return list(found.values())


def replay_command(run_directory: Path, lineage: int | None, timeline: bool) -> None:
    """Print a timeline and the outcome of each lineage. Raises ComponentFailure at a difference."""
    differs: Divergence | None = None
    for path in records_of(run_directory, lineage):
        if not path.exists():
            typer.echo(f"{path}: removed meanwhile, for what the run records now")
            continue
        if not path.stat().st_size:
            typer.echo(f"{path}: empty, as its manager ended before it could write")
            continue
        seen = Timeline()
        before = read_record(path)[0].events_before
        if before:
            typer.echo(f"{path}: from a snapshot after {before} events")
        found = replay(path, watch=seen.watch, raised=seen.saw_raise)
        if timeline:
            typer.echo(f"{path}: event index, what happened")
            for line in seen.lines:
                typer.echo(line)
        for what in seen.raised:
            typer.echo(f"{path}: {what}")
        if found is None:
            also = f", {len(seen.raised)} of which raised then too" if seen.raised else ""
            typer.echo(f"{path}: same actions for {seen.events} events{also}")
        else:
            typer.echo(f"{path}: {found}")
            differs = differs or found
    if differs is not None:
        raise ComponentFailure(f"the scheduler acts differently from the record: {differs}")
