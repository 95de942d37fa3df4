"""Manages the states of trajectories and groups.

A trajectory is pending -> running <-> partial -> finished -> scored -> batched, or it is dropped.
An episode is first `waiting` for its environment, and waits again after each turn.

Invariants
- The members of a group leave the scheduler together: in one batch when all are scored, or by a
  `Drop` of every member with the same reason.
- `Drop`, `Restart` and `Score` are emitted only when no engine generates for the trajectory and no
  scorer scores it. If a trajectory is to be dropped or restarted before, its `deferred_action` is
  set, and the action is emitted when its request or scoring has ended.
- After every change no open group is too old for the next batch, except with `on_stale: mask`.
- `open_groups` counts groups that were started and are neither batched nor dropped.
  `finished_groups` counts the open groups whose members all have a complete response, scored or
  not. `open_episodes` counts trajectories whose environment was started and that were neither ended
  nor dropped nor restarted since.
- Members of started groups that have not been started themselves wait in `starts`. For episodes
  this is a separate queue, because starting an environment needs no free request; otherwise it is
  the work queue.
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
# Names for members of the enum. Looking them up once saves time, because a step boundary changes
# the states of thousands of trajectories.
_PENDING, _RUNNING, _PARTIAL, _WAITING = (
    TrajectoryState.PENDING,
    TrajectoryState.RUNNING,
    TrajectoryState.PARTIAL,
    TrajectoryState.WAITING,
)


class Lifecycle:
    """Owns every trajectory that is neither batched nor dropped.

    Methods that cause actions append them to their argument `out`.
    """

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
        """Whether no group waits to be started and all members of every started group are
        scored."""
        return not self.fresh and self.open_groups == self.ready.count

    def count(self, state: TrajectoryState) -> int:
        """Return the number of trajectories that are in `state`."""
        return sum(entry.state is state for entry in self._trajectories.values())

    # ------------------------------------------------------------ new and recovered groups

    def add_group(self, spec: ev.GroupSpec) -> GroupEntry:
        """Create the entries of a new group and its trajectories; return the group.

        Raises:
            ValueError: If one of the trajectories exists already.
        """
        group = new_group(spec)
        for entry in group.members:
            if entry.trajectory_id in self._trajectories:
                raise ValueError(f"trajectory {entry.trajectory_id} exists already")
            self._trajectories[entry.trajectory_id] = entry
        return group

    def add_fresh(self, group: GroupEntry) -> None:
        """Add a group that is not started yet to the queue `fresh`, which is sorted by priority
        (highest first) and then by arrival."""
        insort(self.fresh, group, key=lambda other: -other.spec.priority)

    def start_group(self) -> None:
        """Start the next group of the queue `fresh`: add its members to the queue `starts`."""
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
        """Create all groups that a resumed run found in its store, each member in the state that it
        has there.

        `version` is the policy number that the engines serve at the start of the session.
        """
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
        self.lag.record(group, group.oldest_of_members())
        dropped = [pair for pair in found if pair[1].state is TrajectoryState.DROPPED]
        for entry, _ in dropped:
            group.members.remove(entry)
            del self._trajectories[entry.trajectory_id]
        if dropped:
            self._drop_group(group, dropped[0][1].drop_reason or DropReason.FILTERED, out)
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
        """Record that trajectory `entry`, popped from the work queue, runs on `engine`.

        `version` is the policy number that the engine serves.
        """
        entry.state = _RUNNING
        if entry.oldest is None:
            entry.oldest = version
            oldest = entry.group.oldest
            self.lag.record(entry.group, version if oldest is None else min(oldest, version))
        self._fleet.occupy(entry, engine)

    def tokens_arrived(self, event: ev.TokensArrived, out: Actions) -> None:
        """Count new tokens of a trajectory. The policy number of its first token replaces the
        number that was assumed at its submission."""
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
        # The trajectory is pending although it has tokens now: its engine was lost before this
        # report. With tokens it is a partial trajectory, so queue it as one.
        if first and entry.state is _PENDING:
            self._queue(entry)

    def _oldest_known(self, entry: TrajectoryEntry, version: int, out: Actions) -> None:
        """Set the policy number of the oldest token of `entry` to `version`. At the submission of
        `entry`, the version of the engine was assumed."""
        if entry.oldest == version:
            return
        entry.oldest = version
        group = entry.group
        if group.drop_reason is None:
            self.lag.record(group, group.oldest_of_members())
            if version < self.lag.floor:
                self.resolve_stale(out)

    def finished(self, event: ev.Finished, out: Actions) -> bool:
        """Record that the response of a trajectory is complete, and request its score.

        Returns:
            Whether this is news: the trajectory exists and was not finished or scored already.
        """
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
        """Mark `entry` finished. If it is the last unfinished member of its group, count the group
        in `finished_groups`."""
        entry.state = TrajectoryState.FINISHED
        entry.group.unfinished -= 1
        if not entry.group.unfinished:
            self.finished_groups += 1

    def _unfinished(self, group: GroupEntry) -> None:
        """Count one finished member of `group` as unfinished again, because it restarts. If all
        members were finished, no longer count the group in `finished_groups`."""
        if not group.unfinished:
            self.finished_groups -= 1
        group.unfinished += 1

    def aborted(self, request: tuple[int, ...], out: Actions) -> None:
        """Record that a request ended before its response was complete, and count its last tokens.

        `request` is the trajectory id, followed by a token count and a policy number for each span
        of tokens (as in `ManyAborted`).
        """
        entry = self._trajectories.get(request[0])
        if entry is None:
            return
        for i in range(1, len(request), 2):
            self._count(entry, request[i], request[i + 1], out)
        if entry.state is _RUNNING:
            self._fleet.release(entry)
            self.ended_early(entry, out)

    def refused(self, event: ev.Refused, out: Actions) -> None:
        """Drop the group of a trajectory whose running request was refused: the engines rejected it
        as invalid, or requests or engines have failed on it repeatedly.

        The request is not repeated, because it would fail again.
        """
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
        """Handle the end of an incomplete request of trajectory `entry`: queue the trajectory
        again, or carry out its deferred drop or restart."""
        if entry.deferred_action is not None:
            self._end(entry, out)
            return
        if not entry.tokens:
            was_oldest = entry.oldest == entry.group.oldest
            entry.oldest = None
            if was_oldest:
                self.lag.record(entry.group, entry.group.oldest_of_members())
        self._queue(entry)

    def _queue(self, entry: TrajectoryEntry) -> None:
        if entry.tokens or entry.begun:
            entry.state = _PARTIAL
            self.work.push(entry)
        else:
            entry.state = _PENDING
            self.starts.push(entry)

    def abort_all(self, out: Actions) -> None:
        """Abort every running request."""
        for engine in self._fleet.engines.values():
            for entry in engine.running.values():
                self._abort(entry, engine, out)

    def _abort(self, entry: TrajectoryEntry, engine: EngineEntry, out: Actions) -> None:
        if not entry.abort_sent:
            entry.abort_sent = True
            out.append(ev.Abort(entry.trajectory_id, engine.engine_id))

    # ------------------------------------------------------------ episodes

    def begin_episodes(self, entries: Sequence[TrajectoryEntry], out: Actions) -> None:
        """Start the environments of these episodes, which the caller has popped from the queue
        `starts`."""
        for entry in entries:
            self._begin(entry)
            entry.state = _WAITING
            out.append(ev.StartEpisode(entry.trajectory_id))

    def _begin(self, entry: TrajectoryEntry) -> None:
        entry.begun = True
        self.open_episodes += 1

    def _close(self, entry: TrajectoryEntry) -> None:
        """If trajectory `entry` is an open episode, close it and decrease `open_episodes`."""
        if entry.begun:
            self.open_episodes -= 1
            entry.begun = False

    def turn_ended(self, event: ev.TurnEnded, out: Actions) -> bool:
        """Record that the policy's response of a turn is complete, and send it to the environment.

        Returns:
            Whether this is news: the trajectory exists and was running or partial.
        """
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
        """Queue the next turn of an episode, whose input the environment has returned."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is not None and entry.state is _WAITING:
            entry.extra_context_tokens = event.context - entry.tokens
            self._queue(entry)

    def episode_ended(self, event: ev.EpisodeEnded, out: Actions) -> None:
        """Record that an episode has ended, and request its score."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is not None and entry.state is _WAITING:
            self._close(entry)
            self._finished(entry)
            out.append(ev.Score(entry.trajectory_id))

    def environment_failed(self, event: ev.EnvironmentFailed, out: Actions) -> None:
        """Restart an episode whose environment failed, if the event asks for that and
        `max_regenerations` allows it; otherwise drop its group."""
        entry = self._trajectories.get(event.trajectory_id)
        if entry is None or entry.state is not _WAITING:
            return
        if event.again and entry.regenerations < self._config.max_regenerations:
            self._regenerate(entry, out)
        else:
            self._drop_group(entry.group, DropReason.ENVIRONMENT, out)

    # ------------------------------------------------------------ scored and batched

    def scored(self, event: ev.RewardReady, out: Actions) -> None:
        """Record the reward of a finished trajectory, or the failure of its scorer.

        After a failure the trajectory restarts if the event asks for that and `max_regenerations`
        allows it. Otherwise its group is dropped.
        """
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
            # `_drop_group` waits for the scoring of members in the state FINISHED. The scoring of
            # this one has ended, so give it another state.
            entry.state = TrajectoryState.SCORED
            self._drop_group(entry.group, DropReason.SCORER, out)

    def _regenerate(self, entry: TrajectoryEntry, out: Actions) -> None:
        """Restart only trajectory `entry` from its prompt, after a failure of its scorer or
        environment. The other members of its group keep their responses, and the group waits for
        it."""
        entry.regenerations += 1
        self.counts.regenerated += 1
        entry.deferred_action = DeferredAction.RESTART
        self.lag.record(entry.group, entry.group.oldest_of_members())
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
        """Drop the oldest complete group, because complete groups exceed `max_waiting_batches`."""
        self._drop_group(self.ready.pop(), DropReason.OVERFLOW, out)

    def emit_batch(self, size: int, out: Actions) -> bool:
        """Emit the oldest `size` complete groups as the next batch. Then drop or restart groups
        that are too old for the batch after it.

        With `on_stale: mask`, groups whose tokens are all too old to be trained are dropped first.

        Returns:
            False if fewer than `size` groups are left after that; no batch is emitted then.
        """
        groups: list[GroupEntry] = []
        masks = self._config.on_stale == "mask"
        step, floor = self.lag.next_step, self.lag.floor
        while self.ready.count and len(groups) < size:
            group = self.ready.pop()
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

    # ------------------------------------------------------------ drops and restarts

    def _drop_group(self, group: GroupEntry, reason: DropReason, out: Actions) -> None:
        """Drop all members of `group`, each as soon as its running request or scoring has ended."""
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
        """Carry out the drop or restart that is deferred for trajectory `entry`. No engine
        generates for it and no scorer scores it at this moment."""
        waits_in = self.work if entry.tokens or entry.begun else self.starts
        self._close(entry)
        if entry.deferred_action is DeferredAction.RESTART:
            self.counts.restart(entry)
            entry.reset()
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
        """Handle groups that are too old for the next batch.

        With `on_stale: restart`, members with too old tokens restart. With `mask`, nothing happens
        here, because too old tokens are masked when a batch is emitted. Otherwise the groups are
        dropped. With `wait`, only groups that no waiting could save get here
        (`LagLedger.may_emit`).
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
            self.lag.record(group, group.oldest_of_members())
