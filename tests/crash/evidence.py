"""Reads the evidence that a run of the crash test or of the fault program leaves.

The evidence consists of independent records:

- the arrivals: every token that reached a rollout manager (`ledger.py`);
- the trainer's record: every lineage that it started and every batch that it received
  (`ledger.py`);
- the store with its export, and the manifests of the checkpoints;
- for runs of episodes, every call that an environment received (`noted_environment.py`);
- every engine that was started, and every fault that was injected (`ledger.py`).

This module only reads the records; `checks.py` compares them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.run_directory import RunDirectory
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import (
    StoreContent,
    StoreReader,
    assemble,
    prompt_of,
    read_parts,
)
from megatron_async.store.schema import connect
from megatron_async.trajectory.types import PolicyVersion, TrajectoryState
from tests.crash.episodes import Call, Episode, calls_of, name_of
from tests.crash.faults import Injected
from tests.crash.ledger import ledger_file

CONSUMED = "batched"


@dataclass(frozen=True)
class Request:
    """A generation request and the tokens that arrived for it.

    Attributes:
        trajectory_id: Trajectory that the request belongs to.
        start: Position of the first requested token, counted from the start of the prompt.
        offset: Offset in the file of arrivals, which orders requests by time.
        ids: Tokens that arrived.
        largest_chunk: Number of tokens of the largest chunk that arrived.
        noted_end: End that the engine reported; None if the engine reported no end.
        input: Tokens before `start`.
    """

    trajectory_id: int
    start: int
    offset: int
    ids: tuple[int, ...] = ()
    largest_chunk: int = 0
    noted_end: str | None = None
    input: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Launch:
    """An engine that a manager started.

    Attributes:
        life: Random ID of the manager's process.
        index: Index of the engine among the engines of the run.
        engine_id: ID of the engine.
        url: Address of the engine.
    """

    life: str
    index: int
    engine_id: str
    url: str


@dataclass(frozen=True)
class Attach:
    """Start of `lineage` at `step` by a trainer, or its continuation there.

    `parent` is the lineage of the checkpoint that the trainer started from; None without one.
    """

    lineage: int
    step: int
    parent: int | None


@dataclass(frozen=True)
class Batch:
    """A batch as the trainer received it; `lag` is the largest lag of its trained tokens."""

    lineage: int
    step: int
    ids: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    lag: int


@dataclass(frozen=True)
class Kept:
    """A trajectory as it is in the store or its export.

    Attributes:
        trajectory_id: ID of the trajectory.
        state: Name of the trajectory's state; `CONSUMED` if it is in a batch that counts.
        prompt: Tokens before the first response of the policy.
        tokens: All tokens after `prompt`.
        versions: Policy version of each item of `tokens`.
        reward: The reward, if any.
        drop_reason: Reason for which the trajectory was dropped, if it was.
        consumed: Lineage and step of the batch that consumed the trajectory.
        opening: Number of tokens at the end of `prompt` that the store holds as tokens of the
            environment; 0 unless the trajectory is an episode.
        own: Whether the policy generated each item of `tokens`; empty if it generated all.
    """

    trajectory_id: int
    state: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    versions: tuple[PolicyVersion, ...]
    reward: float | None = None
    drop_reason: str | None = None
    consumed: tuple[int, int] | None = None
    opening: int = 0
    own: tuple[bool, ...] = ()

    def is_own(self, place: int) -> bool:
        """Return whether the policy generated the token at index `place` of `tokens`."""
        return not self.own or self.own[place]

    @property
    def own_versions(self) -> set[PolicyVersion]:
        """Policy versions of the tokens that the policy generated."""
        return {v for place, v in enumerate(self.versions) if self.is_own(place)}


@dataclass(frozen=True)
class Seen:
    """A trajectory as the store had it at one moment during the run."""

    state: str
    tokens: int
    reward: float | None


@dataclass(frozen=True)
class Evidence:
    """All records of a run that has ended.

    Attributes:
        requests: Requests of each trajectory, in order of time.
        attaches: Attaches of trainers, in order of time.
        batches: Batches that trainers received, in order of time.
        dropped_batches: Lineage and step of the batches that the trainer dropped as unusable.
        kept: Copies of each trajectory in the store and its export.
        trajectories: Number of trajectory IDs that the store has assigned.
        newest_checkpoint: Lineage and step of the newest checkpoint.
        looks: Contents of the store at moments during the run.
        launches: Engines that managers started.
        injected: Faults that were injected.
        calls: Calls that environments received.
        episodes: Stored episodes by name.
        open_at: Names of the episodes that were open, for each kill.
        lives: Number of times that the processes of the environments may have been started.
    """

    requests: dict[int, list[Request]]
    attaches: list[Attach]
    batches: list[Batch]
    dropped_batches: set[tuple[int, int]]
    kept: dict[int, list[Kept]]
    trajectories: int
    newest_checkpoint: tuple[int, int] | None
    looks: list[dict[int, Seen]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    episodes: dict[str, Episode] = field(default_factory=dict)
    open_at: list[frozenset[str]] = field(default_factory=list)
    lives: int = 1


def gather(
    directory: RunDirectory,
    looks: list[dict[int, Seen]],
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    open_at: Sequence[frozenset[str]] = (),
    lives: int = 1,
) -> Evidence:
    """Collect the evidence of a run that has ended.

    Args:
        directory: The run's directory.
        looks: Contents of the store at moments during the run.
        decode: Returns the text of a response's tokens; None if the trajectories are not episodes.
        open_at: Names of the episodes that were open, for each kill.
        lives: Number of times that the processes of the environments may have been started.
    """
    attaches, batches, dropped = read_trained(ledger_file(directory.path, "trained"))
    faults = json_lines(ledger_file(directory.path, "faults"))
    kept: dict[int, list[Kept]] = defaultdict(list)
    manifests = [c.manifest for c in list_checkpoints(directory.checkpoints)]
    newest = max(((m.lineage, m.step) for m in manifests), default=None)
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    found = [
        *_stored(directory.store_file, content, newest),
        *read_export(directory.path / "export" / "trajectories.jsonl"),
    ]
    for one in found:
        kept[one.trajectory_id].append(one.kept)
    played = [one.episode(decode) for one in found if decode is not None and one.turns]
    return Evidence(
        requests=read_arrivals(ledger_file(directory.path, "arrivals")),
        attaches=attaches,
        batches=batches,
        dropped_batches=dropped,
        kept=dict(kept),
        trajectories=content.counters.next_trajectory,
        newest_checkpoint=newest,
        looks=looks,
        launches=[
            Launch(line["life"], line["index"], line["launched"], line["url"])
            for _, line in json_lines(ledger_file(directory.path, "engines"))
        ],
        injected=[Injected(**line) for _, line in faults],
        calls=calls_of(line for _, line in json_lines(ledger_file(directory.path, "calls"))),
        episodes={one.name: one for one in played},
        open_at=list(open_at),
        lives=lives,
    )


def look(directory: RunDirectory) -> dict[int, Seen]:
    """Return the current state of all trajectories in the store; {} before the store exists."""
    if not directory.store_file.exists():
        return {}
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        return {
            s.trajectory_id: Seen(s.state.value, s.tokens, s.reward) for s in reader.summaries()
        }


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the offset and the content of each complete line."""
    offset = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield offset, json.loads(line)
        offset += len(line)


