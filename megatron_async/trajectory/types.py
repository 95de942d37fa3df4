"""Data types of a rollout: policy versions, segments, turns, trajectories, branches.

Invariants
- A segment was written by exactly one author: one policy version on one engine, or the
  environment (whose tokens are never trained).
- All columns of a segment have the same length (`columns.py`). A policy segment's log-probs are
  those of the behavior policy at the sampling temperature actually used; an environment segment's
  are zeros.
- A trajectory's response is the concatenation of its segments, in order. Segments are only ever
  appended; a restart drops them all.
- An episode is a trajectory with turns: a tree, since a turn may follow any one before it. Turn n
  has the segments from its `segment` to that of turn n + 1: the environment's, then the policy's.
- Each branch is a training sequence. A token of the policy in several of them is trained in the
  first to be written; in the others it is context (docs/semantics.md section 7).
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
LEFT: Final = "left"
"""In a stored answer: `Turn.left`."""
CHUNK_TOKENS: Final = 64
"""Tokens that the store writes at once. An engine's host holds fewer of a response unacknowledged.
So a kill costs a response one chunk at most. Smaller chunks cost more writes for each token."""


class PolicyVersion(NamedTuple):
    """Weights at the start of update `number` of `lineage` (docs/semantics.md section 1)."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Inverse of `str`. Raises ValueError for anything but `lineage.number`."""
        lineage, dot, number = text.partition(".")
        if not dot:
            raise ValueError(f"policy version {text!r} is not of the form lineage.number")
        return cls(int(lineage), int(number))


class RequestKey(NamedTuple):
    """A generation request of a trajectory: only its newest one may append to it."""

    lineage: int
    trajectory_id: int
    serial: int

    @property
    def name(self) -> str:
        """Name for engines. The terminator keeps any name from being a prefix of another."""
        return f"t{self.trajectory_id}-{self.serial};"


class TrajectoryState(enum.StrEnum):
    """pending -> running <-> partial -> finished -> scored -> batched, or dropped.

    An episode is `waiting` between a turn's end and the first token of the next one.
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
    """Every way out of a run other than a batch (docs/semantics.md section 2)."""

    OVERFLOW = "overflow"
    STALE = "stale"
    FILTERED = "filtered"
    NONFINITE = "nonfinite"
    SCORER = "scorer"
    REFUSED = "refused"
    ENVIRONMENT = "environment"
    USER = "user"


class FinishReason(enum.StrEnum):
    """Reason for which generation of a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens written by one author. Arrays are [n] (tokens), the further columns too."""

    token_ids: IntArray
    logprobs: FloatArray
    version: PolicyVersion
    engine_id: str = ""
    from_environment: bool = False
    columns: Arrays = ()

    @property
    def arrays(self) -> Arrays:
        """All columns."""
        return self.token_ids, self.logprobs, *self.columns

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, eq=False)
class Prompt:
    """A problem: the tokens that the policy sees and what the scorer needs beside the response.

    `payload` is JSON-serializable and opaque to everything but the task that made it. Of what waits
    for a slot, the higher `priority` is submitted first.
    """

    token_ids: IntArray
    task: str
    payload: dict[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """News of the environment since turn `parent` (None: a beginning), then the policy's answer.

    `segment`: its first one. `end`: how the answer ended; None: it has not. `reward` is the
    environment's for this answer, `answer` its text and tool calls, `messages` are what was new.
    `state` is the environment's newest snapshot, of the newest turn only.
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
    def left(self) -> bool:
        """Return whether its answer reached no agent that ended: it is not trained."""
        return bool((self.answer or {}).get(LEFT))


def last_of(turns: Sequence[Turn]) -> Turn:
    """The last turn whose answer counts."""
    return next((turn for turn in reversed(turns) if not turn.left), turns[-1])


class BranchRun(NamedTuple):
    """A segment as it stands in a branch; `turn`: the number of its turn, None outside turns."""

    segment: Segment
    trained: bool
    turn: int | None = None


