"""Entries of the scheduler for a trajectory, a group and an engine.

Invariants
- An entry exists exactly while its trajectory is neither batched nor dropped.
- `oldest` is a lower bound of the policy number of every trained token: the number that its
  engines served when it was submitted until the first token arrives, that token's number then.
- A trajectory with an `ending` takes no further part; it leaves (or starts again) as soon as no
  engine or scorer works on it any more, so that no `Drop` ever overtakes one.
"""

import enum
from dataclasses import dataclass, field

from megatron_async.scheduler.events import GroupSpec
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


class DeferredAction(enum.Enum):
    """Next state of a trajectory whose request or scoring has ended."""

    DROP = "drop"
    RESTART = "restart"


@dataclass(slots=True, eq=False)
class EngineEntry:
    """An engine that is up; `index` is its order of arrival, the last tie-break everywhere."""

    engine_id: str
    index: int
    version: PolicyVersion
    kv_capacity: int
    max_running: int | None
    kv_tokens: int = 0
    running: "dict[int, TrajectoryEntry]" = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Return whether one more request fits under its own limit."""
        return self.max_running is None or len(self.running) < self.max_running


@dataclass(slots=True, eq=False)
class TrajectoryEntry:
    """A trajectory that is neither batched nor dropped.

    `place` is the work queue's: where it waits there, 0 = it does not. `regenerations`: how often
    it was generated again because its scorer or environment failed, in this process.
    `tokens` are the policy's. An engine holds `extra` more than these beside the prompt: 0 without
    an environment, else the input of the newest turn less the tokens before it. An episode that
    has `begun` and not ended counts as open; its last turn ran on `home`.
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
    place: int = 0
    regenerations: int = 0
    extra_context_tokens: int = 0
    begun: bool = False
    last_engine: EngineEntry | None = None

    def add_tokens(self, count: int, version: int) -> None:
        """Count tokens of one policy number."""
        self.tokens += count
        self.newest = max(self.newest, version)

    def forget_tokens(self) -> None:
        """Back to the prompt."""
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
    """The trajectories of a prompt. `order` counts started groups; -1 = none was submitted yet.

    `unfinished` and `unscored` count members: those without a whole response, without a reward.
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
        """Smallest policy number in the group, those with an ending left out."""
        known = (
            m.oldest for m in self.members if m.deferred_action is None and m.oldest is not None
        )
        return min(known, default=None)

    @property
    def zero_variance(self) -> bool:
        """Return whether all rewards are equal, so that every group-relative advantage is zero."""
        return len({member.reward for member in self.members}) == 1


def new_group(spec: GroupSpec) -> GroupEntry:
    """A group none of whose trajectories has run."""
    size = len(spec.trajectory_ids)
    group = GroupEntry(spec, unfinished=size, unscored=size)
    group.members = [
        TrajectoryEntry(trajectory_id, group, index)
        for index, trajectory_id in enumerate(spec.trajectory_ids)
    ]
    return group
