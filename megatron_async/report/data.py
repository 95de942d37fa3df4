"""Reads a run's metrics, warnings and some of its trajectories as the plain values of a report.

Invariants
- The run directory is only read, so that a report about a running run is possible.
- If a run has no evaluations, or not the metric of a curve, the report leaves them out.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig
from megatron_async.errors import UserError
from megatron_async.files.disk import json_lines
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.interface import SCORER_FAULTS
from megatron_async.store import export
from megatron_async.store.location import has_store
from megatron_async.store.reader import StoreReader, TrajectorySummary
from megatron_async.tasks.text_task import load_tokenizer
from megatron_async.telemetry.metrics import read_all_metrics, read_metrics
from megatron_async.telemetry.summary import RunSummary, summarize
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Segment,
    Trajectory,
)

Lines = list[dict[str, float]]
_MAX_CHARACTERS = 4000
_MAX_FACTS = 300
_MAX_ROWS = 3
_MAX_TURNS = 32
_ENDS = {FinishReason.STOP: "complete", FinishReason.LENGTH: "cut at the length limit"}
_EPISODE_ENDS = {
    FinishReason.STOP: "by the environment",
    FinishReason.LENGTH: "at a limit of turns, length or time",
}


@dataclass(frozen=True)
class Piece:
    """A part of a response that one author wrote: one policy version, or the environment.

    Attributes:
        version: Policy version that wrote the text, in words; None for the environment.
        engine: Id of the engine that generated the text.
        tokens: Number of tokens of the text.
        heading: Heading to show above the text if a turn begins with it; otherwise empty.
    """

    text: str
    version: str | None
    engine: str = ""
    tokens: int = 0
    heading: str = ""


@dataclass(frozen=True)
class ReportSample:
    """A trajectory, or a response of an evaluation, that the report shows as an example.

    Attributes:
        why: Reason why it was chosen, such as "highest reward".
        facts: Its reward, length and other facts in words.
        prompt: Text of its prompt.
        pieces: Its response, in parts by one author each.
    """

    why: str
    facts: str
    prompt: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RunData:
    """All values that the report shows of a run.

    Attributes:
        settings: Texts of the main settings of the run and of its machine, by name.
    """

    name: str
    settings: Mapping[str, str]
    summary: RunSummary
    train: Lines
    evaluations: Lines
    warnings: list[dict[str, Any]]
    samples: tuple[ReportSample, ...]
    episode_endings: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Number of episodes that ended in the same way after the same number of turns. The key has the
    way in words and the number of turns."""

    @property
    def began(self) -> float:
        """Time of the end of the first step or evaluation, in seconds since 1970; 0 if there is
        none."""
        return min((line["time"] for line in (*self.train, *self.evaluations)), default=0.0)


def read_run(path: Path) -> RunData:
    """Read the files of the run at `path` into the values of its report.

    Raises:
        UserError: If there is no run.
    """
    directory, config = RunDirectory.find(path, [])
    train = read_metrics(directory.metrics_file)
    tokenizers = (Path(config.model.path), directory.hf_export)
    samples, episode_endings = _trajectories(directory, _decoder(tokenizers))
    return RunData(
        name=directory.path.name,
        settings=dict(_settings(config, directory.metrics_file)),
        summary=summarize(directory),
        train=train,
        evaluations=read_metrics(directory.metrics_file, kind="eval"),
        warnings=read_all_metrics(directory.metrics_file, kind="warning"),
        samples=(*samples, *_evaluated(directory.path / "evaluations")),
        episode_endings=episode_endings,
    )


def _settings(config: RunConfig, metrics_file: Path) -> Iterator[tuple[str, str]]:
    """Generate pairs of a name and a text: the main settings of the run, and the machine of its
    newest start."""
    schedule, optimizer = config.schedule, config.optimizer
    yield "model", "/".join(Path(config.model.checkpoint or config.model.path).parts[-2:])
    batch = f"{schedule.groups_per_batch} groups of {schedule.group_size}"
    yield "schedule", f"{schedule.preset}, {batch} a batch, {schedule.concurrency} in flight"
    yield "recipe", config.algorithm.recipe
    yield "learning rate", f"{optimizer.lr:g} ({optimizer.name}, {optimizer.schedule})"
    starts = read_metrics(metrics_file, kind="start")
    yield "machine", str(starts[-1]["machine"]) if starts else "not recorded"


