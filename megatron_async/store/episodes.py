"""Turns of episodes, written: what the environment sends, and how an answer ends.

Invariants
- Whoever asks an environment has a call (`begin_step`), as a request has a key: only a trajectory's
  newest call or request may add to it. A reply to an episode that was restarted or dropped
  meanwhile is refused.
- A turn's end is in one transaction with its last tokens, and committed before the environment is
  asked (`TrajectoryStore.sync`).
- A reply of the environment is one transaction: the reward of the answer before it, the new turn,
  its tokens and the newest snapshot; or that reward and the end of the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.store.records import Author, Messages, TrajectoryRecord, running
from megatron_async.store.state import StoreState
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.columns import LOGPROBS, TOKEN_IDS
from megatron_async.trajectory.types import (
    LEFT,
    FinishReason,
    PolicyVersion,
    RequestKey,
    TrajectoryState,
)

_ENVIRONMENT = Author(PolicyVersion(0, 0), "", from_environment=True)
_ASKED = (TrajectoryState.PENDING, TrajectoryState.WAITING)


@dataclass(frozen=True)
class TurnOutcome:
    """The newest turn's answer as the environment got it, and the reward for it."""

    answer: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0


class EpisodeWriter:
    """The part of a store that writes turns; belongs to the store's thread."""

    def __init__(
        self,
        state: StoreState,
        writer: StoreWriter,
        serials: Iterator[int],
        move: Callable[..., None],
        flush: Callable[[TrajectoryRecord], None],
    ) -> None:
        """`move` and `flush` are the store's: they change a row's state, and hand over what is
        buffered with the row."""
        self._state = state
        self._writer = writer
        self._serials = serials
        self._move = move
        self._flush = flush

    def begin_step(self, trajectory_id: int) -> RequestKey:
        """The environment is asked; only the call returned may write its reply.

        Raises ValueError where it is not the environment's turn, LookupError for no trajectory.
        """
        record = self._state.records[trajectory_id]
        open_turn = bool(record.turns) and record.turns[-1].end is None
        if record.batched_step is not None or record.state not in _ASKED or open_turn:
            why = "its turn has no end" if open_turn else f"it is {record.shown_state}"
            raise ValueError(f"no environment can be asked for trajectory {trajectory_id}: {why}")
        record.request = RequestKey(self._state.lineage, trajectory_id, next(self._serials))
        return record.request

    def begin_turn(
        self,
        call: RequestKey,
        context: npt.ArrayLike,
        messages: Messages,
        *,
        parent: int | None,
        state: bytes | None = None,
        outcome: TurnOutcome | None = None,
    ) -> None:
        """Begin the next turn, after turn `parent`, with `context`, the tokens of `messages`.

        `outcome`: that of the turn before. Raises SupersededRequest.
        """
        record = running(self._state.records, call)
        token_ids = np.array(context, TOKEN_IDS)
        self._note(record, outcome)
        rows = [record.turn_row()] if record.turns else []
        record.add_turn(next(self._state.turn_keys), parent, messages, state)
        with self._writer.together():
            if len(token_ids):
                record.begin_segment(_ENVIRONMENT)
                record.add((token_ids, np.zeros(len(token_ids), LOGPROBS)))
            self._move(record, TrajectoryState.WAITING)
            self._flush(record)
            for row in (*rows, record.turn_row()):
                self._writer.put(row)
        record.author = None

    def end_turn(self, record: TrajectoryRecord, reason: FinishReason) -> None:
        """The policy has answered: its last tokens have been appended."""
        record.change_turn(end=reason)
        with self._writer.together():
            self._move(record, TrajectoryState.WAITING)
            self._flush(record)
            self._writer.put(record.turn_row())

    def end_episode(
        self,
        call: RequestKey,
        reason: FinishReason,
        outcome: TurnOutcome | None = None,
        left: Sequence[int] = (),
    ) -> None:
        """Finish it; the turns of the numbers `left` are not trained. Raises SupersededRequest."""
        record = running(self._state.records, call)
        self._note(record, outcome)
        for number in left:
            answer = {**(record.turns[number].answer or {}), LEFT: True}
            record.change_turn(number, answer=answer)
        with self._writer.together():
            self._move(record, TrajectoryState.FINISHED, finish_reason=reason.value)
            self._flush(record)
            for number in {*left, len(record.turns) - 1} if record.turns else ():
                self._writer.put(record.turn_row(number))

    @staticmethod
    def _note(record: TrajectoryRecord, outcome: TurnOutcome | None) -> None:
        if record.turns:
            record.change_turn(state=None)
            if outcome is not None:
                record.change_turn(answer=outcome.answer, reward=float(outcome.reward))