@dataclass(frozen=True, eq=False)
class Branch:
    """A training sequence, all [n]. `mask` is 1 where a token is trained, else `logprobs` are 0.

    `versions`: that of each token of the policy, None where the environment wrote.
    """

    token_ids: IntArray
    mask: IntArray
    logprobs: FloatArray
    versions: tuple[PolicyVersion | None, ...]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A response to one prompt, in whatever state; `segments` in order of generation."""

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
        """Tokens after the prompt, environment segments included."""
        return sum(len(segment) for segment in self.segments)

    @property
    def resumed(self) -> bool:
        """Return whether more than one policy version or more than one request wrote the response.

        Turns of a conversation (policy segments with an environment segment between them) made by
        one version do not count as resumed.
        """
        pairs = zip(self.segments, self.segments[1:], strict=False)
        if any(not a.from_environment and not b.from_environment for a, b in pairs):
            return True
        return len({s.version for s in self.segments if not s.from_environment}) > 1

    def segments_of(self, turn: Turn) -> tuple[Segment, ...]:
        """The segments of one turn."""
        later = self.turns[turn.number + 1 : turn.number + 2]
        return self.segments[turn.segment : later[0].segment if later else None]

    def path(self, turn: Turn) -> list[Turn]:
        """The turns from a beginning to this one."""
        found = [turn]
        while found[-1].parent is not None:
            found.append(self.turns[found[-1].parent])
        return found[::-1]

    def branch_length(self, turn: Turn | None) -> int:
        """Tokens of the prompt, and up to the end of this turn's answer in its branch."""
        path = [] if turn is None else self.path(turn)
        turns = sum(len(s) for one in path for s in self.segments_of(one))
        return len(self.prompt.token_ids) + turns

    def input_parts(self) -> tuple[list[IntArray], list[IntArray]]:
        """Token ids that the answer under way follows, and those of it that are there."""
        prompt, answer = [self.prompt.token_ids], list(self.segments)
        if self.turns:
            *before, last = self.path(self.turns[-1])
            prompt += [s.token_ids for turn in before for s in self.segments_of(turn)]
            mine = self.segments_of(last)
            prompt += [s.token_ids for s in mine if s.from_environment]
            answer = [s for s in mine if not s.from_environment]
        return prompt, [segment.token_ids for segment in answer]

    def runs(self) -> list[tuple[BranchRun, ...]]:
        """The branches in the order in which they were written, one if there are no turns.

        A turn that is left, or without a token of the policy, is in none, unless there is no other.
        """
        ids = np.asarray(self.prompt.token_ids, TOKEN_IDS)
        nobody = PolicyVersion(0, 0)
        opening = Segment(ids, np.zeros(len(ids), LOGPROBS), nobody, from_environment=True)
        before = (BranchRun(opening, False),)
        if not self.turns:
            return [(*before, *(BranchRun(s, not s.from_environment) for s in self.segments))]
        answered = [
            turn
            for turn in self.turns
            if not turn.left
            and not all(segment.from_environment for segment in self.segments_of(turn))
        ]
        inner = {turn.parent for turn in answered}
        seen: set[int] = set()
        branches = []
        for leaf in [turn for turn in answered if turn.number not in inner] or self.turns[-1:]:
            path = self.path(leaf)
            runs = (
                BranchRun(
                    s,
                    not (s.from_environment or turn.left or turn.number in seen),
                    turn.number,
                )
                for turn in path
                for s in self.segments_of(turn)
            )
            branches.append((*before, *runs))
            seen.update(turn.number for turn in path)
        return branches

    def branches(self) -> tuple[Branch, ...]:
        """The training sequences."""
        return tuple(map(_branch, self.runs()))

    def returns(self, discount: float) -> list[float]:
        """The reward from each turn on, discounted by turns; the scorers' belongs to the last."""
        rewards = [turn.reward for turn in self.turns]
        rewards[-1] += (self.reward or 0.0) - sum(rewards)
        found = itertools.accumulate(reversed(rewards), lambda later, r: r + discount * later)
        return list(found)[::-1]


def _branch(runs: Sequence[BranchRun]) -> Branch:
    length_R = [len(run.segment) for run in runs]
    mask = np.repeat(np.array([run.trained for run in runs], np.int32), length_R)
    token_ids, logprobs = joined([run.segment.arrays[:2] for run in runs])
    by = [None if run.segment.from_environment else run.segment.version for run in runs]
    versions = (v for v, length in zip(by, length_R, strict=True) for _ in range(length))
    return Branch(token_ids, mask, np.where(mask, logprobs, np.float32(0)), tuple(versions))


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt (N of them), in the order of their ids."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
