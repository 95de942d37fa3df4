"""`megatron-async trajectories`: lists the trajectories of a run, prints one, or drops a group.

Pure functions turn the results of a `StoreReader` into objects that rich prints. The caller passes
them a tokenizer's function `decode`, which turns tokens into text.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.console import Group as Together
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.errors import UserError
from megatron_async.launcher.run_lock import hold_run_lock
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.drop import drop_group_of
from megatron_async.store.reader import StoreReader, TrajectorySummary
from megatron_async.tasks.text_task import load_tokenizer
from megatron_async.trajectory.types import PolicyVersion, Segment, Trajectory, TrajectoryState

Decode = Callable[[list[int]], str]


def list_command(run: Path, state: str | None, limit: int, with_exported: bool) -> None:
    """Print a table of the run's trajectories, newest last.

    Args:
        run: The run directory.
        state: Only trajectories in this state; None for all.
        limit: Number of trajectories to print, the newest ones; 0 for all.
        with_exported: Whether to include trajectories that are no longer in the database, because
            compaction has moved them to export files.

    Raises:
        UserError: There is no run or no such state.
    """
    directory, _ = RunDirectory.find(run, [])
    if state is not None and state not in set(TrajectoryState):
        raise UserError(f"--state is {state!r}; it must be one of {', '.join(TrajectoryState)}")
    state_filter = None if state is None else TrajectoryState(state)
    console = Console(soft_wrap=True)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        older = export.summaries(reader) if with_exported else []
        # Exported trajectories are older than most, but not all, trajectories in the database, so
        # the two lists must be merged.
        listed = sorted([*older, *reader.summaries()], key=lambda s: s.trajectory_id)
        console.print(listing(listed, state=state_filter, limit=limit or None))
        if reader.note:
            console.print(reader.note, markup=False, highlight=False)
        notice = "" if with_exported else export.export_notice(reader)
        if notice:
            console.print(notice, markup=False, highlight=False)


def show_command(run: Path, trajectory_id: int) -> None:
    """Print one trajectory: its prompt, its segments with their policy versions, and its reward. It
    may be in the database or in an export file.

    Raises:
        UserError: There is no run or no such trajectory.
    """
    directory, settings = RunDirectory.find(run, [])
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        found = export.find(reader, trajectory_id)
        tokenizer = load_tokenizer(settings.model.path)
        Console(soft_wrap=True).print(details(found, tokenizer.decode))


def drop_command(run: Path, trajectory_id: int) -> None:
    """Drop a trajectory and its whole group permanently from a run that has stopped.

    Raises:
        UserError: The run is in use, or the trajectory cannot be dropped.
    """
    directory, settings = RunDirectory.find(run, [])
    with hold_run_lock(directory, "trajectories --drop"):
        newest = next(iter(list_checkpoints(directory.checkpoints)), None)
        committed = None if newest is None else newest.manifest.version
        dropped = drop_group_of(
            directory.store_file, trajectory_id, committed, settings.store.directory
        )
    typer.echo(f"dropped (user), with its group: {', '.join(map(str, dropped))}")


# ---------------------------------------------------------------- objects that rich prints


def listing(
    summaries: Sequence[TrajectorySummary],
    *,
    state: TrajectoryState | None = None,
    limit: int | None = 50,
) -> RenderableType:
    """Return a line with the number of trajectories in each state, and a table of trajectories.

    Args:
        summaries: All trajectories.
        state: Only trajectories in this state are in the table; None for all.
        limit: Number of newest trajectories in the table; None for all.
    """
    chosen = [s for s in summaries if state is None or s.state is state]
    table = Table(box=None, pad_edge=False)
    has_turns = any(s.turn_count for s in chosen)
    for name in ("id", "group", "turns", "tokens", "reward"):
        if has_turns or name != "turns":
            table.add_column(name, justify="right")
    for name in ("state", "versions", "ended by"):
        table.add_column(name)
    newest = chosen if limit is None else chosen[-limit:]
    for summary in newest:
        turns = [str(summary.turn_count)] if has_turns else []
        table.add_row(
            str(summary.trajectory_id),
            str(summary.group_id),
            *turns,
            str(summary.tokens),
            "" if summary.reward is None else f"{summary.reward:.3g}",
            state_text(summary.state, summary.batched_step, summary.drop_reason),
            version_range(summary.versions),
            "" if summary.finish_reason is None else summary.finish_reason.value,
        )
    parts: list[RenderableType] = [Text(counts_line(summaries))]
    if not chosen:
        kind = "trajectories" if state is None else f"{state} trajectories"
        return Together(*parts, Text(f"no {kind}"))
    parts.append(table)
    if len(newest) < len(chosen):
        count = f"{len(chosen) - len(newest)} older trajectories"
        parts.append(Text(f"{count} are not shown (--limit 0: all)"))
    return Together(*parts)


def details(trajectory: Trajectory, decode: Decode) -> RenderableType:
    """Return a printable description of a trajectory: its number, state and reward, its prompt, and
    the text of each segment with its author, which is the policy or the environment."""
    t = trajectory
    head = Table.grid(padding=(0, 2))
    facts = [
        ("trajectory", f"{t.trajectory_id} (group {t.group_id})"),
        ("state", state_text(t.state, t.batched_step, t.drop_reason)),
        ("task", t.prompt.task),
        ("prompt", f"{len(t.prompt.token_ids)} tokens"),
        ("response", f"{t.response_length} tokens in {len(t.segments)} segments"),
        ("ended by", "" if t.finish_reason is None else t.finish_reason.value),
        ("reward", "not scored" if t.reward is None else f"{t.reward:.4g}"),
    ]
    if t.prompt.priority:
        facts.append(("priority", str(t.prompt.priority)))
    facts += [(f"  {name}", f"{value:.4g}") for name, value in sorted(t.reward_detail.items())]
    for name, value in facts:
        head.add_row(name, escape(value))
    parts: list[RenderableType] = [head, Text()]
    if t.turns:
        return Together(*parts, *conversation(t, decode))
    parts += [Text("prompt", style="bold"), Text(decode(t.prompt.token_ids.tolist()))]
    for i, segment in enumerate(t.segments):
        parts += [Text(), Text(segment_title(i, segment), style="bold")]
        parts.append(Text(decode(segment.token_ids.tolist())))
    return Together(*parts)


def conversation(t: Trajectory, decode: Decode) -> Iterator[RenderableType]:
    """Yield printable lines of the episode `t`, turn by turn: each segment with its author, policy
    version, loss mask and text.

    The texts are decoded from the tokens that the policy read or generated. A turn may belong to
    several branches of the episode; the printed mask is its mask in the first of them.
    """
    for turn in t.turns:
        follows = "first turn" if turn.parent is None else f"follows turn {turn.parent}"
        yield Text(f"turn {turn.number}, {follows}", style="bold")
        for index, segment in enumerate(t.segments_of(turn), start=turn.segment):
            mask = 0 if segment.from_environment or turn.abandoned else 1
            yield Text(f"{segment_title(index, segment)}, mask {mask}", style="dim")
            yield Text(decode(segment.token_ids.tolist()))
        ended = "is open" if turn.end is None else f"ended by {turn.end.value}"
        yield Text(f"turn {turn.number} {ended}, reward {turn.reward:.4g}")
        yield Text()


def counts_line(summaries: Sequence[TrajectorySummary]) -> str:
    """Format counts by state, such as "12 trajectories: 3 partial, 9 batched", in the order of
    states."""
    counts = Counter(s.state for s in summaries)
    parts = ", ".join(f"{counts[state]} {state}" for state in TrajectoryState if counts[state])
    return f"{len(summaries)} trajectories" + (f": {parts}" if parts else "")


def state_text(state: TrajectoryState, batched_step: int | None, drop_reason: str | None) -> str:
    """Format the state of a trajectory, such as "batched (step 3)", with the step whose batch it is
    in, or else the reason for which it was dropped."""
    if batched_step is not None:
        return f"{state} (step {batched_step})"
    return state.value if drop_reason is None else f"{state} ({drop_reason})"


def segment_title(index: int, segment: Segment) -> str:
    """Format a segment's author and length and, if generated, the mean log-prob of its tokens."""
    if segment.from_environment:
        return f"segment {index}: environment, {len(segment)} tokens"
    mean = float(segment.logprobs.mean()) if len(segment) else 0.0
    return (
        f"segment {index}: policy {segment.version} on {segment.engine_id}, "
        f"{len(segment)} tokens, mean log-prob {mean:.3f}"
    )


def version_range(versions: Sequence[PolicyVersion]) -> str:
    """Format versions: "0.3" for a single version, "0.3 to 1.5" for the oldest and the newest of
    several."""
    if not versions:
        return ""
    oldest, newest = min(versions), max(versions)
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"
