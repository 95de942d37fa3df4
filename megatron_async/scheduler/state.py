"""Provides the entries that the scheduler keeps for each trajectory, group and engine.

Invariants
- A trajectory has an entry exactly while it is neither batched nor dropped.
- `TrajectoryEntry.oldest` is a lower bound of the policy numbers of the trajectory's tokens. From
  the submission until the first token arrives, it is the number of the version that the engine
  serves; from then on, it is the number of the first token.
- A trajectory with a `deferred_action` is not scheduled any longer. It is dropped or restarted as
  soon as its running request or its scoring has ended, so no `Drop` is emitted while an engine or
  scorer still uses the trajectory.
"""

import enum
from dataclasses import dataclass, field

from megatron_async.scheduler.events import GroupSpec
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


class DeferredAction(enum.Enum):
    """Action on a trajectory once its running request or scoring has ended."""

    DROP = "drop"
    RESTART = "restart"


@dataclass(slots=True, eq=False)
class EngineEntry:
    """The scheduler's entry for an engine that is up.

    Attributes:
        index: Position of the engine in the order in which engines came up; it decides between
            engines with equal load and equally many requests.
        version: The policy version that the engine has loaded.
        kv_capacity: Capacity of its KV cache in tokens.
        max_running: Largest number of requests that it runs at once; None if it has no limit.
        kv_tokens: Number of tokens of its running requests; a group's shared prompt counts once.
        running: The trajectories that run on the engine, by id.
    """

    engine_id: str
    index: int
    version: PolicyVersion
    kv_capacity: int
    max_running: int | None
    kv_tokens: int = 0
    running: "dict[int, TrajectoryEntry]" = field(default_factory=dict)

    @property
    def has_free_request(self) -> bool:
        """Whether the engine may run one more request."""
        return self.max_running is None or len(self.running) < self.max_running


@dataclass(slots=True, eq=False)
class TrajectoryEntry:
    """The scheduler's entry for a trajectory that is neither batched nor dropped.

    Attributes:
        tokens: Number of tokens that the policy has generated.
        group: Its group.
        index: Its position among the members of the group.
        oldest: Lower bound of the policy numbers of its tokens; None while it has no tokens and
            does not run.
        newest: Largest policy number of its tokens; -1 if it has none.
        engine: The engine on which it runs, if any.
        abort_sent: Whether an abort of its running request was emitted.
        deferred_action: Drop or restart that is carried out when its running request or scoring has
            ended, if any.
        ticket: Number that marks its valid item in the work queue; 0 if it is not in the queue.
        regenerations: How often this process has restarted it because its scorer or environment
            failed.
        extra_context_tokens: Number of tokens that an engine has in its KV cache for it in addition
            to its prompt and `tokens`. For an episode, this is the number of tokens after the
            prompt on the newest turn's branch, minus `tokens` (negative if the policy's tokens are
            mostly on other branches); otherwise 0.
        begun: Whether it is an open episode: its environment was started and the episode has not
            ended.
        last_engine: For an episode, the engine on which its last turn ran; otherwise None.
    """

    trajectory_id: int
    group: "GroupEntry"
    index: int
    state: TrajectoryState = TrajectoryState.PENDING
    tokens: int = 0
    oldest: int | None = None
    newest: int = -1
    reward: float | None = None
    engine: EngineEntry | None = None
    abort_sent: bool = False
    deferred_action: DeferredAction | None = None
    ticket: int = 0
    regenerations: int = 0
    extra_context_tokens: int = 0
    begun: bool = False
    last_engine: EngineEntry | None = None

    def add_tokens(self, count: int, version: int) -> None:
        """Add `count` to the number of tokens (`tokens`), and raise the largest policy number
        (`newest`) to `version` if it is smaller.

        Args:
            count: Number of new tokens.
            version: Number of the policy that generated them.
        """
        self.tokens += count
        self.newest = max(self.newest, version)

    def reset(self) -> None:
        """Reset the trajectory to its prompt: no tokens, no reward, state `pending`."""
        self.state = TrajectoryState.PENDING
        self.tokens = 0
        self.oldest = None
        self.newest = -1
        self.reward = None
        self.deferred_action = None
        self.extra_context_tokens = 0
        self.last_engine = None


@dataclass(slots=True, eq=False)
class GroupEntry:
    """The scheduler's entry for a group: the trajectories of one prompt (its members).

    The entry exists until the group is batched or all of its members are dropped.

    Attributes:
        order: Position in the order in which groups were started; -1 if the group is not started
            yet.
        unfinished: Number of members without a complete response.
        unscored: Number of members without a reward.
        complete: Whether all members have a reward and the group waits for a batch.
        oldest: Lower bound of the policy numbers of the group's tokens; None if no member has such
            a bound. Members that will be dropped or restarted do not count.
        drop_reason: Reason why the group is being dropped; None if it is not. A member that is
            running or being scored is dropped only when that has ended.
        serving: Number of members that run on each engine, by engine id.
    """

    spec: GroupSpec
    members: list[TrajectoryEntry] = field(default_factory=list)
    order: int = -1
    unfinished: int = 0
    unscored: int = 0
    complete: bool = False
    oldest: int | None = None
    drop_reason: DropReason | None = None
    serving: dict[str, int] = field(default_factory=dict)

    def oldest_of_members(self) -> int | None:
        """Return the lower bound of the policy numbers of the group's tokens: the smallest `oldest`
        of the members without a deferred drop or restart, or None if `oldest` is None for all of
        these members."""
        known = (
            m.oldest for m in self.members if m.deferred_action is None and m.oldest is not None
        )
        return min(known, default=None)

    @property
    def zero_variance(self) -> bool:
        """Whether the rewards of all members are equal, so that each member's advantage relative to
        the group's mean is zero."""
        return len({member.reward for member in self.members}) == 1


def new_group(spec: GroupSpec) -> GroupEntry:
    """Return the entry of a group whose trajectories have not run yet."""
    size = len(spec.trajectory_ids)
    group = GroupEntry(spec, unfinished=size, unscored=size)
    group.members = [
        TrajectoryEntry(trajectory_id, group, index)
        for index, trajectory_id in enumerate(spec.trajectory_ids)
    ]
    return group