def read_arrivals(path: Path) -> dict[int, list[Request]]:
    """Read the requests of each trajectory, in order of time.

    Request names may repeat after a resume of the run. Arrivals therefore belong to the newest
    request of their name.

    Raises:
        ValueError: Arrivals of a request are not in order, or tokens follow its end.
    """
    found: dict[int, list[Request]] = defaultdict(list)
    newest: dict[str, int] = {}
    for offset, line in json_lines(path):
        trajectory_id = int(line["request"][1:].partition("-")[0])
        requests = found[trajectory_id]
        if "ids" not in line:
            newest[line["request"]] = len(requests)
            before = tuple(line["input"])
            requests.append(Request(trajectory_id, int(line["at"]), offset, input=before))
            continue
        place = newest[line["request"]]
        request = requests[place]
        if request.end != line["at"]:
            raise ValueError(f"arrivals of trajectory {trajectory_id} are not in order")
        if request.noted_end is not None:
            raise ValueError(f"trajectory {trajectory_id}: a request's tokens follow its end")
        requests[place] = replace(
            request,
            ids=(*request.ids, *line["ids"]),
            largest_chunk=max(request.largest_chunk, len(line["ids"])),
            noted_end=line["end"],
        )
    return dict(found)


def read_trained(path: Path) -> tuple[list[Attach], list[Batch], set[tuple[int, int]]]:
    """Read the trainer's record.

    Returns:
        The attaches, the batches that the trainer received, and the lineage and step of the batches
        that it dropped as unusable.
    """
    attaches: list[Attach] = []
    batches: list[Batch] = []
    dropped: set[tuple[int, int]] = set()
    for _, line in json_lines(path):
        if "attach" in line:
            attaches.append(Attach(line["attach"], line["step"], line["parent"]))
        elif "dropped" in line:
            dropped.add((line["lineage"], line["dropped"]))
        else:
            responses = tuple(tuple(ids) for ids in line["responses"])
            batches.append(
                Batch(line["lineage"], line["batch"], tuple(line["ids"]), responses, line["lag"])
            )
    return attaches, batches, dropped


@dataclass(frozen=True)
class Piece:
    """Tokens that one policy version or the environment wrote."""

    token_ids: tuple[int, ...]
    version: PolicyVersion
    from_environment: bool


