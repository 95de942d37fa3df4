"""What is known after a crash test or a fault program, from independent witnesses.

- the arrivals: every token that reached a rollout manager (`ledger.py`);
- the trainer: every lineage it began and every batch it took (`ledger.py`);
- the store with its export, and the checkpoint manifests;
- of episodes, every call that an environment got (`noted_environment.py`);
- every engine that was started, and every fault that was injected (`ledger.py`).

Reading only; `checks.py` compares them.
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
    """One request: where it began (tokens of prompt and response) and what arrived for it.

    `offset` is its place in the file of arrivals, which orders it in time; `noted_end` the end that
    the engine reported (None: it never did); `input` the tokens before it.
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
    """An engine that a manager (`life`) has started at `url`, in the place `index`."""

    life: str
    index: int
    engine_id: str
    url: str


@dataclass(frozen=True)
class Attach:
    """A trainer began `lineage` at `step`, or went on with it there."""

    lineage: int
    step: int
    parent: int | None


@dataclass(frozen=True)
class Batch:
    """A batch as the trainer took it. `lag` is the largest that it was given."""

    lineage: int
    step: int
    ids: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    lag: int


@dataclass(frozen=True)
class Kept:
    """One trajectory as the store or its export holds it; `versions` is of each token.

    Of an episode `prompt` ends where the first answer begins: `opening` of its tokens are stored as
    the environment's. `own`: which of `tokens` the policy made; empty: all.
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
        """Return whether the policy made the token at this place of `tokens`."""
        return not self.own or self.own[place]

    @property
    def own_versions(self) -> set[PolicyVersion]:
        """Those of the policy's tokens."""
        return {v for place, v in enumerate(self.versions) if self.is_own(place)}


@dataclass(frozen=True)
class Seen:
    """What a look at the store during the run showed of one trajectory."""

    state: str
    tokens: int
    reward: float | None


@dataclass(frozen=True)
class Evidence:
    """Everything, at the end of a run."""

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
    """The evidence of a run that has ended. `looks` were made while it went on.

    Of episodes: `decode` gives the text of an answer, `open_at` the names of those that were open
    at each kill, and `lives` is how often their environments may have been made anew.
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
    """The states of all trajectories in the store now; {} before there is one."""
    if not directory.store_file.exists():
        return {}
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        return {
            s.trajectory_id: Seen(s.state.value, s.tokens, s.reward) for s in reader.summaries()
        }


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, content) of each complete line."""
    offset = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield offset, json.loads(line)
        offset += len(line)


def read_arrivals(path: Path) -> dict[int, list[Request]]:
    """Trajectory -> its requests in order. Names come again after a resume, never before."""
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
    """Lineages begun, batches taken, batches given back as unusable."""
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
    """Tokens of one author."""

    token_ids: tuple[int, ...]
    version: PolicyVersion
    from_environment: bool


@dataclass(frozen=True)
class Found:
    """A trajectory as it was read. `turns`: the first piece and the messages of each."""

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
        """As most checks see it."""
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
        """As its environment should know it."""
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
    """What compaction has taken out of the store."""
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
    """As a resume from `checkpoint` would find it: what was batched later is not consumed."""
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
    """Names of the episodes that are open in the store now: begun, and neither ended nor left."""
    if not directory.store_file.exists():
        return frozenset()
    names = set()
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        for summary in reader.summaries():
            if summary.state.value in ("running", "partial", "waiting"):
                turns = reader.trajectory(summary.trajectory_id).turns
                names.add(name_of(turns[0].messages) if turns else "")
    return frozenset(names - {""})
