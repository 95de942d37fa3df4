"""Checks every rule of the scheduler, from its events and actions only.

The oracle derives its own state, without the scheduler's code. `event` is called before the
scheduler gets an event, `actions` with the actions that it returns. Both raise AssertionError if a
rule is broken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState

SIGNATURES = {"recomputation_storm", "queue_underflow", "queue_overflow", "scoring_backlog"}
DONE = ("finished", "scoring", "rewarded", "scored")


@dataclass(eq=False)
class T:
    """State of a trajectory, as the oracle derives it."""

    trajectory_id: int
    group: G
    index: int
    # One of waiting, running, finished, scoring, rewarded, scored, batched, dropped.
    state: str = "waiting"
    tokens: int = 0
    oldest: int | None = None
    served: int = 0  # Number of the version at the last submission.
    # Whether the floor passed `served` while the trajectory ran without a token.
    overtaken: bool = False
    newest: int = -1
    engine: str | None = None
    aborted: bool = False
    reward: float | None = None
    regenerate: bool = False
    regenerations: int = 0
    drop_reason: DropReason | None = None

    def add(self, count: int, version: int) -> None:
        self.tokens += count
        self.oldest = version if self.oldest is None else min(self.oldest, version)
        self.newest = max(self.newest, version)


@dataclass(eq=False)
class G:
    """State of a group; `started` is its number among started groups, None before its first
    submission."""

    spec: ev.GroupSpec
    members: list[T] = field(default_factory=list)
    started: int | None = None
    step: int | None = None
    unscored: bool = False
    refused: bool = False

    @property
    def dropped(self) -> bool:
        return any(t.state == "dropped" for t in self.members)

    @property
    def complete(self) -> bool:
        return self.step is None and all(t.state == "scored" for t in self.members)

    @property
    def open(self) -> bool:
        return self.started is not None and self.step is None and not self.dropped

    @property
    def oldest(self) -> int:
        return min((t.oldest for t in self.members if t.oldest is not None), default=-1)


class Oracle:
    """State of one scheduler, from a start or resume to the next crash, derived from events and
    actions."""

    def __init__(self, config: ScheduleConfig, first_step: int, version: PolicyVersion) -> None:
        self.config = config
        self.version = version
        self.next_step = first_step
        self.groups: dict[int, G] = {}
        self.live: dict[int, G] = {}  # Groups that are neither batched nor completely dropped.
        self.trajectories: dict[int, T] = {}
        self.engines: dict[str, ev.EngineUp] = {}
        self.untaken: list[int] = []
        self.update: int | None = None
        self.allowed = False
        self.paused = False
        self.prompts_outstanding = 0
        self.exhausted = False
        self.started = 0
        self.had_recovery = False
        self.submissions = 0

    # ------------------------------------------------------------ books

    def running(self, engine_id: str | None = None) -> list[T]:
        return [
            t
            for group in self.live.values()
            for t in group.members
            if t.state == "running" and (engine_id is None or engine_id == t.engine)
        ]

    def scoring(self) -> list[T]:
        return [t for g in self.live.values() for t in g.members if t.state == "scoring"]

    def waiting(self) -> list[T]:
        """Trajectories that may run now; members of groups that are being dropped are excluded."""
        return [
            t
            for group in self.live.values()
            for t in group.members
            if t.state == "waiting" and not group.dropped
        ]

    def complete_groups(self) -> list[G]:
        return [group for group in self.live.values() if group.complete]

    def open_groups(self) -> int:
        """Started groups that are not batched, dropped, or stale and about to be dropped."""
        drops = self.config.on_stale in ("drop", "wait")
        return sum(
            group.open and not (drops and -1 < group.oldest < self.floor)
            for group in self.live.values()
        )

    def _leaving(self, t: T) -> bool:
        """Return whether a group is stale: it is dropped or restarted once nothing works on it."""
        stale = t.oldest is not None and t.oldest < self.floor
        return stale and self.config.on_stale != "mask"

    def held_back(self) -> bool:
        """Return whether no new group may start, because finished groups fill
        `max_waiting_batches`."""
        drops = self.config.overflow == "drop_oldest"
        waiting = 0 if drops else len(self.untaken) * self.config.groups_per_batch
        for group in self.live.values():
            finished = group.open and all(t.state in DONE for t in group.members)
            leaving = any(map(self._leaving, group.members))
            if finished and not leaving and not (drops and group.complete):
                waiting += 1
        return waiting >= self.config.max_waiting_batches * self.config.groups_per_batch

    @property
    def floor(self) -> int:
        k = self.config.max_async_level
        return 0 if k is None else max(0, self.next_step - k)

    def add_group(self, spec: ev.GroupSpec) -> G:
        group = G(spec)
        group.members = [T(tid, group, i) for i, tid in enumerate(spec.trajectory_ids)]
        assert spec.group_id not in self.groups
        self.groups[spec.group_id] = self.live[spec.group_id] = group
        self.trajectories.update({t.trajectory_id: t for t in group.members})
        return group

    def _start(self, group: G) -> None:
        group.started = self.started
        self.started += 1

    # ------------------------------------------------------------ events

    def event(self, event: ev.Event) -> None:
        match event:
            case ev.PromptsAvailable():
                self.prompts_outstanding = 0
                self.exhausted = not event.groups
                for spec in event.groups:
                    self.add_group(spec)
            case ev.TokensArrived():
                t = self.trajectories[event.trajectory_id]
                t.add(event.count, event.version)
            case ev.Finished():
                t = self.trajectories[event.trajectory_id]
                t.state, t.engine, t.aborted = "finished", None, False
            case ev.Aborted():
                self._stopped(self.trajectories[event.trajectory_id])
            case ev.Refused():
                t = self.trajectories[event.trajectory_id]
                self._stopped(t)
                t.group.refused = True
            case ev.RewardReady():
                t = self.trajectories[event.trajectory_id]
                t.state, t.reward = "rewarded", event.reward
                t.regenerate = event.regenerate and event.reward is None
                if event.reward is not None:
                    t.state = "scored"
                elif t.regenerate and t.regenerations < self.config.max_regenerations:
                    pass
                elif not any(m.state == "dropped" for m in t.group.members):
                    t.group.unscored = True
            case ev.EngineUp():
                self.engines[event.engine_id] = event
            case ev.EnginesUp():
                self.engines |= {engine.engine_id: engine for engine in event.engines}
            case ev.EngineDown():
                del self.engines[event.engine_id]
                for t in self.running(event.engine_id):
                    self._stopped(t)
            case ev.BatchTaken():
                self.untaken.remove(event.step)
            case ev.UpdateRequested():
                self.update, self.allowed = event.number, False
            case ev.WeightsPublished():
                self.version = event.version
                self.update, self.allowed = None, False
                for name, engine in self.engines.items():
                    self.engines[name] = ev.EngineUp(
                        name, event.version, engine.kv_capacity_tokens, engine.max_running
                    )
            case ev.Recovered():
                for group in sorted(event.groups, key=lambda g: g.group.group_id):
                    self._recovered(group)
            case ev.EngineLoad():
                pass

    def _stopped(self, t: T) -> None:
        t.state, t.engine, t.aborted = "waiting", None, False

    def _recovered(self, event: ev.RecoveredGroup) -> None:
        self.had_recovery = True
        group = self.add_group(event.group)
        if any(known.state is not TrajectoryState.PENDING for known in event.trajectories):
            self._start(group)
        for t, known in zip(group.members, event.trajectories, strict=True):
            if known.response_tokens:
                assert known.oldest_version is not None and known.newest_version is not None
                t.add(1, known.oldest_version)
                t.add(known.response_tokens - 1, known.newest_version)
            t.reward = known.reward
            t.drop_reason = known.drop_reason
            t.state = {
                TrajectoryState.FINISHED: "finished",
                TrajectoryState.SCORED: "scored",
                TrajectoryState.DROPPED: "dropped",
            }.get(known.state, "waiting")

    # ------------------------------------------------------------ actions

    def actions(self, event: ev.Event, actions: Iterable[ev.Action]) -> None:
        previous: ev.Action | None = None
        resumed = False
        for action in actions:
            match action:
                case ev.Submit():
                    self._submit(action)
                case ev.Abort():
                    t = self.trajectories[action.trajectory_id]
                    assert t.state == "running" and t.engine == action.engine_id, action
                    assert not t.aborted, f"aborted twice: {action}"
                    t.aborted = True
                case ev.Score():
                    t = self.trajectories[action.trajectory_id]
                    assert t.state == "finished", f"{action}: {t.state}"
                    t.state = "scoring"
                case ev.Restart():
                    self._restart(action)
                case ev.Drop():
                    self._drop(action)
                case ev.EmitBatch():
                    self._emit(action)
                case ev.RequestPrompts():
                    assert action.count > 0 and not self.prompts_outstanding
                    assert not self.exhausted, "prompts were requested from an exhausted source"
                    self.prompts_outstanding = action.count
                case ev.PauseEngines():
                    assert self.config.weight_update == "in_flight" and not self.paused
                    if self.config.boundary == "pause":
                        assert self.next_step > self.version.number, "no batch was emitted"
                    else:
                        assert self.update is not None
                    assert action.mode == ("in_place" if self.config.kv == "keep" else "retract"), (
                        action
                    )
                    self.paused = True
                case ev.AllowUpdate():
                    self._allow(action, previous)
                case ev.ResumeEngines():
                    assert isinstance(event, ev.WeightsPublished) and self.paused
                    self.paused, resumed = False, True
                case ev.Warn():
                    assert action.name in SIGNATURES and action.message
                case _:
                    self.further(action)
            previous = action
        if isinstance(event, ev.WeightsPublished):
            assert resumed or not self.paused, "engines stay paused after the publication"
        self._after(event)

    def further(self, action: ev.Action) -> None:
        """Check an action that only other worlds have."""
        raise AssertionError(f"no such action: {action}")

    def _submit(self, action: ev.Submit) -> None:
        t = self.trajectories[action.trajectory_id]
        engine = self.engines.get(action.engine_id)
        assert engine is not None, f"{action}: engine is down"
        assert engine.version == self.version, f"{action}: the engine has loaded {engine.version}"
        assert self.update is None, f"{action} during an update"
        assert self.config.overlap or self.version.number >= self.next_step, (
            f"{action} while the trainer works"
        )
        assert self.version.number >= self.floor, f"{action}: its tokens would be stale at once"
        assert t.state == "waiting", f"{action}: {t.state}"
        assert not t.group.dropped and t.group.step is None
        assert action.resume == (t.tokens > 0), action
        on_engine = len(self.running(action.engine_id))
        assert engine.max_running is None or on_engine < engine.max_running, action
        if isinstance(self.config.concurrency, int):
            assert len(self.running()) < self.config.concurrency, (
                "more than N' requests are in flight"
            )
        self._resumed_first(t)
        if t.group.started is None:
            assert not self.held_back(), (
                "a new group started while finished groups fill max_waiting_batches"
            )
            self._start(t.group)
            self._may_start()
        t.served = self.version.number
        t.state, t.engine, t.aborted = "running", action.engine_id, False
        self.submissions += 1

    def _resumed_first(self, t: T) -> None:
        partial = [other for other in self.waiting() if other.tokens]
        if not t.tokens:
            assert not partial, f"{t.trajectory_id} started before {partial[0].trajectory_id}"
            if t.group.started is None:
                waiting = [o for o in self.waiting() if o.group.started is not None]
                assert not waiting, "a new group started before all members of an earlier group"
            return
        order = self.config.buffer_order

        def key(other: T) -> tuple[int, ...]:
            assert other.group.started is not None
            place = (other.group.started, other.index)
            first = -other.group.spec.priority
            if order == "oldest_first":
                return (first, *place)
            if order == "newest_first":
                return (first, -place[0], -place[1])
            return (first, -other.tokens, *place)

        best = min(partial, key=key)
        assert best is t, f"{t.trajectory_id} resumed before {best.trajectory_id} ({order})"

    def _may_start(self) -> None:
        """Check the limits on open groups, after a group was started."""
        batch = self.config.groups_per_batch
        started_per_batch = math.ceil(batch * self.config.oversample)
        open_groups = self.open_groups()
        k = self.config.max_async_level
        if k is not None:
            ahead = self.next_step - self.version.number
            assert open_groups <= (k + 1 - ahead) * batch + started_per_batch - batch, (
                "more groups are open than max_async_level permits"
            )
        if self.config.refill == "batch":
            assert open_groups <= started_per_batch, "more groups are open than the batch needs"

    def _restart(self, action: ev.Restart) -> None:
        t = self.trajectories[action.trajectory_id]
        assert t.state in ("waiting", "scored", "finished", "rewarded"), f"{action}: {t.state}"
        if t.state == "rewarded" and t.regenerate and not self._leaving(t):
            t.regenerations += 1
            assert t.regenerations <= self.config.max_regenerations
        else:
            assert self.config.on_stale == "restart"
            stale = t.oldest is not None and t.oldest < self.floor
            # Its first tokens may come, of a newer version, after it was aborted for this.
            assert stale or t.overtaken, f"{action}: not stale"
        t.tokens, t.oldest, t.newest, t.overtaken = 0, None, -1, False
        t.state, t.reward = "waiting", None

    def _drop(self, action: ev.Drop) -> None:
        t = self.trajectories[action.trajectory_id]
        group, config = t.group, self.config
        assert t.state in ("waiting", "scored", "finished", "rewarded"), f"{action}: {t.state}"
        others = {m.drop_reason for m in group.members if m.state == "dropped"}
        assert others <= {action.reason}, f"{action}: the group was dropped for {others}"
        if not others:
            match action.reason:
                case DropReason.STALE:
                    assert config.max_async_level is not None
                    assert config.on_stale in ("drop", "mask", "wait")
                    # The first tokens of a member may come, of a newer version, after it was
                    # aborted because its version had become too old.
                    overtaken = any(m.overtaken for m in group.members)
                    assert group.oldest < self.floor or overtaken, f"{action}: not stale"
                    if config.on_stale == "mask":
                        assert all(m.newest < self.floor for m in group.members)
                    if config.on_stale == "wait" and config.oversample == 1:
                        assert self.had_recovery, "on_stale: wait lost a group"
                case DropReason.SCORER:
                    assert group.unscored
                case DropReason.REFUSED:
                    assert group.refused
                case DropReason.FILTERED:
                    assert config.dynamic_sampling
                    assert all(m.state == "scored" for m in group.members)
                    assert len({m.reward for m in group.members}) == 1
                case DropReason.OVERFLOW:
                    assert config.overflow == "drop_oldest"
                    assert group.complete
                    ready = len(self.complete_groups()) / config.groups_per_batch
                    assert ready + len(self.untaken) > config.max_waiting_batches
                case _:
                    raise AssertionError(f"{action}: the scheduler has no such reason")
        t.state, t.drop_reason = "dropped", action.reason
        if all(m.state == "dropped" for m in group.members):
            del self.live[group.spec.group_id]

    def _emit(self, action: ev.EmitBatch) -> None:
        config = self.config
        assert action.step == self.next_step, f"{action}: expected step {self.next_step}"
        assert len(set(action.group_ids)) == len(action.group_ids)
        groups = [self.groups[group_id] for group_id in action.group_ids]
        for group in groups:
            assert group.step is None, f"group {group.spec.group_id} is batched twice"
            assert group.complete, f"group {group.spec.group_id} is not complete"
            if config.dynamic_sampling:
                assert len({t.reward for t in group.members}) > 1
        if len(groups) != config.groups_per_batch:
            assert self.exhausted and config.updates_per_batch <= len(groups)
            left = {id(g) for g in self.live.values() if not g.dropped}
            assert left == {id(g) for g in groups}, "a short batch was emitted before the end"
        if config.overlap:
            assert len(self.untaken) < config.max_waiting_batches, (
                "more batches wait than max_waiting_batches permits"
            )
        else:
            assert self.version.number == action.step and not self.untaken
            if config.boundary == "drain":
                assert not self.running(), "a batch was emitted before the engines were drained"
        stale = [g for g in groups if g.oldest < self.floor]
        if stale:
            assert config.on_stale == "mask", f"{action}: the batch exceeds the lag bound"
            for group in stale:
                assert any(t.newest >= self.floor for t in group.members), (
                    "a group has no token that may be trained"
                )
        assert action.mask_before == (self.floor if stale else None), action
        left_behind = [g for g in self.complete_groups() if g not in groups]
        taken = max((g.oldest, g.started or 0) for g in groups)
        for group in left_behind:
            fully_masked = all(t.newest < self.floor for t in group.members)
            assert fully_masked or (group.oldest, group.started or 0) > taken, (
                "an older complete group was left out of the batch"
            )
        for group in groups:
            group.step = action.step
            del self.live[group.spec.group_id]
            for t in group.members:
                t.state = "batched"
        self.untaken.append(action.step)
        self.next_step += 1
        for t in self.running():
            t.overtaken |= t.oldest is None and t.served < self.floor

    def _allow(self, action: ev.AllowUpdate, previous: ev.Action | None) -> None:
        assert action.number == self.update and not self.allowed, action
        if self.config.weight_update == "in_flight":
            assert self.paused, "an update was allowed without a pause"
            at_batch = self.config.boundary == "pause"
            assert at_batch or isinstance(previous, ev.PauseEngines), "the pause was too early"
        if self.config.weight_update == "boundary" or self.config.boundary in ("drain", "abort"):
            assert not self.running(), "an update was allowed while requests run"
        self.allowed = True

    # ------------------------------------------------------------ after every event

    def _after(self, event: ev.Event) -> None:
        config = self.config
        for group in self.live.values():
            assert not any(t.state == "finished" for t in group.members), (
                "a finished trajectory was not sent to the scorer"
            )
            if group.dropped:
                for t in group.members:
                    on_its_way = (t.state == "running" and t.aborted) or t.state == "scoring"
                    assert t.state == "dropped" or on_its_way, "only a part of a group was dropped"
            elif config.on_stale != "mask" and group.step is None and group.oldest != -1:
                for t in group.members:
                    leaving = (t.state == "running" and t.aborted) or t.state == "scoring"
                    fresh = t.oldest is None or t.oldest >= self.floor
                    assert fresh or leaving, f"stale trajectory {t.trajectory_id} is kept"
        emitted = not config.overlap and self.next_step > self.version.number
        preparing = self.update is not None and not self.allowed
        if emitted and config.boundary == "pause":
            assert self.paused, "engines continue although a batch was emitted"
        if (emitted or preparing) and config.boundary == "abort":
            assert all(t.aborted for t in self.running()), (
                "early termination left a request running"
            )
        self._slots_full(emitted)

    def _slots_full(self, training: bool) -> None:
        config = self.config
        if self.update is not None or training or not isinstance(config.concurrency, int):
            return
        complete = len(self.complete_groups())
        draining = complete >= config.groups_per_batch or self.exhausted
        if config.boundary == "drain" and not config.overlap and draining:
            return
        if len(self.running()) >= config.concurrency or self.version.number < self.floor:
            return
        room = any(
            engine.version == self.version
            and (engine.max_running is None or len(self.running(name)) < engine.max_running)
            for name, engine in self.engines.items()
        )
        if not room:
            return
        waiting = self.waiting()
        idle = [t.trajectory_id for t in waiting if t.group.started is not None]
        assert not idle, f"slots are free, but {idle} wait"
        unlimited = config.max_async_level is None and config.refill == "continuous"
        if not unlimited or self.held_back():
            return
        assert not waiting, "slots are free, but new groups wait"
        assert self.prompts_outstanding or self.exhausted, (
            "slots are free, but no prompts were requested"
        )
