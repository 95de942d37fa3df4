"""Data types of a rollout: policy versions, segments, trajectories.

Invariants
- A segment was written by exactly one author: one policy version on one engine, or the
  environment (whose tokens are never trained).
- All columns of a segment have the same length (`columns.py`). A policy segment's log-probs are
  those of the behaviour policy at the sampling temperature actually used; an environment segment's
  are zeros.
- A trajectory's response is the concatenation of its segments, in order. Segments are only ever
  appended; a restart drops them all.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.columns import Arrays, fault

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


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
    """pending -> running <-> partial -> finished -> scored -> batched, or dropped."""

    PENDING = "pending"
    RUNNING = "running"
    PARTIAL = "partial"
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
    USER = "user"

    @classmethod
    def _missing_(cls, value: object) -> "DropReason | None":
        """Read `verifier`, as older exports and records of events have it, as `scorer`."""
        return cls.SCORER if value == "verifier" else None


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

    def __post_init__(self) -> None:
        if (found := fault(self.arrays)) is not None:
            raise ValueError(f"a segment's {found}")

    @property
    def arrays(self) -> Arrays:
        """All columns."""
        return self.token_ids, self.logprobs, *self.columns

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, eq=False)
class Prompt:
    """A problem: the tokens that the policy sees and what the scorer needs beside the response.

    `payload` is JSON-serialisable and opaque to everything but the task that made it. Of what waits
    for a slot, the higher `priority` is submitted first.
    """

    token_ids: IntArray
    task: str
    payload: dict[str, Any] = field(default_factory=dict)
    priority: int = 0


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


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt (N of them), in the order of their ids."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
