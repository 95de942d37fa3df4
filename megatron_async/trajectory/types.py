"""Provides the data types of a rollout: policy versions, segments, turns, trajectories and
branches.

Invariants
- A segment is written by exactly one author: one policy version on one engine, or the environment,
  whose tokens are never trained.
- All columns of a segment have the same length (`columns.py`). The log-probs of a policy segment
  are those of the behavior policy at the sampling temperature; those of an environment segment are
  0.
- The response of a trajectory is the concatenation of its segments, in order. Segments are only
  appended, except that a restart of the trajectory removes all of them.
- An episode is a trajectory with turns. The turns form a tree, since a turn may follow any earlier
  one. Turn n has the segments from index `segment` up to the `segment` of turn n + 1: first those
  of the environment, then those of the policy.
- A branch is a path from the start of a conversation to a turn that no other turn follows, not
  counting turns that are abandoned or have no policy tokens. Each branch is one training sequence.
  A policy token that is in several branches is trained only in the branch that was written first;
  in the other branches it is context (docs/semantics.md section 7).
"""

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.columns import LOGPROBS, TOKEN_IDS, Arrays, joined

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ABANDONED: Final = "abandoned"
"""Key in `Turn.answer`, the stored response of a turn, that makes `Turn.abandoned` true."""
CHUNK_TOKENS: Final = 64
"""Number of tokens that the store writes as one chunk.

The process of an engine reads further tokens of a response only while fewer than this many are
unacknowledged. So a kill costs each response at most one chunk. Smaller chunks would lose less, but
need more writes per token.
"""


class PolicyVersion(NamedTuple):
    """Identifies the weights at the start of update `number` on lineage `lineage`.

    The lineage is a number that grows by one at every resume of the run (docs/semantics.md section
    1).
    """

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Parse a version of the form `lineage.number`, which `str` returns.

        Raises:
            ValueError: If `text` has another form.
        """
        lineage, dot, number = text.partition(".")
        if not dot:
            raise ValueError(f"policy version {text!r} is not of the form lineage.number")
        return cls(int(lineage), int(number))


class RequestKey(NamedTuple):
    """Identity of a generation request; only the newest one of a trajectory may append tokens."""

    lineage: int
    trajectory_id: int
    serial: int

    @property
    def name(self) -> str:
        """Name of the request on engines. It ends in `;`, so no name is a prefix of another."""
        return f"t{self.trajectory_id}-{self.serial};"


class TrajectoryState(enum.StrEnum):
    """State of a trajectory, which advances from pending to batched or ends in dropped.

    The usual order is pending -> running <-> partial -> finished -> scored -> batched.
    A trajectory is partial when its generation was interrupted and can be resumed. An episode is
    `waiting` from the end of a turn until its next request has the first token.
    """

    PENDING = "pending"
    RUNNING = "running"
    PARTIAL = "partial"
    WAITING = "waiting"
    FINISHED = "finished"
    SCORED = "scored"
    BATCHED = "batched"
    DROPPED = "dropped"


class DropReason(enum.StrEnum):
    """Reason for which a trajectory was dropped, which means permanently excluded from training.

    docs/semantics.md section 2 explains each reason.
    """

    OVERFLOW = "overflow"
    STALE = "stale"
    FILTERED = "filtered"
    NONFINITE = "nonfinite"
    SCORER = "scorer"
    REFUSED = "refused"
    ENVIRONMENT = "environment"
    USER = "user"


class FinishReason(enum.StrEnum):
    """Reason for which generation of a response ended: a stop token, or the length limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of a response that were written by one author.

    The author is one policy version on one engine, or the environment. All arrays, including those
    in `columns`, have one entry for each token of the segment.
    """

    token_ids: IntArray
    logprobs: FloatArray
    version: PolicyVersion
    engine_id: str = ""
    from_environment: bool = False
    columns: Arrays = ()

    @property
    def arrays(self) -> Arrays:
        """All token columns: ids, log-probs, further columns."""
        return self.token_ids, self.logprobs, *self.columns

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, eq=False)
class Prompt:
    """A problem of a task: the prompt's tokens, and the data that its scorer or environment needs.

    Attributes:
        payload: Data for the scorer or the environment, JSON-serializable. Only the task reads it.
        priority: When an engine can accept another request, the waiting trajectory with the highest
            priority is submitted first, but partial trajectories precede those without tokens.
    """

    token_ids: IntArray
    task: str
    payload: dict[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of an episode: new input of the environment, and then the policy's response to it.

    Attributes:
        number: Index of the turn in its trajectory.
        parent: Number of the turn that this turn follows; None for the start of a conversation.
        segment: Index of the turn's first segment in `Trajectory.segments`.
        messages: The chat messages that are new in this turn.
        end: Reason why the policy's response ended; None while it is incomplete.
        reward: The environment's reward for the response.
        answer: The response as text and tool calls.
        state: Newest snapshot of the environment; only the newest turn has one.
    """

    number: int
    parent: int | None
    segment: int
    messages: Sequence[Mapping[str, Any]] = ()
    end: FinishReason | None = None
    reward: float = 0.0
    answer: Mapping[str, Any] | None = None
    state: bytes | None = None

    @property
    def abandoned(self) -> bool:
        """Whether the response never reached the agent program; such a turn is not trained."""
        return bool((self.answer or {}).get(ABANDONED))