def _decoder(models: Sequence[Path]) -> Callable[[Sequence[int]], str]:
    """Return a function that turns tokens into text by the tokenizer of the first model that has
    one.

    If none has a tokenizer, the text only says how many tokens there are. A model with a relative
    path is found only if the report is made in the directory in which the run was started.
    """
    for model in models:
        with suppress(UserError):
            if model.is_dir():
                tokenizer = load_tokenizer(str(model))
                return lambda ids: str(tokenizer.decode(list(ids)))
    missing = f"no tokenizer in {models[0]}, seen from {Path.cwd()}"
    return lambda ids: f"({len(ids)} tokens; {missing})" if ids else ""


def _trajectories(
    directory: RunDirectory, decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[ReportSample, ...], Counter[tuple[str, int]]]:
    """Return the trajectories of a run that the report shows, and the number of its episodes by how
    they ended and by their number of turns.

    Args:
        directory: The run directory.
        decode: Function that turns tokens into text.
    """
    if not has_store(directory.store_file):
        return (), Counter()
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        everything = [*reader.summaries(), *export.summaries(reader)]
        samples = tuple(
            _sample(why, export.find(reader, summary.trajectory_id), decode)
            for why, summary in _chosen(everything)
        )
        return samples, Counter(filter(None, map(_ending, everything)))


def _ending(episode: TrajectorySummary) -> tuple[str, int] | None:
    """Return how an episode ended, in words, and its number of turns; None if it has not ended."""
    if not episode.turn_count:
        return None
    if episode.drop_reason is not None:
        return f"dropped: {episode.drop_reason}", episode.turn_count
    if episode.finish_reason is None:
        return None
    return _EPISODE_ENDS[episode.finish_reason], episode.turn_count


def _evaluated(folder: Path) -> Iterator[ReportSample]:
    """Generate, for the newest evaluation of each set, the response with the lowest reward and then
    the first responses.

    Args:
        folder: Directory `evaluations` of the run.
    """
    newest = {
        file.name.rpartition("-")[0]: file for file in sorted(folder.glob("*-*.jsonl"), key=_step)
    }
    for name, file in newest.items():
        rows = list(json_lines(file.read_bytes()))
        worst = min(range(len(rows)), key=lambda i: rows[i].get("reward") or 0.0, default=0)
        for row in [*rows[worst : worst + 1], *rows[:worst], *rows[worst + 1 :]][:_MAX_ROWS]:
            # Older versions of this program stored the data's question instead of the whole prompt.
            prompt = row.get("prompt") or row.get("question", "")
            written = [_version(PolicyVersion.parse(text)) for text in row.get("versions", ())]
            author = " and ".join(written) or f"version {_step(file)}"
            piece = Piece(_cut(row.get("response", "")), author, tokens=row.get("tokens", 0))
            pieces: tuple[Piece, ...] = (piece,)
            # For conversations, `messages` contains all messages, including those of the prompt.
            if row.get("messages"):
                prompt, pieces = "", _pieces_of(row["messages"], author)
            yield ReportSample(f"evaluation {name}", _facts(row), _cut(prompt), pieces)


def _pieces_of(messages: Sequence[Mapping[str, Any]], author: str) -> tuple[Piece, ...]:
    """Return the messages of a conversation, each with its role as heading.

    Args:
        messages: The messages.
        author: The policy version that wrote the assistant's messages.
    """
    shown = messages[: 2 * _MAX_TURNS]
    return tuple(
        Piece(_cut(m["content"]), author if m["role"] == "assistant" else None, heading=m["role"])
        for m in shown
    )


def _facts(row: dict[str, Any]) -> str:
    """Return in words the reward of an evaluated response, the components of its score, and faults
    of the scoring."""
    reward, answer = row.get("reward"), row.get("answer")
    facts = ["no score" if reward is None else f"reward {reward:.3g}"]
    components = {k: v for k, v in row.get("parts", {}).items() if (k, v) != ("score", reward)}
    if components.pop("answered", 1) == 0:
        facts.append("no answer found")
    for name, value in components.items():
        fault = name in SCORER_FAULTS
        facts.append(name.replace("_", " ") if fault else f"{name} {value:.3g}")
    if answer:
        facts.append(f"right answer {answer}")
    if row.get("truncated"):
        facts.append("cut at the length limit")
    return _cut(", ".join(facts), _MAX_FACTS)


def _version(version: PolicyVersion) -> str:
    """Return a policy version in words."""
    name = f"version {version.number}"
    return f"{name} (lineage {version.lineage})" if version.lineage else name


