"""The life of trajectories and groups: pending -> running <-> partial -> finished -> scored ->
batched, or dropped. An episode begins by `waiting` for its environment, and waits after each turn.

Invariants
- A group leaves whole: in one batch when all members are scored, or by `Drop` of every member
  with one reason.
- `Drop`, `Restart` and `Score` are emitted only when no engine or scorer works on the trajectory;
  until then it keeps its slot and carries its ending.
- After every change no open group is past its deadline, but under `on_stale: mask`.
- `open_groups` counts groups that were started and neither batched nor dropped;
  `finished_groups` those of them whose members all have their whole response, scored or not;
  `open_episodes` members whose environment was begun and that have neither ended nor left.
- Members that are not begun wait in `starts`: of episodes a queue of its own, else the work queue.
"""

from bisect import insort
from collections.abc import Mapping, Sequence

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.balance import ServingEngines
from megatron_async.scheduler.counts import Counts
from megatron_async.scheduler.lag import LagLedger
from megatron_async.scheduler.queues import ReadyGroups, WorkQueue
from megatron_async.scheduler.state import (
    DeferredAction,
    EngineEntry,
    GroupEntry,
    TrajectoryEntry,
    new_group,
)
from megatron_async.trajectory.types import DropReason, TrajectoryState

Actions = list[ev.Action]
_PENDING, _RUNNING, _PARTIAL, _WAITING = (
    TrajectoryState.PENDING,
    TrajectoryState.RUNNING,
    TrajectoryState.PARTIAL,
    TrajectoryState.WAITING,
)  # looked up once: a boundary changes thousands of states


