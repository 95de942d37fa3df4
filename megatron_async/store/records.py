"""Record, in memory, of each trajectory: its state, and its tokens while it is live.

Invariants
- State changes only along the arrows of `ALLOWED` (docs/semantics.md section 2). `batched` is not
  among the stored states: it is derived from the batches of the lineage that is looked at.
- Tokens wait in the buffer until they are handed to the writer as a chunk; a chunk never spans two
  segments. The segments of a live record hold all tokens, handed over or not.
- A segment ends when its author or its columns change and when its request ends (the trajectory
  becomes partial).
- `request` is the one that may append, or the call of the environment that may add a turn. It is
  None in every state but `running`, and those in which the environment is asked.
- The turns of a live record are all there, in the order of their numbers. Only the newest one can
  be without an end, and only it has a snapshot of the environment.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_async.store.schema import ChunkRow, TrajectoryRow, TurnRow
from megatron_async.trajectory.columns import Arrays, Types, blob, joined, text
from megatron_async.trajectory.types import (
    PolicyVersion,
    Prompt,
    RequestKey,
    Segment,
    TrajectoryState,
    Turn,
)

_S = TrajectoryState
ALLOWED: dict[TrajectoryState, frozenset[TrajectoryState]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.WAITING, _S.DROPPED, _S.PENDING}),
    _S.RUNNING: frozenset({_S.PARTIAL, _S.WAITING, _S.FINISHED, _S.DROPPED, _S.PENDING}),
    _S.PARTIAL: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED, _S.DROPPED, _S.PENDING}),
    _S.WAITING: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED, _S.DROPPED, _S.PENDING}),
    _S.FINISHED: frozenset({_S.SCORED, _S.DROPPED, _S.PENDING}),
    _S.SCORED: frozenset({_S.DROPPED, _S.PENDING}),
    _S.DROPPED: frozenset(),
}


Messages = Sequence[Mapping[str, Any]]
_UNFINISHED = {"finish_reason": None, "reward": None, "reward_detail": "{}"}


class SupersededRequest(ValueError):
    """A request that is not the current one of its trajectory wanted to change it."""


class Author(NamedTuple):
    """Author of a segment (see `Segment`), and the further columns that it reports."""

    version: PolicyVersion
    engine_id: str
    from_environment: bool
    columns: Types = ()


@dataclass(slots=True)
class _GrowingSegment:
    author: Author
    parts: list[Arrays] = field(default_factory=list)
    length: int = 0

    def frozen(self) -> Segment:
        """The tokens so far; what was many arrays becomes one."""
        if len(self.parts) > 1:
            self.parts = [joined(self.parts)]
        token_ids, logprobs, *columns = self.parts[0]
        return Segment(token_ids, logprobs, *self.author[:3], tuple(columns))


@dataclass(frozen=True, eq=False)
class GroupRecord:
    """A group that is still in the store."""

    group_id: int
    prompt: Prompt
    trajectory_ids: range


class TrajectoryRecord:
    """A trajectory in memory; mutable, owned by the store."""

    def __init__(
        self,
        row: TrajectoryRow,
        segments: tuple[Segment, ...] | None,
        turns: tuple[Turn, ...] = (),
        turn_keys: tuple[int, ...] = (),
    ) -> None:
        """`segments=None`: the tokens are not in memory. `turn_keys`: those of the turns' rows."""
        self.row = row
        self.turns = list(turns)
        self._turn_keys = list(turn_keys)
        self.batched_step: int | None = None
        self.request: RequestKey | None = None
        self.in_flight = 0  # transaction of the newest chunk
        self.in_memory = segments is not None
        self._segments: list[_GrowingSegment] = []
        for s in segments or ():
            types = tuple(column.dtype for column in s.columns)
            author = Author(s.version, s.engine_id, s.from_environment, types)
            self._segments.append(_GrowingSegment(author, [s.arrays], len(s)))
        self.author: Author | None = None  # of the last segment, while it may grow
        self._buffer: list[Arrays] = []
        self.buffered = 0

    @property
    def state(self) -> TrajectoryState:
        """The state as it is stored, of all lineages."""
        return TrajectoryState(self.row.state)

    @property
    def shown_state(self) -> TrajectoryState:
        """The state along the current lineage."""
        return TrajectoryState.BATCHED if self.batched_step is not None else self.state

    @property
    def live(self) -> bool:
        """Neither consumed along the current lineage nor dropped."""
        return self.batched_step is None and self.state is not TrajectoryState.DROPPED

    def move_to(self, state: TrajectoryState, **changes: Any) -> None:
        """Change the state, and what else `changes` in the row.

        Raises ValueError for a state that cannot follow in a trajectory's life.
        """
        if self.batched_step is not None or state not in ALLOWED[self.state]:
            raise ValueError(
                f"trajectory {self.row.trajectory_id} is {self.shown_state}, it cannot become "
                f"{state}"
            )
        self._change(state, **changes)
        self.request = None

    def _change(self, state: TrajectoryState, **changes: Any) -> None:
        revision = self.row.revision + 1
        self.row = self.row._replace(state=state.value, revision=revision, **changes)

    # ------------------------------------------------------------ tokens

    def segments(self) -> tuple[Segment, ...]:
        """Return all tokens so far, of a trajectory that is in memory."""
        return tuple(segment.frozen() for segment in self._segments)

    def begin_segment(self, author: Author) -> None:
        """The author of what is added next. The buffer must be empty."""
        assert not self._buffer
        self._segments.append(_GrowingSegment(author))
        self.author = author

    def response_end(self) -> tuple[int, int | None]:
        """Length of the response in memory, and its last token if the policy made it.

        Of an episode: that of the newest turn's answer.
        """
        segments = self._segments
        if self.turns:
            of_turn = segments[self.turns[-1].segment :]
            segments = [s for s in of_turn if not s.author.from_environment]
        length = sum([segment.length for segment in segments])
        if not length or segments[-1].author.from_environment:
            return length, None
        return length, int(segments[-1].parts[-1][0][-1])

    def add(self, arrays: Arrays) -> None:
        """More tokens of the newest segment."""
        last, count = self._segments[-1], len(arrays[0])
        last.parts.append(arrays)
        last.length += count
        self._buffer.append(arrays)
        self.buffered += count

    def take_chunk(self) -> ChunkRow | None:
        """The buffer as a chunk, for the writer; None when it is empty."""
        if not self._buffer:
            return None
        author = self._segments[-1].author
        chunk = ChunkRow(
            self.row.trajectory_id,
            self.row.attempt,
            self.row.chunks,
            len(self._segments) - 1,
            *author.version,
            author.engine_id,
            int(author.from_environment),
            text(author.columns),
            blob(self._buffer),
        )
        self.row = self.row._replace(chunks=self.row.chunks + 1)
        self._buffer.clear()
        self.buffered = 0
        return chunk

    def add_turn(
        self, key: int, parent: int | None, messages: Messages, state: bytes | None
    ) -> None:
        """A turn begins with what is added next."""
        self._turn_keys.append(key)
        self.turns.append(Turn(len(self.turns), parent, len(self._segments), messages, state=state))

    def change_turn(self, number: int = -1, **changes: Any) -> None:
        """Change a turn, by default the newest."""
        self.turns[number] = replace(self.turns[number], **changes)

    def turn_row(self, number: int = -1) -> TurnRow:
        """A turn as it is stored, by default the newest."""
        turn = self.turns[number]
        return TurnRow(
            self._turn_keys[number],
            self.row.trajectory_id,
            self.row.attempt,
            turn.number,
            turn.parent,
            turn.segment,
            None if turn.end is None else turn.end.value,
            turn.reward,
            json.dumps(turn.messages),
            None if turn.answer is None else json.dumps(turn.answer),
            turn.state,
        )

    def forget_tokens(self) -> None:
        """Tokens and turns are only on disk from now on."""
        self.in_memory, self.author = False, None
        self._segments.clear()
        self._buffer.clear()
        self.buffered = 0
        self.turns.clear()
        self._turn_keys.clear()

    def interrupt(self) -> None:
        """Make it partial, whatever it was: its process died, or its last tokens were lost."""
        self._change(_S.PARTIAL, **_UNFINISHED)

    def restart(self) -> None:
        """Back to the prompt: all tokens and the reward are gone."""
        self.move_to(_S.PENDING, attempt=self.row.attempt + 1, chunks=0, **_UNFINISHED)
        self.forget_tokens()
        self.in_memory = True


def running(records: Mapping[int, TrajectoryRecord], request: RequestKey) -> TrajectoryRecord:
    """The trajectory that `request` runs. Raises SupersededRequest when it does not run it now."""
    record = records.get(request.trajectory_id)
    if record is not None and record.request == request:
        return record
    now = "not in the store" if record is None else str(record.shown_state)
    if record is not None and record.request is not None:
        now = f"run by {record.request.name}"
    raise SupersededRequest(
        f"request {request.name} of lineage {request.lineage} is superseded: trajectory "
        f"{request.trajectory_id} is {now}"
    )
