"""Provides `TrajectoryRecord`, the store's record in memory of one trajectory.

A record always has the trajectory's state. It has the tokens too while the trajectory is live,
which means neither dropped nor consumed (in a batch that counts on the current lineage).

Invariants
- The state changes only as `ALLOWED` permits (docs/semantics.md section 2). `batched` is not a
  stored state: whether a trajectory is batched is computed from the batches on the current lineage.
- Tokens stay in the buffer until they are passed to the writer as a chunk; a chunk never spans two
  segments. The segments of a live record contain all tokens, whether passed to the writer or not.
- A segment ends when the author or the columns of the tokens change, and when its request ends (the
  trajectory becomes partial).
- `request` is the key of the generation request that may append tokens, or of the call to the
  environment that may add a turn. It is None unless such a request or call is in progress.
- A live record has all turns of the trajectory, in the order of their numbers. Only the newest turn
  may lack an end, and only the newest turn has a snapshot of the environment.
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
    """Raised when a request or call other than a trajectory's current one tries to change it."""


class Author(NamedTuple):
    """Author of a segment, and the columns that it reports in addition to token ids and log-probs.

    The author is one policy version on one engine, or the environment.

    Attributes:
        version: Policy version.
        engine_id: Name of the engine.
        from_environment: Whether the environment wrote the tokens; the two fields above are then
            without meaning.
        columns: NumPy types of the columns beyond token ids and log-probs.
    """

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
        """Return the segment's tokens so far as an immutable `Segment`, one array per column."""
        if len(self.parts) > 1:
            self.parts = [joined(self.parts)]
        token_ids, logprobs, *columns = self.parts[0]
        return Segment(token_ids, logprobs, *self.author[:3], tuple(columns))


@dataclass(frozen=True, eq=False)
class GroupRecord:
    """A prompt and the ids of its trajectories, for a group that is still in the store."""

    group_id: int
    prompt: Prompt
    trajectory_ids: range