@dataclass(frozen=True)
class Found:
    """A trajectory as it was read from the store or its export.

    Attributes:
        trajectory_id: ID of the trajectory.
        state: Name of the trajectory's state.
        prompt: Tokens of the prompt.
        pieces: Tokens after the prompt.
        turns: For each turn the index of its first piece and its messages; empty unless the
            trajectory is an episode.
        payload: Payload of the prompt.
        reward: The reward, if any.
        drop_reason: Reason for which the trajectory was dropped, if it was.
        consumed: Lineage and step of the batch that consumed the trajectory.
    """

    trajectory_id: int
    state: str
    prompt: tuple[int, ...]
    pieces: tuple[Piece, ...]
    turns: tuple[tuple[int, Sequence[Any]], ...]
    payload: dict[str, Any]
    reward: float | None
    drop_reason: str | None
    consumed: tuple[int, int] | None

    @property
    def kept(self) -> Kept:
        """The trajectory in the form that most checks need."""
        own = [not piece.from_environment for piece in self.pieces]
        begins = next((i for i, mine in enumerate(own) if mine), len(own)) if self.turns else 0
        opening = tuple(token for piece in self.pieces[:begins] for token in piece.token_ids)
        rest = [(t, p) for p in self.pieces[begins:] for t in p.token_ids]
        return Kept(
            self.trajectory_id,
            self.state,
            (*self.prompt, *opening),
            tuple(token for token, _ in rest),
            tuple(piece.version for _, piece in rest),
            self.reward,
            self.drop_reason,
            self.consumed,
            len(opening),
            tuple(not piece.from_environment for _, piece in rest),
        )

    def episode(self, decode: Callable[[Sequence[int]], str]) -> Episode:
        """Return the episode, with the responses that its environment should have received."""
        ends = [*(first for first, _ in self.turns[1:]), len(self.pieces)]
        answers = []
        for (first, _), end in zip(self.turns, ends, strict=True):
            of_turn = [p for p in self.pieces[first:end] if not p.from_environment]
            answers.append(decode([token for piece in of_turn for token in piece.token_ids]))
        seed = int(self.payload["metadata"]["seed"])
        return Episode(
            self.trajectory_id,
            name_of(self.turns[0][1]) or f"{seed}-{self.trajectory_id}",
            seed,
            tuple(answers),
            self.state,
            self.drop_reason,
        )


def read_export(path: Path) -> Iterator[Found]:
    """Read the trajectories that compaction has moved from the store to the export."""
    for _, line in json_lines(path):
        batch = line["batch"]
        yield Found(
            line["trajectory_id"],
            TrajectoryState.DROPPED.value if batch is None else CONSUMED,
            tuple(line["prompt"]["token_ids"]),
            tuple(
                Piece(
                    tuple(segment["token_ids"]),
                    PolicyVersion.parse(segment["version"]),
                    segment["from_environment"],
                )
                for segment in line["segments"]
            ),
            tuple((turn["segment"], turn["messages"]) for turn in line.get("turns", ())),
            line["prompt"]["payload"],
            line["reward"],
            line["drop_reason"],
            None if batch is None else (batch["lineage"], batch["step"]),
        )


def _stored(
    store_file: Path, content: StoreContent, checkpoint: tuple[int, int] | None
) -> Iterator[Found]:
    """Read the trajectories in the store as a resume from `checkpoint` would find them.

    Trajectories of batches after the checkpoint do not count as consumed.
    """
    consumption = None
    if checkpoint is not None and content.tree:
        consumption = Consumption.at_checkpoint(content.tree, PolicyVersion(*checkpoint))
    consumed = {
        trajectory_id: (batch.lineage, batch.step)
        for batch in content.batches
        if batch.drop_reason is None
        and consumption is not None
        and consumption.contains(batch.lineage, batch.step)
        for trajectory_id in batch.ids()
    }
    with closing(connect(store_file, read_only=True)) as connection:
        parts = read_parts(connection, list(content.trajectories))
    for trajectory_id, row in content.trajectories.items():
        tokens, prompt = assemble(row, parts), prompt_of(content.groups[row.group_id])
        yield Found(
            trajectory_id,
            CONSUMED if trajectory_id in consumed else row.state,
            tuple(prompt.token_ids.tolist()),
            tuple(
                Piece(tuple(s.token_ids.tolist()), s.version, s.from_environment)
                for s in tokens.segments
            ),
            tuple((turn.segment, turn.messages) for turn in tokens.turns),
            dict(prompt.payload),
            row.reward,
            row.drop_reason,
            consumed.get(trajectory_id),
        )


def open_names(directory: RunDirectory) -> frozenset[str]:
    """Return the names of the stored episodes that are running, partial or waiting.

    An episode has a name once it has started.
    """
    if not directory.store_file.exists():
        return frozenset()
    names = set()
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        for summary in reader.summaries():
            if summary.state.value in ("running", "partial", "waiting"):
                turns = reader.trajectory(summary.trajectory_id).turns
                names.add(name_of(turns[0].messages) if turns else "")
    return frozenset(names - {""})
