"""The scheduler's whole vocabulary: what can happen (events) and what must be done (actions).

Events and actions are plain frozen data of ints, strings and tuples: they can be recorded, replayed
and compared byte for byte. They name trajectories, never hold their tokens. There is no clock
here: the driver turns time limits into events, and the one time there is came with its event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar, dataclass_transform

from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _message(cls: type[_T]) -> type[_T]:
    """A dataclass that nothing may change, which is the type checker's to see to.

    `frozen=True` would check it again at run time, for which its constructor takes four times as
    long; a boundary makes thousands of messages at once.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


# ---------------------------------------------------------------- events


@_message
class GroupSpec:
    """A prompt that became a group: its N trajectories and the prompt's length in tokens."""

    group_id: int
    trajectory_ids: tuple[int, ...]
    prompt_tokens: int
    priority: int = 0


@_message
class PromptsAvailable:
    """New groups may be started (answer to `RequestPrompts`). Empty = the source is exhausted."""

    groups: tuple[GroupSpec, ...]


@_message
class RecoveredTrajectory:
    """A stored trajectory that is unconsumed after a restart.

    `oldest_version` and `newest_version` are those of its oldest and newest policy token, in
    numbers of the current lineage. `drop_reason` belongs to state `dropped`: a process that ended
    in the middle of dropping a group left the others behind.
    """

    trajectory_id: int
    state: TrajectoryState
    response_tokens: int
    oldest_version: int | None
    reward: float | None
    newest_version: int | None = None
    drop_reason: DropReason | None = None


@_message
class RecoveredGroup:
    """A group that the store still holds."""

    group: GroupSpec
    trajectories: tuple[RecoveredTrajectory, ...]


@_message
class Recovered:
    """All groups found in the store at a resume, in any order (the older one has the smaller id).

    In one event, so that no batch is emitted before all of them are known.
    """

    groups: tuple[RecoveredGroup, ...]


@_message
class EngineUp:
    """An engine holds `version` and may serve up to `max_running` requests at once."""

    engine_id: str
    version: PolicyVersion
    kv_capacity_tokens: int
    max_running: int | None = None


@_message
class EngineDown:
    """An engine is gone; whatever ran there is partial now, with the tokens that arrived.

    Its requests report nothing after this: a late `Finished` or `Aborted` cannot be
    distinguished from that of the request that goes on elsewhere.
    """

    engine_id: str


@_message
class TokensArrived:
    """`count` more tokens of a running trajectory, all made by policy number `version`."""

    trajectory_id: int
    count: int
    version: int


@_message
class LeftQueue:
    """An engine has begun to compute a request that it had queued; for the trace alone."""

    trajectory_id: int
    waited_seconds: float


@_message
class Finished:
    """Generation of a trajectory is complete (its last tokens have been reported before)."""

    trajectory_id: int


@_message
class Aborted:
    """A request ended without finishing (asked for, or the engine's doing): it is partial now."""

    trajectory_id: int


@_message
class Refused:
    """No engine will ever run this request: its group is dropped."""

    trajectory_id: int


@_message
class ManyAborted:
    """Requests that ended early one right after the other, each with its last tokens.

    `requests`: trajectory id, then count and version of each run of tokens. It means exactly
    `TokensArrived` for each run and then `Aborted`, request by request in this order. A boundary
    ends thousands at once, for which one event is much cheaper.
    """

    requests: tuple[tuple[int, ...], ...]


@_message
class RewardReady:
    """A response has its score. `reward=None`: there is none, the scorer failed.

    `regenerate`: then this member alone starts again from its prompt, at most
    `max_regenerations` times; else its group is dropped.
    """

    trajectory_id: int
    reward: float | None
    regenerate: bool = False


@_message
class EngineLoad:
    """A load report: share of KV in use (0-1) and preemptions since the last report."""

    engine_id: str
    kv_usage: float
    preemptions: int


@_message
class BatchTaken:
    """The trainer took the emitted batch of `step` and works on it.

    `at_seconds`: when, on a clock of the driver's that never runs backwards; 0 = unknown. Only
    `concurrency: auto` uses it.
    """

    step: int
    at_seconds: float = 0.0


@_message
class UpdateRequested:
    """The trainer has made version `number` and wants to publish it."""

    number: int


@_message
class WeightsPublished:
    """All engines that are up hold this version now."""

    version: PolicyVersion


Event = (
    PromptsAvailable
    | Recovered
    | EngineUp
    | EngineDown
    | TokensArrived
    | LeftQueue
    | Finished
    | Aborted
    | Refused
    | ManyAborted
    | RewardReady
    | EngineLoad
    | BatchTaken
    | UpdateRequested
    | WeightsPublished
)

# ---------------------------------------------------------------- actions


@_message
class RequestPrompts:
    """`count` more groups are wanted."""

    count: int


@_message
class Submit:
    """Start a trajectory on an engine, or go on with it from its stored tokens."""

    trajectory_id: int
    engine_id: str
    resume: bool


@_message
class Abort:
    """End a running request early; it will be `Aborted` (or `Finished`, if that came first)."""

    trajectory_id: int
    engine_id: str


@_message
class Score:
    """Send a finished trajectory to the verifier."""

    trajectory_id: int


@_message
class Restart:
    """Forget a trajectory's tokens and reward; it starts again from its prompt."""

    trajectory_id: int


@_message
class Drop:
    """A trajectory leaves the run; neither an engine nor a verifier works on it any more."""

    trajectory_id: int
    reason: DropReason


@_message
class EmitBatch:
    """Batch for update `step`: complete, scored groups, in this order.

    `mask_before`: tokens of policy numbers below it are not trained (boundary action `mask`).
    """

    step: int
    group_ids: tuple[int, ...]
    mask_before: int | None = None


@_message
class PauseEngines:
    """Stop generation for a weight transfer, with SGLang's mode of that name."""

    mode: Literal["in_place", "retract"]


@_message
class AllowUpdate:
    """Engines are ready (idle or paused): the weight transfer of `number` may begin."""

    number: int


@_message
class ResumeEngines:
    """Generation goes on after a transfer."""


@_message
class Warn:
    """A failure signature was seen, by its name, with what to change."""

    name: str
    message: str


Action = (
    RequestPrompts
    | Submit
    | Abort
    | Score
    | Restart
    | Drop
    | EmitBatch
    | PauseEngines
    | AllowUpdate
    | ResumeEngines
    | Warn
)