class Lifecycle:
    """Owns every trajectory that is neither batched nor dropped; appends actions to `out`."""

    def __init__(self, config: ScheduleConfig, fleet: ServingEngines, first_step: int) -> None:
        self._config = config
        self._fleet = fleet
        self._trajectories: dict[int, TrajectoryEntry] = {}
        self._groups_started = 0
        self.work = WorkQueue(config.buffer_order)
        self.fresh: list[GroupEntry] = []
        self.ready = ReadyGroups()
        self.lag = LagLedger(config.max_async_level, config.groups_per_batch, first_step)
        self.counts = Counts()
        self.open_groups = 0
        self.finished_groups = 0
        self.starts = WorkQueue(config.buffer_order) if config.open_episodes else self.work
        self.open_episodes = 0

    @property
    def none_unfinished(self) -> bool:
        """Return whether all groups are complete."""
        return not self.fresh and self.open_groups == self.ready.count

    def count(self, state: TrajectoryState) -> int:
        """Trajectories in this state."""
        return sum(entry.state is state for entry in self._trajectories.values())

    # ------------------------------------------------------------ arriving

    def add_group(self, spec: ev.GroupSpec) -> GroupEntry:
        """A group whose trajectories are new here. Raises ValueError for an id that is known."""
        group = new_group(spec)
        for entry in group.members:
            if entry.trajectory_id in self._trajectories:
                raise ValueError(f"trajectory {entry.trajectory_id} is known already")
            self._trajectories[entry.trajectory_id] = entry
        return group

    def add_fresh(self, group: GroupEntry) -> None:
        """A group waits for its start: higher priority first, then in order of arrival."""
        insort(self.fresh, group, key=lambda other: -other.spec.priority)

    def start_group(self) -> None:
        """The next new group's members may be submitted."""
        group = self.fresh.pop(0)
        self._open(group)
        for entry in group.members:
            self.starts.push(entry)

    def _open(self, group: GroupEntry) -> None:
        group.order = self._groups_started
        self._groups_started += 1
        self.open_groups += 1

    def recovered(
        self, event: ev.Recovered | ev.RecoveredEpisodes, version: int, out: Actions
    ) -> None:
        """Take up all groups where the store left them; `version` is what engines shall serve."""
        contexts = dict(event.contexts) if isinstance(event, ev.RecoveredEpisodes) else {}
        for found in sorted(event.groups, key=lambda found: found.group.group_id):
            self._recover(found, contexts, version, out)
        self.resolve_stale(out)

    def _recover(
        self, event: ev.RecoveredGroup, contexts: Mapping[int, int], version: int, out: Actions
    ) -> None:
        group = self.add_group(event.group)
        found = [(self._trajectories[known.trajectory_id], known) for known in event.trajectories]
        if all(known.state is TrajectoryState.PENDING for _, known in found):
            self.add_fresh(group)
            return
        self._open(group)
        for entry, known in found:
            entry.tokens = known.response_tokens
            if (context := contexts.get(entry.trajectory_id)) is not None:
                entry.extra_context_tokens = context - entry.tokens
                self._begin(entry)
            entry.oldest = known.oldest_version
            entry.newest = version if known.newest_version is None else known.newest_version
        self.lag.place(group, group.oldest_of_members())
        gone = [pair for pair in found if pair[1].state is TrajectoryState.DROPPED]
        for entry, _ in gone:
            group.members.remove(entry)
            del self._trajectories[entry.trajectory_id]
        if gone:
            self._drop_group(group, gone[0][1].drop_reason or DropReason.FILTERED, out)
            return
        for entry, known in found:
            self._restore(entry, known, out)

    def _restore(self, entry: TrajectoryEntry, known: ev.RecoveredTrajectory, out: Actions) -> None:
        if known.state not in (TrajectoryState.FINISHED, TrajectoryState.SCORED):
            if known.state is _WAITING:
                self._step(entry, out)
            else:
                self._queue(entry)
            return
        self._finished(entry)
        if known.state is TrajectoryState.SCORED and known.reward is not None:
            self._scored(entry, known.reward, out)
        else:
            out.append(ev.Score(entry.trajectory_id))

    # ------------------------------------------------------------ running

    def submitted(self, entry: TrajectoryEntry, engine: EngineEntry, version: int) -> None:
        """`entry`, taken from the work queue, runs on `engine`, which serves `version`."""
        entry.state = _RUNNING
        if entry.oldest is None:
            entry.oldest = version
            oldest = entry.group.oldest
            self.lag.place(entry.group, version if oldest is None else min(oldest, version))
        self._fleet.occupy(entry, engine)

    def tokens_arrived(self, event: ev.TokensArrived, out: Actions) -> None:
        """Count tokens; the first one fixes a trajectory's oldest version."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is not None:
            self._count(entry, event.count, event.version, out)

    def _count(self, entry: TrajectoryEntry, count: int, version: int, out: Actions) -> None:
        first = not entry.tokens
        entry.add_tokens(count, version)
        if entry.engine is not None:
            entry.engine.kv_tokens += count
        if first or entry.oldest is None or version < entry.oldest:
            self._oldest_known(entry, version, out)
        if first and entry.state is _PENDING:
            self._queue(entry)  # a late report after its engine was lost: it is partial now

    def _oldest_known(self, entry: TrajectoryEntry, version: int, out: Actions) -> None:
        """Correct the version that submission assumed for the oldest token of `entry`."""
        if entry.oldest == version:
            return
        entry.oldest = version
        group = entry.group
        if group.drop_reason is None:
            self.lag.place(group, group.oldest_of_members())
            if version < self.lag.floor:
                self.resolve_stale(out)

    def finished(self, event: ev.Finished, out: Actions) -> bool:
        """A response is complete; True when that was news."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state in (TrajectoryState.FINISHED, TrajectoryState.SCORED):
            return False
        self._fleet.release(entry)
        if entry.deferred_action is not None:
            self._end(entry, out)
        else:
            self.work.remove(entry)
            self._finished(entry)
            out.append(ev.Score(entry.trajectory_id))
        return True

    def _finished(self, entry: TrajectoryEntry) -> None:
        """`entry` has its whole response."""
        entry.state = TrajectoryState.FINISHED
        entry.group.unfinished -= 1
        if not entry.group.unfinished:
            self.finished_groups += 1

    def _unfinished(self, group: GroupEntry) -> None:
        """A member of `group` that has its whole response is to start again."""
        if not group.unfinished:
            self.finished_groups -= 1
        group.unfinished += 1

    def aborted(self, request: tuple[int, ...], out: Actions) -> None:
        """A request ended early, with its last tokens (see `ManyAborted`)."""
        entry = self._trajectories.get(request[0])
        if entry is None:
            return
        for place in range(1, len(request), 2):
            self._count(entry, request[place], request[place + 1], out)
        if entry.state is _RUNNING:
            self._fleet.release(entry)
            self.ended_early(entry, out)

    def refused(self, event: ev.Refused, out: Actions) -> None:
        """The engines take a running request for invalid: a repetition would end the same way."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state is not _RUNNING:
            return
        self._fleet.release(entry)
        entry.state = _PARTIAL if entry.tokens or entry.begun else _PENDING
        if entry.group.drop_reason is None:
            self._drop_group(entry.group, DropReason.REFUSED, out)
        else:
            self._end(entry, out)

    def ended_early(self, entry: TrajectoryEntry, out: Actions) -> None:
        """`entry` has left its engine unfinished."""
        if entry.deferred_action is not None:
            self._end(entry, out)
            return
        if not entry.tokens:
            was_oldest = entry.oldest == entry.group.oldest
            entry.oldest = None
            if was_oldest:
                self.lag.place(entry.group, entry.group.oldest_of_members())
        self._queue(entry)

    def _queue(self, entry: TrajectoryEntry) -> None:
        if entry.tokens or entry.begun:
            entry.state = _PARTIAL
            self.work.push(entry)
        else:
            entry.state = _PENDING
            self.starts.push(entry)

    def abort_all(self, out: Actions) -> None:
        """End every running request early."""
        for engine in self._fleet.engines.values():
            for entry in engine.running.values():
                self._abort(entry, engine, out)

    def _abort(self, entry: TrajectoryEntry, engine: EngineEntry, out: Actions) -> None:
        if not entry.abort_sent:
            entry.abort_sent = True
            out.append(ev.Abort(entry.trajectory_id, engine.engine_id))

    # ------------------------------------------------------------ episodes

    def begin_episodes(self, entries: Sequence[TrajectoryEntry], out: Actions) -> None:
        """The environments of these, taken from `starts`, are begun."""
        for entry in entries:
            self._begin(entry)
            entry.state = _WAITING
            out.append(ev.StartEpisode(entry.trajectory_id))

    def _begin(self, entry: TrajectoryEntry) -> None:
        entry.begun = True
        self.open_episodes += 1

    def _close(self, entry: TrajectoryEntry) -> None:
        """`entry` has ended, leaves or starts again: it was an open episode, or none."""
        if entry.begun:
            self.open_episodes -= 1
            entry.begun = False

    def turn_ended(self, event: ev.TurnEnded, out: Actions) -> bool:
        """The policy has answered; True when that was news."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state not in (_RUNNING, _PARTIAL):
            return False
        self._fleet.release(entry)
        if entry.deferred_action is not None:
            self._end(entry, out)
        else:
            self.work.remove(entry)
            self._step(entry, out)
        return True

    def _step(self, entry: TrajectoryEntry, out: Actions) -> None:
        entry.state = _WAITING
        out.append(ev.StepEnvironment(entry.trajectory_id))

    def environment_ready(self, event: ev.EnvironmentReady) -> None:
        """The next turn of an episode may run."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is not None and entry.state is _WAITING:
            entry.extra_context_tokens = event.context - entry.tokens
            self._queue(entry)

    def episode_ended(self, event: ev.EpisodeEnded, out: Actions) -> None:
        """The environment is done."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is not None and entry.state is _WAITING:
            self._close(entry)
            self._finished(entry)
            out.append(ev.Score(entry.trajectory_id))

    def environment_failed(self, event: ev.EnvironmentFailed, out: Actions) -> None:
        """The member starts again alone, or its group leaves."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state is not _WAITING:
            return
        if event.again and entry.regenerations < self._config.max_regenerations:
            self._regenerate(entry, out)
        else:
            self._drop_group(entry.group, DropReason.ENVIRONMENT, out)

    # ------------------------------------------------------------ scored and batched

    def scored(self, event: ev.RewardReady, out: Actions) -> None:
        """The scorer has answered, or failed."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state is not TrajectoryState.FINISHED:
            return
        if entry.deferred_action is not None:
            self._end(entry, out)
        elif event.reward is not None:
            self._scored(entry, event.reward, out)
        elif event.regenerate and entry.regenerations < self._config.max_regenerations:
            self._unfinished(entry.group)
            self._regenerate(entry, out)
        else:
            entry.state = TrajectoryState.SCORED  # nothing works on it any more
            self._drop_group(entry.group, DropReason.SCORER, out)

    def _regenerate(self, entry: TrajectoryEntry, out: Actions) -> None:
        """`entry` alone starts again; its group waits for it."""
        entry.regenerations += 1
        self.counts.regenerated += 1
        entry.deferred_action = DeferredAction.RESTART
        self.lag.place(entry.group, entry.group.oldest_of_members())
        self._end(entry, out)

    def _scored(self, entry: TrajectoryEntry, reward: float, out: Actions) -> None:
        group = entry.group
        entry.reward = reward
        entry.state = TrajectoryState.SCORED
        group.unscored -= 1
        if group.unscored:
            return
        if self._config.dynamic_sampling and group.zero_variance:
            self._drop_group(group, DropReason.FILTERED, out)
        else:
            self.ready.add(group)

    def drop_oldest_ready(self, out: Actions) -> None:
        """Make room in the ring."""
        self._drop_group(self.ready.take(), DropReason.OVERFLOW, out)

    def take_batch(self, size: int, out: Actions) -> bool:
        """Emit the oldest `size` complete groups as the next batch, and settle what is stale then.

        Returns False when fewer than `size` of them have a token that may be trained (`mask`).
        """
        groups: list[GroupEntry] = []
        masks = self._config.on_stale == "mask"
        step, floor = self.lag.next_step, self.lag.floor
        while self.ready.count and len(groups) < size:
            group = self.ready.take()
            if masks and all(entry.newest < floor for entry in group.members):
                self._drop_group(group, DropReason.STALE, out)
            else:
                groups.append(group)
        if len(groups) < size:
            for group in groups:
                self.ready.add(group)
            return False
        masked = any(group.oldest is not None and group.oldest < floor for group in groups)
        self.counts.batch(groups)
        for group in groups:
            self.lag.remove(group)
            for entry in group.members:
                del self._trajectories[entry.trajectory_id]
        self.open_groups -= size
        self.finished_groups -= size
        ids = tuple(group.spec.group_id for group in groups)
        out.append(ev.EmitBatch(step, ids, floor if masked else None))
        self.lag.next_step += 1
        self.resolve_stale(out)
        return True

    # ------------------------------------------------------------ leaving and starting again

    def _drop_group(self, group: GroupEntry, reason: DropReason, out: Actions) -> None:
        """All members leave, now or when their request or score has ended."""
        group.drop_reason = reason
        self.ready.discard(group)
        self.lag.remove(group)
        self.open_groups -= 1
        if not group.unfinished:
            self.finished_groups -= 1
        for entry in group.members:
            self._end_when_free(entry, DeferredAction.DROP, out)

    def _end_when_free(
        self, entry: TrajectoryEntry, deferred_action: DeferredAction, out: Actions
    ) -> None:
        entry.deferred_action = deferred_action
        if entry.engine is not None:
            self._abort(entry, entry.engine, out)
        elif entry.state is not TrajectoryState.FINISHED:
            self._end(entry, out)

    def _end(self, entry: TrajectoryEntry, out: Actions) -> None:
        """Drop `entry`, on which no engine or scorer works any more, or start it again."""
        waits_in = self.work if entry.tokens or entry.begun else self.starts
        self._close(entry)
        if entry.deferred_action is DeferredAction.RESTART:
            self.counts.restart(entry)
            entry.forget_tokens()
            out.append(ev.Restart(entry.trajectory_id))
            waits_in.remove(entry)
            self.starts.push(entry)
            return
        reason = entry.group.drop_reason
        assert reason is not None
        waits_in.remove(entry)
        self.counts.drop(entry, reason)
        del self._trajectories[entry.trajectory_id]
        out.append(ev.Drop(entry.trajectory_id, reason))

    def resolve_stale(self, out: Actions) -> None:
        """Settle groups that no batch may hold as they are (`on_stale`); `mask` keeps them.

        What `wait` could not save (`LagLedger.may_emit`) is dropped.
        """
        if self._config.on_stale == "mask":
            return
        floor = self.lag.floor
        for group in self.lag.expired():
            if self._config.on_stale != "restart":
                self._drop_group(group, DropReason.STALE, out)
                continue
            self.ready.discard(group)
            for entry in group.members:
                if (
                    entry.deferred_action is None
                    and entry.oldest is not None
                    and entry.oldest < floor
                ):
                    if entry.state is TrajectoryState.SCORED:
                        group.unscored += 1
                    if entry.state in (TrajectoryState.FINISHED, TrajectoryState.SCORED):
                        self._unfinished(group)
                    self._end_when_free(entry, DeferredAction.RESTART, out)
            self.lag.place(group, group.oldest_of_members())