def _cut(text: str, most: int = _MAX_CHARACTERS) -> str:
    """Return `text`, shortened to `most` characters."""
    return text if len(text) <= most else f"{text[:most]} …"


def _step(file: Path) -> int:
    """Return the step that is part of the name of an evaluation's file; -1 if there is none."""
    number = file.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _chosen(summaries: Sequence[TrajectorySummary]) -> list[tuple[str, TrajectorySummary]]:
    """Choose the trajectories that the report shows, among those that have a reward; return each
    with the reason.

    If the trajectories are single responses, they are those with the highest reward, the lowest
    reward, the most tokens and the most policy versions; of several equal ones, the newest. If they
    are episodes, they are those with the highest and the lowest reward, and a random one. The
    random one is always the same for the same number of episodes, so that a report can be repeated.
    """
    scored = sorted((s for s in summaries if s.reward is not None), key=lambda s: s.trajectory_id)
    if not scored:
        return []
    keys: dict[str, Callable[[TrajectorySummary], float]] = {
        "highest reward": lambda s: s.reward or 0.0,
        "lowest reward": lambda s: -(s.reward or 0.0),
        "longest": lambda s: s.tokens,
        "most policy versions": lambda s: len(s.versions),
    }
    best = {why: max(reversed(scored), key=key) for why, key in keys.items()}
    if any(summary.turn_count for summary in scored):
        drawn = random.Random(len(scored)).choice(scored)
        best = {**dict(list(best.items())[:2]), "random": drawn}
    chosen = {summary.trajectory_id: summary for summary in best.values()}
    return [(", ".join(why for why in best if best[why] is s), s) for s in chosen.values()]


def _sample(why: str, found: Trajectory, decode: Callable[[Sequence[int]], str]) -> ReportSample:
    """Return a trajectory as the report shows it, with the reason `why` it was chosen."""
    if found.turns:
        return _episode(why, found, decode)
    ended = "unfinished" if found.finish_reason is None else _ENDS[found.finish_reason]
    step = "" if found.batched_step is None else f", trained in step {found.batched_step}"
    facts = (
        f"trajectory {found.trajectory_id}, reward {found.reward:.3g}, {found.response_length} "
        f"tokens in {_counted(found.segments, 'segment')}, {ended}{step}"
    )
    pieces = tuple(_piece(segment, decode) for segment in found.segments)
    return ReportSample(why, facts, _cut(decode(found.prompt.token_ids.tolist())), pieces)


def _counted(things: Sequence[object], what: str) -> str:
    """Return a text with the number of `things`, which are called `what`, such as `1 segment` or `2
    segments`."""
    return f"{len(things)} {what}" if len(things) == 1 else f"{len(things)} {what}s"


def _piece(segment: Segment, decode: Callable[[Sequence[int]], str]) -> Piece:
    """Return a segment as a `Piece`: its text with its author."""
    version = None if segment.from_environment else _version(segment.version)
    text = _cut(decode(segment.token_ids.tolist()))
    return Piece(text, version, segment.engine_id, len(segment))


def _episode(why: str, found: Trajectory, decode: Callable[[Sequence[int]], str]) -> ReportSample:
    """Return an episode as the report shows it: turn by turn, with the reason `why` it was
    chosen."""
    ended = found.finish_reason and f"ended {_EPISODE_ENDS[found.finish_reason]}"
    step = "" if found.batched_step is None else f", trained in step {found.batched_step}"
    facts = (
        f"episode {found.trajectory_id}, reward {found.reward:.3g}, "
        f"{_counted(found.turns, 'turn')}, {found.response_length} tokens, "
        f"{ended or 'unfinished'}{step}"
    )
    pieces: list[Piece] = []
    for turn in found.turns[:_MAX_TURNS]:
        of_turn = [_piece(segment, decode) for segment in found.segments_of(turn)]
        first, *rest = of_turn or [Piece("", None)]
        heading = f"turn {turn.number}"
        if turn.parent is not None and turn.parent != turn.number - 1:
            heading += f", after turn {turn.parent}"
        if turn.reward:
            heading += f", reward {turn.reward:.3g}"
        begins = replace(first, heading=heading, text=first.text.lstrip("\n"))
        pieces += [begins, *rest]
    if len(found.turns) > _MAX_TURNS:
        facts += f", the first {_MAX_TURNS} are shown"
    return ReportSample(why, facts, _cut(decode(found.prompt.token_ids.tolist())), tuple(pieces))
