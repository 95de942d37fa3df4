"""Provides `EpisodeWriter`, which stores the turns of episodes (trajectories with turns).

A turn is what the environment sends (messages and their
tokens), followed by one response of the policy.

Invariants
- A call to an environment is identified by a key, which `begin_step` returns. Generation requests
  have keys of the same kind. Only the newest call or request of a trajectory may add turns or
  tokens to it. So the reply to a call is refused if its episode was restarted or dropped meanwhile.
- The end of a turn is written in one transaction with the turn's last tokens.
  `TrajectoryStore.sync` commits it before the environment is called.
- Each reply of the environment is written in one transaction. It contains the reward of the
  previous response, the new turn, the turn's tokens and the new snapshot of the environment. The
  last reply has no new turn: its transaction contains the reward and the end of the episode.
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
    ABANDONED,
    FinishReason,
    PolicyVersion,
    RequestKey,
    TrajectoryState,
)

_ENVIRONMENT = Author(PolicyVersion(0, 0), "", from_environment=True)
_ASKED = (TrajectoryState.PENDING, TrajectoryState.WAITING)


@dataclass(frozen=True)
class TurnOutcome:
    """The policy's response in the newest turn as the environment received it, and its reward.

    Attributes:
        answer: Text and tool calls of the response, as JSON types.
        reward: The environment's reward for the response.
    """

    answer: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0


class EpisodeWriter:
    """Writes the turns of episodes to a `TrajectoryStore`; used only on that store's thread."""

    def __init__(
        self,
        state: StoreState,
        writer: StoreWriter,
        serials: Iterator[int],
        move: Callable[..., None],
        flush: Callable[[TrajectoryRecord], None],
    ) -> None:
        """Connect the episode writer to the content, writer thread and two functions of its store.

        Args:
            state: The store's content in memory.
            writer: The store's writer thread.
            serials: Serial numbers for new calls to environments. The store numbers its generation
                requests from the same iterator, so that no two calls or requests have the same
                number.
            move: Function of the store that changes the state of a trajectory.
            flush: Function of the store that passes a trajectory's buffered tokens to `writer`,
                together with the trajectory's row.
        """
        self._state = state
        self._writer = writer
        self._serials = serials
        self._move = move
        self._flush = flush

    def begin_step(self, trajectory_id: int) -> RequestKey:
        """Register a call to the environment of a trajectory; return the key for storing the reply.

        The key replaces any earlier key of this trajectory.

        Raises:
            ValueError: The environment cannot be called now: the newest turn is still waiting for
                the end of the policy's response, or the trajectory is neither pending nor waiting.
            LookupError: The trajectory is not in the store.
        """
        record = self._state.records[trajectory_id]
        open_turn = bool(record.turns) and record.turns[-1].end is None
        if record.batched_step is not None or record.state not in _ASKED or open_turn:
            why = "its newest turn has not ended" if open_turn else f"it is {record.shown_state}"
            raise ValueError(
                f"the environment of trajectory {trajectory_id} cannot be called: {why}"
            )
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
        """Store the environment's reply to `call`: the reward of the previous turn, and a new turn.

        The new turn has the environment's messages and their tokens; the episode becomes waiting.

        Args:
            call: The key that `begin_step` returned.
            context: Token ids of `messages`.
            messages: The environment's new messages.
            parent: Number of the turn whose conversation the new turn continues; None if the new
                turn starts a conversation.
            state: Snapshot of the environment; only the newest turn keeps one.
            outcome: Response and reward of the previous turn (the newest so far); None if the
                episode has no turn yet, or to leave that turn's response and reward unchanged.

        Raises:
            SupersededRequest: `call` is not the newest call of its trajectory.
        """
        record = running(self._state.records, call)
        token_ids = np.array(context, TOKEN_IDS)
        self._note(record, outcome)
        rows = [record.turn_row()] if record.turns else []
        record.add_turn(next(self._state.turn_keys), parent, messages, state)
        with self._writer.transaction():
            if len(token_ids):
                record.begin_segment(_ENVIRONMENT)
                record.add((token_ids, np.zeros(len(token_ids), LOGPROBS)))
            self._move(record, TrajectoryState.WAITING)
            self._flush(record)
            for row in (*rows, record.turn_row()):
                self._writer.put(row)
        record.author = None

    def end_turn(self, record: TrajectoryRecord, reason: FinishReason) -> None:
        """End the newest turn of episode `record`; the episode then waits for its environment.

        Its state becomes `waiting`. Call this after all tokens of the policy's response have been
        appended.
        """
        record.change_turn(end=reason)
        with self._writer.transaction():
            self._move(record, TrajectoryState.WAITING)
            self._flush(record)
            self._writer.put(record.turn_row())

    def end_episode(
        self,
        call: RequestKey,
        reason: FinishReason,
        outcome: TurnOutcome | None = None,
        abandoned: Sequence[int] = (),
    ) -> None:
        """Store the environment's last reply: the reward of the newest turn, and the episode's end.

        Args:
            call: The key that `begin_step` returned.
            reason: Reason why the episode ended.
            outcome: Response and reward of the newest turn; None leaves that turn unchanged.
            abandoned: Numbers of the turns whose responses did not reach the agent that ended the
                episode. They are marked (`Turn.abandoned`), so that they are not trained.

        Raises:
            SupersededRequest: `call` is not the newest call of its trajectory.
        """
        record = running(self._state.records, call)
        self._note(record, outcome)
        for number in abandoned:
            answer = {**(record.turns[number].answer or {}), ABANDONED: True}
            record.change_turn(number, answer=answer)
        with self._writer.transaction():
            self._move(record, TrajectoryState.FINISHED, finish_reason=reason.value)
            self._flush(record)
            for number in {*abandoned, len(record.turns) - 1} if record.turns else ():
                self._writer.put(record.turn_row(number))

    @staticmethod
    def _note(record: TrajectoryRecord, outcome: TurnOutcome | None) -> None:
        if record.turns:
            record.change_turn(state=None)
            if outcome is not None:
                record.change_turn(answer=outcome.answer, reward=float(outcome.reward))
