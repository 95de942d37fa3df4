"""The scheduler's whole vocabulary: what can happen (events) and what must be done (actions).

Events and actions are plain frozen data of ints, strings and tuples: they can be recorded, replayed
and compared byte for byte. They name trajectories, never hold their tokens. There is no clock
here: the driver turns time limits into events, and the one time there is came with its event.
"""

from typing import Literal

import msgspec

from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


class Data(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Data that nothing may change, in JSON the array of its fields.

    `gc=False`: none of it can be part of a circle, so the garbage collector need not look at it.
    """


class Message(Data, frozen=True, tag=True):
    """An event or an action: in JSON its name comes before its fields."""


# ---------------------------------------------------------------- events


class GroupSpec(Data, frozen=True):
    """A prompt that became a group: its N trajectories and the prompt's length in tokens."""

    group_id: int
    trajectory_ids: tuple[int, ...]
    prompt_tokens: int
    priority: int = 0


class PromptsAvailable(Message, frozen=True):
    """New groups may be started (answer to `RequestPrompts`). Empty = the source is exhausted."""

    groups: tuple[GroupSpec, ...]


class RecoveredTrajectory(Data, frozen=True):
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


class RecoveredGroup(Data, frozen=True):
    """A group that the store still holds."""

    group: GroupSpec
    trajectories: tuple[RecoveredTrajectory, ...]


class Recovered(Message, frozen=True):
    """All groups found in the store at a resume, in any order (the older one has the smaller id).

    In one event, so that no batch is emitted before all of them are known.
    """

    groups: tuple[RecoveredGroup, ...]


class RecoveredEpisodes(Message, frozen=True):
    """Groups of a store at a resume, as `Recovered`, where trajectories are episodes.

    `contexts`: (trajectory, tokens of its newest turn's input and answer) of the open ones.
    A `waiting` one is to be stepped; a `partial` one, with or without an answer, to be submitted.
    """

    groups: tuple[RecoveredGroup, ...]
    contexts: tuple[tuple[int, int], ...]


class EngineUp(Message, frozen=True):
    """An engine holds `version` and may serve up to `max_running` requests at once."""

    engine_id: str
    version: PolicyVersion
    kv_capacity_tokens: int
    max_running: int | None = None


class EnginesUp(Message, frozen=True):
    """Several engines come up at once: the work that waits is spread over all of them."""

    engines: tuple[EngineUp, ...]


class EngineDown(Message, frozen=True):
    """An engine is gone; whatever ran there is partial now, with the tokens that arrived.

    Its requests report nothing after this: a late `Finished` or `Aborted` cannot be
    distinguished from that of the request that goes on elsewhere.
    """

    engine_id: str


class TokensArrived(Message, frozen=True):
    """`count` more tokens of a running trajectory, all made by policy number `version`."""

    trajectory_id: int
    count: int
    version: int


class LeftQueue(Message, frozen=True):
    """An engine has begun to compute a request that it had queued; for the trace alone."""

    trajectory_id: int
    waited_seconds: float


class Finished(Message, frozen=True):
    """Generation of a trajectory is complete (its last tokens have been reported before)."""

    trajectory_id: int


class TurnEnded(Message, frozen=True):
    """A turn's answer is complete (its last tokens have been reported before)."""

    trajectory_id: int


class EnvironmentReady(Message, frozen=True):
    """An episode's next turn may be submitted: its input has `context` tokens after the prompt."""

    trajectory_id: int
    context: int


class EpisodeEnded(Message, frozen=True):
    """An episode is complete: its environment is done, or a limit is reached."""

    trajectory_id: int


class EnvironmentFailed(Message, frozen=True):
    """An episode's environment has failed, while it was asked.

    `again`: then this member alone starts again, at most `max_regenerations` times; else its group
    is dropped.
    """

    trajectory_id: int
    again: bool


class Aborted(Message, frozen=True):
    """A request ended without finishing (asked for, or the engine's doing): it is partial now."""

    trajectory_id: int


class Refused(Message, frozen=True):
    """No engine will ever run this request: its group is dropped."""

    trajectory_id: int


class ManyAborted(Message, frozen=True):
    """Requests that ended early one right after the other, each with its last tokens.

    `requests`: trajectory id, then count and version of each run of tokens. It means exactly
    `TokensArrived` for each run and then `Aborted`, request by request in this order. A boundary
    ends thousands at once, for which one event is much cheaper.
    """

    requests: tuple[tuple[int, ...], ...]


class RewardReady(Message, frozen=True):
    """A response has its score. `reward=None`: there is none, the scorer failed.

    `regenerate`: then this member alone starts again from its prompt, at most
    `max_regenerations` times; else its group is dropped.
    """

    trajectory_id: int
    reward: float | None
    regenerate: bool = False


class EngineLoad(Message, frozen=True):
    """A load report: share of KV in use (0-1) and preemptions since the last report."""

    engine_id: str
    kv_usage: float
    preemptions: int


class BatchTaken(Message, frozen=True):
    """The trainer took the emitted batch of `step` and works on it.

    `at_seconds`: when, on a clock of the driver's that never runs backwards; 0 = unknown. Only
    `concurrency: auto` uses it.
    """

    step: int
    at_seconds: float = 0.0


class UpdateRequested(Message, frozen=True):
    """The trainer has made version `number` and wants to publish it."""

    number: int


class WeightsPublished(Message, frozen=True):
    """All engines that are up hold this version now."""

    version: PolicyVersion


Event = (
    PromptsAvailable
    | Recovered
    | RecoveredEpisodes
    | EngineUp
    | EnginesUp
    | EngineDown
    | TokensArrived
    | LeftQueue
    | Finished
    | TurnEnded
    | EnvironmentReady
    | EpisodeEnded
    | EnvironmentFailed
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


class RequestPrompts(Message, frozen=True):
    """`count` more groups are wanted."""

    count: int


class Submit(Message, frozen=True):
    """Start a trajectory on an engine, or go on with it from its stored tokens."""

    trajectory_id: int
    engine_id: str
    resume: bool


class StartEpisode(Message, frozen=True):
    """Begin an episode: its environment gives the first turn's input."""

    trajectory_id: int


class StepEnvironment(Message, frozen=True):
    """Hand a turn's answer to the environment, once it is committed."""

    trajectory_id: int


class Abort(Message, frozen=True):
    """End a running request early; it will be `Aborted` (or `Finished`, if that came first)."""

    trajectory_id: int
    engine_id: str


class Score(Message, frozen=True):
    """Send a finished trajectory to the scorer."""

    trajectory_id: int


class Restart(Message, frozen=True):
    """Forget a trajectory's tokens and reward; it starts again from its prompt."""

    trajectory_id: int


class Drop(Message, frozen=True):
    """A trajectory leaves the run; neither an engine nor a scorer works on it any more.

    Its environment may: what that sends is discarded. So it is after a `Restart`.
    """

    trajectory_id: int
    reason: DropReason


class EmitBatch(Message, frozen=True):
    """Batch for update `step`: complete, scored groups, in this order.

    `mask_before`: tokens of policy numbers below it are not trained (boundary action `mask`).
    """

    step: int
    group_ids: tuple[int, ...]
    mask_before: int | None = None


class PauseEngines(Message, frozen=True):
    """Stop generation for a weight transfer, with SGLang's mode of that name."""

    mode: Literal["in_place", "retract"]


class AllowUpdate(Message, frozen=True):
    """Engines are ready (idle or paused): the weight transfer of `number` may begin."""

    number: int


class ResumeEngines(Message, frozen=True):
    """Generation goes on after a transfer."""


class Warn(Message, frozen=True):
    """A failure signature was seen, by its name, with what to change."""

    name: str
    message: str


Action = (
    RequestPrompts
    | Submit
    | StartEpisode
    | StepEnvironment
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