def last_of(turns: Sequence[Turn]) -> Turn:
    """Return the last turn that is not abandoned (`Turn.abandoned`), or else the last turn."""
    return next((turn for turn in reversed(turns) if not turn.abandoned), turns[-1])


class BranchSpan(NamedTuple):
    """A segment of one branch (training sequence), and whether its tokens are trained there.

    Attributes:
        trained: Whether the segment's tokens are trained in this branch.
        turn: Number of the turn that has the segment; None for the prompt, and for a trajectory
            without turns.
    """

    segment: Segment
    trained: bool
    turn: int | None = None


@dataclass(frozen=True, eq=False)
class Branch:
    """A training sequence: all n tokens from the prompt to the end of one branch.

    All arrays have shape [n].

    Attributes:
        mask: 1 where a token is trained in this branch, else 0.
        logprobs: Log-probs of the behavior policy, 0 where `mask` is 0.
        versions: Policy version of each policy token, None for tokens of prompt and environment.
    """

    token_ids: IntArray
    mask: IntArray
    logprobs: FloatArray
    versions: tuple[PolicyVersion | None, ...]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A response to one prompt, in any state; `segments` are in order of generation."""

    trajectory_id: int
    group_id: int
    prompt: Prompt
    state: TrajectoryState = TrajectoryState.PENDING
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None
    reward: float | None = None
    reward_detail: dict[str, float] = field(default_factory=dict)
    batched_step: int | None = None
    drop_reason: DropReason | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, including tokens of the environment."""
        return sum(len(segment) for segment in self.segments)

    @property
    def resumed(self) -> bool:
        """Whether several policy versions, or several requests for one turn, wrote the response.

        Several requests for one turn are recognized by two policy segments without an environment
        segment between them. So several turns of one version do not count.
        """
        pairs = zip(self.segments, self.segments[1:], strict=False)
        if any(not a.from_environment and not b.from_environment for a, b in pairs):
            return True
        return len({s.version for s in self.segments if not s.from_environment}) > 1

    def segments_of(self, turn: Turn) -> tuple[Segment, ...]:
        """Return the segments of `turn`, those of the environment first."""
        later = self.turns[turn.number + 1 : turn.number + 2]
        return self.segments[turn.segment : later[0].segment if later else None]

    def path(self, turn: Turn) -> list[Turn]:
        """Return the turns from the start of the conversation to `turn`, which is the last one."""
        found = [turn]
        while found[-1].parent is not None:
            found.append(self.turns[found[-1].parent])
        return found[::-1]

    def branch_length(self, turn: Turn | None) -> int:
        """Return the number of tokens of the prompt and of all turns on the path to `turn`.

        The tokens of `turn` itself are included. If `turn` is None, only the prompt counts.
        """
        path = [] if turn is None else self.path(turn)
        turns = sum(len(s) for one in path for s in self.segments_of(one))
        return len(self.prompt.token_ids) + turns

    def input_parts(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return the tokens for the next generation request: its context, and the response so far.

        Returns:
            Two lists of token id arrays. The first list is the context of the response: the prompt
            and, for episodes, the newest turn's branch up to the end of the environment's input in
            that turn. The second list has the tokens that the policy has generated so far after
            this context.
        """
        prompt, answer = [self.prompt.token_ids], list(self.segments)
        if self.turns:
            *before, last = self.path(self.turns[-1])
            prompt += [s.token_ids for turn in before for s in self.segments_of(turn)]
            mine = self.segments_of(last)
            prompt += [s.token_ids for s in mine if s.from_environment]
            answer = [s for s in mine if not s.from_environment]
        return prompt, [segment.token_ids for segment in answer]

    def spans(self) -> list[tuple[BranchSpan, ...]]:
        """Return each branch as a tuple of segments, the first of which is the prompt.

        Branches are in the order of their last turns. A trajectory without turns has one branch.
        Branches do not end with turns whose response never reached the agent (`Turn.abandoned`) or
        turns without policy tokens, unless the trajectory has no other turn.
        """
        ids = np.asarray(self.prompt.token_ids, TOKEN_IDS)
        nobody = PolicyVersion(0, 0)
        opening = Segment(ids, np.zeros(len(ids), LOGPROBS), nobody, from_environment=True)
        before = (BranchSpan(opening, False),)
        if not self.turns:
            return [(*before, *(BranchSpan(s, not s.from_environment) for s in self.segments))]
        answered = [
            turn
            for turn in self.turns
            if not turn.abandoned
            and not all(segment.from_environment for segment in self.segments_of(turn))
        ]
        inner = {turn.parent for turn in answered}
        seen: set[int] = set()
        branches = []
        for leaf in [turn for turn in answered if turn.number not in inner] or self.turns[-1:]:
            path = self.path(leaf)
            runs = (
                BranchSpan(
                    s,
                    not (s.from_environment or turn.abandoned or turn.number in seen),
                    turn.number,
                )
                for turn in path
                for s in self.segments_of(turn)
            )
            branches.append((*before, *runs))
            seen.update(turn.number for turn in path)
        return branches

    def branches(self) -> tuple[Branch, ...]:
        """Return the training sequences of the trajectory, one for each branch."""
        return tuple(map(_branch, self.spans()))

    def returns(self, discount: float) -> list[float]:
        """Return the discounted return of each turn: its reward, plus `discount` times the return
        of the next turn.

        The last turn's reward includes what scorers add: it is set so that the rewards of all turns
        sum up to the reward of the trajectory.
        """
        rewards = [turn.reward for turn in self.turns]
        rewards[-1] += (self.reward or 0.0) - sum(rewards)
        found = itertools.accumulate(reversed(rewards), lambda later, r: r + discount * later)
        return list(found)[::-1]


def _branch(runs: Sequence[BranchSpan]) -> Branch:
    length_R = [len(run.segment) for run in runs]
    mask = np.repeat(np.array([run.trained for run in runs], np.int32), length_R)
    token_ids, logprobs = joined([run.segment.arrays[:2] for run in runs])
    by = [None if run.segment.from_environment else run.segment.version for run in runs]
    versions = (v for v, length in zip(by, length_R, strict=True) for _ in range(length))
    return Branch(token_ids, mask, np.where(mask, logprobs, np.float32(0)), tuple(versions))


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt, in the order of their ids."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