class TrajectoryRecord:
    """State, tokens and turns of one trajectory in memory; only its `TrajectoryStore` changes it.

    Attributes:
        row: The trajectory's row as it is, or will be, in the database.
        turns: The turns of an episode; empty while `in_memory` is false.
        batched_step: Step of the batch that consumed the trajectory on the current lineage; None if
            no batch did.
        request: Key of the generation request, or of the call to the environment, that may change
            the trajectory now; None if there is none.
        in_flight: Number of the transaction in which the writer thread writes, or has written, the
            newest chunk; 0 if this process has written no chunk.
        in_memory: Whether tokens and turns are in memory; otherwise they are only in the database.
        author: Author of the newest segment; None if no more tokens may be added to the segment.
        buffered: Number of tokens that have not been passed to the writer yet.
    """

    def __init__(
        self,
        row: TrajectoryRow,
        segments: tuple[Segment, ...] | None,
        turns: tuple[Turn, ...] = (),
        turn_keys: tuple[int, ...] = (),
    ) -> None:
        """Make the record of a trajectory from its row and its tokens.

        Args:
            row: The trajectory's row.
            segments: Its tokens; None if they are only in the database.
            turns: Its turns, if it is an episode.
            turn_keys: Key of each turn's row in the database.
        """
        self.row = row
        self.turns = list(turns)
        self._turn_keys = list(turn_keys)
        self.batched_step: int | None = None
        self.request: RequestKey | None = None
        self.in_flight = 0
        self.in_memory = segments is not None
        self._segments: list[_GrowingSegment] = []
        for s in segments or ():
            types = tuple(column.dtype for column in s.columns)
            author = Author(s.version, s.engine_id, s.from_environment, types)
            self._segments.append(_GrowingSegment(author, [s.arrays], len(s)))
        self.author: Author | None = None
        self._buffer: list[Arrays] = []
        self.buffered = 0

    @property
    def state(self) -> TrajectoryState:
        """The trajectory's stored state, which is the same on all lineages and never `batched`."""
        return TrajectoryState(self.row.state)

    @property
    def shown_state(self) -> TrajectoryState:
        """The trajectory's state on the current lineage, which may be `batched`.

        It is `batched` if the trajectory is in a batch of this lineage or of one that it continues.
        """
        return TrajectoryState.BATCHED if self.batched_step is not None else self.state

    @property
    def live(self) -> bool:
        """Whether the trajectory is neither dropped nor batched (see `shown_state`)."""
        return self.batched_step is None and self.state is not TrajectoryState.DROPPED

    def move_to(self, state: TrajectoryState, **changes: Any) -> None:
        """Set the trajectory's state, and the other fields of its row that `changes` names.

        The request or call in progress for the trajectory, if any, can no longer change it.

        Raises:
            ValueError: `ALLOWED` does not permit this change of state, or the trajectory is
                consumed.
        """
        if self.batched_step is not None or state not in ALLOWED[self.state]:
            raise ValueError(
                f"trajectory {self.row.trajectory_id} is {self.shown_state} and cannot become "
                f"{state}"
            )
        self._change(state, **changes)
        self.request = None

    def _change(self, state: TrajectoryState, **changes: Any) -> None:
        revision = self.row.revision + 1
        self.row = self.row._replace(state=state.value, revision=revision, **changes)

    # ------------------------------------------------------------ tokens

    def segments(self) -> tuple[Segment, ...]:
        """Return all tokens that the trajectory has so far; it must be in memory."""
        return tuple(segment.frozen() for segment in self._segments)

    def begin_segment(self, author: Author) -> None:
        """Start a new segment by `author`; tokens that are added next belong to it.

        The buffer must be empty.
        """
        assert not self._buffer
        self._segments.append(_GrowingSegment(author))
        self.author = author

    def response_end(self) -> tuple[int, int | None]:
        """Return the number of tokens of the trajectory's response, and its last token id.

        For an episode, the response is that of its newest turn. The trajectory must be in memory.

        Returns:
            The number of tokens, and the id of the last token; None instead of the id if there is
            no token or the environment wrote the last token.
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
        """Add tokens, given as their columns, to the newest segment and to the buffer."""
        last, count = self._segments[-1], len(arrays[0])
        last.parts.append(arrays)
        last.length += count
        self._buffer.append(arrays)
        self.buffered += count

    def pop_chunk(self) -> ChunkRow | None:
        """Empty the buffer, and return its tokens as the row of the trajectory's next chunk.

        The chunk is counted in `row`. Returns None if the buffer is empty.
        """
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
        """Add a turn to the episode; the next segment will be the turn's first.

        Args:
            key: Key of the turn's row in the database.
            parent: Number of the turn that it follows; None for the first turn of a branch.
            messages: Messages of the environment.
            state: Snapshot of the environment, if there is one.
        """
        self._turn_keys.append(key)
        self.turns.append(Turn(len(self.turns), parent, len(self._segments), messages, state=state))

    def change_turn(self, number: int = -1, **changes: Any) -> None:
        """Set the fields that `changes` names in the episode's turn `number`; -1 is the newest."""
        self.turns[number] = replace(self.turns[number], **changes)

    def turn_row(self, number: int = -1) -> TurnRow:
        """Return the database row of the episode's turn `number`; -1 is the newest turn."""
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
        """Free the memory of the trajectory's tokens and turns; the database does not change.

        Tokens that are still in the buffer are discarded.
        """
        self.in_memory, self.author = False, None
        self._segments.clear()
        self._buffer.clear()
        self.buffered = 0
        self.turns.clear()
        self._turn_keys.clear()

    def interrupt(self) -> None:
        """Set the trajectory's state to `partial`, without checking that the change is allowed.

        Finish reason and reward are cleared. This is for a trajectory that was running when its
        process died.
        """
        self._change(_S.PARTIAL, **_UNFINISHED)

    def restart(self) -> None:
        """Reset the trajectory to `pending`, and discard its tokens, its turns and its reward.

        The number of its attempts grows by one. Raises ValueError if it is consumed or dropped.
        """
        self.move_to(_S.PENDING, attempt=self.row.attempt + 1, chunks=0, **_UNFINISHED)
        self.forget_tokens()
        self.in_memory = True


def running(records: Mapping[int, TrajectoryRecord], request: RequestKey) -> TrajectoryRecord:
    """Return the record of the trajectory that `request` belongs to, if the request is current.
    A request is current if no newer request or call of the trajectory exists and it has not ended.

    Args:
        records: All trajectories of the store by id.
        request: Key of a generation request, or of a call to the trajectory's environment.

    Raises:
        SupersededRequest: The trajectory has another current request or call, or has none, or is
            not in the store.
    """
    record = records.get(request.trajectory_id)
    if record is not None and record.request == request:
        return record
    now = "not in the store" if record is None else str(record.shown_state)
    if record is not None and record.request is not None:
        now = f"owned by request {record.request.name}"
    raise SupersededRequest(
        f"request {request.name} of lineage {request.lineage} is superseded: trajectory "
        f"{request.trajectory_id} is {now}"
    )
