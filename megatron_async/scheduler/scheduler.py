"""Provides the scheduler: it receives events and returns actions, without clock, I/O or randomness.

Invariants, for all settings
- At most N' (`schedule.concurrency`) requests are in flight; an aborted request counts until it has
  ended. A request is submitted whenever fewer are in flight, a trajectory may run, an engine with
  the current version may run one more request, and no rule below forbids it.
- Partial trajectories are submitted first, then the remaining members of started groups, then new
  groups.
- For episodes, environments are started in the same order, up to `open_episodes`. While an
  environment starts or replies, its episode uses none of the N' requests.
- With `boundary: drain` and `overlap: false`, a complete batch is emitted only when no request is
  in flight and no episode is open. Until then no episode starts, and only requests for the next
  turns of open episodes are submitted.
- No new group starts while finished groups that wait for scores, for a batch or for the trainer
  fill `max_waiting_batches`. Only the start of groups is limited: members of started groups and
  partial trajectories may always be submitted while requests are free, since a batch may be waiting
  for them.
- Back-pressure never stops a run, because the finished groups that cause it are enough for at
  least one batch (`max_waiting_batches` >= 1). So they need no new group to make progress: after
  their scores, they are dropped, or batched and taken by the trainer. Then new groups may start.
- In four more cases nothing is submitted: to an engine with another version; between the request
  and the publication of a weight update; with `overlap: false`, from the emission of a batch until
  the version that is trained on it is published; and while the lag bound would reject tokens of the
  current version.
- A group is batched once, when it is complete, or dropped as a whole: if one member is dropped, the
  others are dropped for the same reason (`lifecycle.py`).
- With a lag bound k, only tokens of version max(0, n - k) or newer are trained in batch n
  (`lag.py`).
- The same events cause the same actions. An event about a trajectory that no longer exists or does
  not run changes nothing; such late reports arrive after an engine was lost.

`lifecycle` manages trajectories and groups, `queues` the order of submissions and batches,
`balance` the engines, `lag` the staleness bound, `update_gate` the weight update, and `warnings`
warnings. This module calls them after each event, and decides how many groups may start.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import auto_concurrency, warnings
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.balance import ServingEngines
from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.lifecycle import Actions, Lifecycle
from megatron_async.scheduler.state import TrajectoryEntry
from megatron_async.scheduler.update_gate import UpdateGate
from megatron_async.trajectory.types import PolicyVersion, TrajectoryState

_PREFETCHED_BATCHES = 1
"""Number of emitted batches that may wait for the trainer. Further groups stay complete but
unbatched, so that a batch is chosen as late as possible."""


class Scheduler:
    """State machine that implements all schedules. `step` handles one event and returns the actions
    to carry out; `view` returns counts of the current state."""

    def __init__(self, config: ScheduleConfig, *, first_step: int, version: PolicyVersion) -> None:
        """Create a scheduler without engines and groups.

        Args:
            config: The schedule.
            first_step: Number of the first batch to emit.
            version: Policy version that engines serve at the start of the session.
        """
        self.config = config
        self._version = version
        self._fleet = ServingEngines()
        self._life = Lifecycle(config, self._fleet, first_step)
        self._gate = UpdateGate(config)
        self._untaken: list[int] = []
        self._prompts_requested = False
        self._exhausted = False
        self._draining = False
        self._auto: auto_concurrency.AutoConcurrency | None = None
        if config.concurrency == "auto":
            self._auto = auto_concurrency.start(
                config.groups_per_batch, config.group_size, config.expected_tokens or 1
            )
        self._warnings = warnings.SchedulerWarnings(config)

    def step(self, event: ev.Event) -> list[ev.Action]:
        """Handle one event; return the actions to carry out now, in this order."""
        actions: Actions = []
        kind = type(event)
        _HANDLERS[kind](self, event, actions)
        if kind in _ENDS:
            self._advance_unless_waiting(actions)
        return actions

    @property
    def concurrency(self) -> int:
        """Largest number of requests that may be in flight now (N')."""
        if self._auto is not None:
            return self._auto.limit
        assert isinstance(self.config.concurrency, int)
        return self.config.concurrency

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: the task has no more prompts, every group is batched or
        dropped, and the trainer has taken every batch.

        Complete groups that are too few for a last batch (fewer than `updates_per_batch`) may be
        left over.
        """
        left_over = self._life.ready.count < self.config.updates_per_batch
        return self._exhausted and self._life.none_unfinished and left_over and not self._untaken

    @property
    def complete_groups(self) -> int:
        """Number of groups that have all their scores and wait for a batch."""
        return self._life.ready.count

    @property
    def waits_for_trainer(self) -> bool:
        """Whether requests could run that only the trainer's progress permits.

        Three conditions hold: a request is free, or for episodes an environment; no weight update
        is under way; and a batch is emitted whose version is not published yet. Until then, nothing
        is submitted without `overlap`. With `overlap`, the staleness bound or complete groups that
        fill `max_waiting_batches` prevent the start of new groups.
        """
        life = self._life
        if self._version.number >= life.lag.next_step or self._gate.closed:
            return False
        if self.config.open_episodes is not None:
            free = self._open_limit - life.open_episodes
        else:
            free = self._free_slots()
        if free <= 0 or not self.config.overlap:
            return free > 0
        limit = self._open_groups_in_bound()
        if limit is not None and life.open_groups >= limit:
            return True
        return self._backpressure_cause() is warnings.Cause.TRAINER

    def view(self) -> SchedulerView:
        """Return the counts that metrics show. The cost is linear in the number of trajectories."""
        life, counts = self._life, self._life.counts
        return SchedulerView(
            version=self._version,
            next_step=life.lag.next_step,
            concurrency=self.concurrency,
            in_flight=self._fleet.in_flight,
            buffered_partial=life.count(TrajectoryState.PARTIAL),
            unscored=life.count(TrajectoryState.FINISHED),
            open_groups=life.open_groups,
            finished_groups=life.finished_groups,
            complete_groups=self.complete_groups,
            dropped=dict(counts.dropped),
            restarted=counts.restarted,
            regenerated=counts.regenerated,
            wasted_tokens=counts.wasted_tokens,
            filtered_tokens=counts.filtered_tokens,
            open_episodes=life.open_episodes,
            waiting=life.count(TrajectoryState.WAITING),
        )

    # ------------------------------------------------------------ events about trajectories

    def _finished(self, event: ev.Finished, out: Actions) -> None:
        in_flight = self._fleet.in_flight
        self._completed(self._life.finished(event, out), in_flight)

    def _turn_ended(self, event: ev.TurnEnded, out: Actions) -> None:
        in_flight = self._fleet.in_flight
        self._completed(self._life.turn_ended(event, out), in_flight)

    def _completed(self, news: bool, in_flight: int) -> None:
        if news and self._auto is not None:
            self._auto = auto_concurrency.completed(self._auto, in_flight)

    def _many_aborted(self, event: ev.ManyAborted, out: Actions) -> None:
        fleet, aborted, waits = self._fleet, self._life.aborted, self._awaits_version
        for request in event.requests:
            aborted(request, out)
            # Same condition as in `_advance_unless_waiting`, repeated here because thousands of
            # requests end at once: `waits` can only change in `_advance`, so it is computed only
            # after that.
            if not (fleet.in_flight and waits):
                self._advance(out)
                waits = self._awaits_version

    def _prompts_available(self, event: ev.PromptsAvailable, out: Actions) -> None:
        self._prompts_requested = False
        self._exhausted = not event.groups
        for spec in event.groups:
            self._life.add_fresh(self._life.add_group(spec))
        self._advance(out)

    def _recovered(self, event: ev.Recovered | ev.RecoveredEpisodes, out: Actions) -> None:
        self._life.recovered(event, self._version.number, out)
        self._advance(out)

    # ------------------------------------------------------------ engines and weights

    def _engine_up(self, event: ev.EngineUp, out: Actions) -> None:
        self._engines_up(ev.EnginesUp((event,)), out)

    def _engines_up(self, event: ev.EnginesUp, out: Actions) -> None:
        for engine in event.engines:
            self._lose_engine(engine.engine_id, out)
            self._fleet.add(engine)
        self._fleet_changed(out)

    def _engine_down(self, event: ev.EngineDown, out: Actions) -> None:
        self._lose_engine(event.engine_id, out)
        self._fleet_changed(out)

    def _lose_engine(self, engine_id: str, out: Actions) -> None:
        self._warnings.engine_lost(engine_id)
        for entry in self._fleet.remove(engine_id):
            self._life.ended_early(entry, out)

    def _fleet_changed(self, out: Actions) -> None:
        if self._auto is not None:
            self._auto = auto_concurrency.capped(
                self._auto, self._fleet.request_limit(), self._fleet.kv_capacity()
            )
        self._advance(out)

    def _engine_load(self, event: ev.EngineLoad, out: Actions) -> None:
        engine = self._fleet.engines.get(event.engine_id)
        if engine is None:
            return
        out.extend(self._warnings.load(event, len(engine.running), self._fleet.in_flight))
        if self._auto is not None:
            self._auto = auto_concurrency.loaded(self._auto, event.kv_usage, event.preemptions)
            self._advance(out)

    def _update_requested(self, event: ev.UpdateRequested, out: Actions) -> None:
        self._gate.request(event.number)
        if self.config.boundary == "abort":
            self._life.abort_all(out)
        self._advance(out)

    def _weights_published(self, event: ev.WeightsPublished, out: Actions) -> None:
        self._version = event.version
        self._fleet.published(event.version)
        self._untaken = [step for step in self._untaken if step >= event.version.number]
        out.extend(self._gate.published())
        self._advance(out)
        out.extend(self._warnings.published(event.version.number, bool(self._untaken)))

    # ------------------------------------------------------------ batches

    def _batch_taken(self, event: ev.BatchTaken, out: Actions) -> None:
        self._untaken = [step for step in self._untaken if step != event.step]
        unscored = self._life.count(TrajectoryState.FINISHED)
        out.extend(self._warnings.taken(event.step, unscored))
        if self._auto is not None:
            tokens = self._life.counts.batched_tokens
            self._auto = auto_concurrency.taken(self._auto, event.at_seconds, tokens)
        self._advance(out)

    def _advance(self, out: Actions) -> None:
        """Do everything that is possible now: emit batches, drop complete groups beyond
        `max_waiting_batches`, allow a weight update, and submit trajectories."""
        self._emit_batches(out)
        self._shed_overflow(out)
        out.extend(self._gate.ready(self._fleet.in_flight))
        self._fill(out)

    def _advance_unless_waiting(self, out: Actions) -> None:
        """Call `_advance` after a request or a scoring has ended, unless `_advance` could do
        nothing.

        With `overlap: false`, from the emission of a batch until the version that is trained on it
        is published, nothing is emitted or submitted, and the weight update waits for the last
        running request or was allowed when it was requested. So `_advance` could do nothing as long
        as requests run. Leaving it out saves time at a step boundary, where thousands of requests
        end one after the other.
        """
        if not (self._fleet.in_flight and self._awaits_version):
            self._advance(out)

    @property
    def _awaits_version(self) -> bool:
        return not self.config.overlap and self._version.number < self._life.lag.next_step

    def _trainer_ready(self) -> bool:
        if self.config.overlap:
            return len(self._untaken) < _PREFETCHED_BATCHES
        return not self._awaits_version and not self._gate.closed

    def _batch_size(self) -> int:
        """Return the number of groups of the next batch, or 0 if too few groups are complete.

        If the task has no more prompts and no other group is unfinished, the complete groups are a
        last, smaller batch. Each of its `updates_per_batch` minibatches needs a group, so with
        fewer groups the result is 0.
        """
        complete = self._life.ready.count
        if complete >= self.config.groups_per_batch:
            return self.config.groups_per_batch
        ended = self._exhausted and self._life.none_unfinished
        return complete if ended and complete >= self.config.updates_per_batch else 0

    def _emit_batches(self, out: Actions) -> None:
        self._draining = False
        while self._trainer_ready():
            size = self._batch_size()
            if not size or (
                self.config.on_stale == "wait"
                and not self._life.lag.may_emit(self._life.ready.up_to)
            ):
                return
            drains = self.config.boundary == "drain" and not self.config.overlap
            if drains and (self._fleet.in_flight or self._life.open_episodes):
                self._draining = True
                return
            step = self._life.lag.next_step
            if not self._life.emit_batch(size, out):
                continue
            self._untaken.append(step)
            out.extend(self._gate.batch_emitted())
            if self.config.boundary == "abort" and not self.config.overlap:
                self._life.abort_all(out)

    def _shed_overflow(self, out: Actions) -> None:
        """With `overflow: drop_oldest`, drop the oldest complete groups as long as those that
        remain fill more than `max_waiting_batches` batches, including batches that wait for the
        trainer."""
        if self.config.overflow != "drop_oldest":
            return
        free = max(0, self.config.max_waiting_batches - len(self._untaken))
        while self._life.ready.count >= (free + 1) * self.config.groups_per_batch:
            self._warnings.new_groups(warnings.Cause.TRAINER)
            self._life.drop_oldest_ready(out)

    # ------------------------------------------------------------ submitting

    def _fill(self, out: Actions) -> None:
        """Submit trajectories until the largest allowed number of requests is in flight: first
        partial trajectories, then members of started groups, then members of new groups. If there
        are too few trajectories, request prompts."""
        born_stale = self._version.number < self._life.lag.floor
        if self._awaits_version or born_stale or self._gate.closed:
            return
        if self.config.open_episodes is not None:
            self._fill_episodes(out)
            return
        if self._draining:
            return
        free, work = self._free_slots(), self._life.work
        while free:
            entries = work.pop(free)
            if entries:
                self._submit(entries, out)
                free -= len(entries)
            elif not self._start_group():
                self._request_prompts(free, out)
                return

    def _fill_episodes(self, out: Actions) -> None:
        """Submit turns whose input is known. Then start environments of further episodes, also of
        new groups, unless `boundary: drain` waits for open episodes to end."""
        entries = self._life.work.pop(self._free_slots())
        if entries:
            self._submit(entries, out)
        room = 0 if self._draining else self._open_limit - self._life.open_episodes
        while room > 0:
            entries = self._life.starts.pop(room)
            if entries:
                self._life.begin_episodes(entries, out)
                room -= len(entries)
            elif not self._start_group():
                self._request_prompts(room, out)
                return

    @property
    def _open_limit(self) -> int:
        """Largest number of episodes that may be open at once."""
        given = self.config.open_episodes
        limit = given if isinstance(given, int) else 2 * self.concurrency
        return max(self.config.group_size, limit)

    def _free_slots(self) -> int:
        """Return how many requests may be submitted now. Two limits apply: the largest allowed
        number of requests in flight (`concurrency`), and the engines' own limits."""
        free = self.concurrency - self._fleet.in_flight
        if free <= 0:
            return 0
        room = self._fleet.free_requests(self._version)
        return free if room is None else min(free, room)

    def _submit(self, entries: Sequence[TrajectoryEntry], out: Actions) -> None:
        """Submit trajectories that were popped from the work queue. The caller has checked with
        `_free_slots` that so many requests may be submitted."""
        placement = self._fleet.placement(self._version, self.concurrency)
        choose, submitted, number = placement.choose, self._life.submitted, self._version.number
        for entry in entries:
            engine = choose(entry)
            submitted(entry, engine, number)
            out.append(ev.Submit(entry.trajectory_id, engine.engine_id, entry.tokens > 0))

    def _start_group(self) -> bool:
        """Start the next new group, if one is queued and another group may start; return whether
        one started."""
        if not self._life.fresh or self._groups_allowed() == 0:
            return False
        self._life.start_group()
        return True

    def _request_prompts(self, free: int, out: Actions) -> None:
        """Request prompts for so many groups that their members use `free` requests (or `free`
        environments, if the task has episodes), but not for more groups than may be started now.

        Nothing is requested while an earlier request for prompts has no reply, while new groups
        wait to be started, or after the task has run out of prompts.
        """
        if self._prompts_requested or self._exhausted or self._life.fresh:
            return
        wanted = -(-free // self.config.group_size)
        allowed = self._groups_allowed()
        if allowed is not None:
            wanted = min(wanted, allowed)
        if wanted:
            self._prompts_requested = True
            out.append(ev.RequestPrompts(wanted))

    def _groups_allowed(self) -> int | None:
        """Return how many groups may be started now; None if only free requests limit them.

        - Lag bound k (`max_async_level`): open groups, which are started and neither batched nor
          dropped, are at most as many as (version + k + 1 - next_step) batches contain, plus the
          surplus of `oversample` for one batch. AReaL and PRIME-RL have the same capacity rule.
        - `refill: batch`: open groups are at most as many as one batch contains, with the surplus
          of `oversample`.
        - Back-pressure: no group may start while finished groups fill `max_waiting_batches` batches
          (`_backpressure_cause`).
        """
        config, life = self.config, self._life
        cause = self._backpressure_cause()
        self._warnings.new_groups(cause)
        if cause is not None:
            return 0
        in_bound = self._open_groups_in_bound()
        limits = [] if in_bound is None else [in_bound]
        if config.refill == "batch":
            limits.append(math.ceil(config.groups_per_batch * config.oversample))
        return max(0, min(limits) - life.open_groups) if limits else None

    def _open_groups_in_bound(self) -> int | None:
        """Return how many groups the staleness bound permits to be open; None without a bound."""
        config, batch = self.config, self.config.groups_per_batch
        if config.max_async_level is None:
            return None
        batches = self._version.number + config.max_async_level + 1 - self._life.lag.next_step
        oversampled = math.ceil(batch * config.oversample)
        return (batches - 1) * batch + oversampled if batches > 0 else 0

    def _backpressure_cause(self) -> warnings.Cause | None:
        """Return why finished groups fill `max_waiting_batches`, so that no new group may start:
        because of slow scoring or slow training. Return None if they do not fill it.

        With `overflow: drop_oldest` only groups that wait for scores count, because complete groups
        beyond the limit are dropped.
        """
        config, ready = self.config, self._life.ready.count
        limit = config.max_waiting_batches * config.groups_per_batch
        unscored = self._life.finished_groups - ready
        complete = len(self._untaken) * config.groups_per_batch + ready
        if config.overflow == "drop_oldest":
            complete = 0
        if unscored + complete < limit:
            return None
        return warnings.Cause.TRAINER if complete >= limit else warnings.Cause.SCORES


_HANDLERS: dict[type, Callable[[Scheduler, Any, Actions], None]] = {
    ev.TokensArrived: lambda self, event, out: self._life.tokens_arrived(event, out),
    ev.LeftQueue: lambda *_: None,
    ev.Finished: Scheduler._finished,
    ev.TurnEnded: Scheduler._turn_ended,
    ev.EnvironmentReady: lambda self, event, out: self._life.environment_ready(event),
    ev.EpisodeEnded: lambda self, event, out: self._life.episode_ended(event, out),
    ev.EnvironmentFailed: lambda self, event, out: self._life.environment_failed(event, out),
    ev.Aborted: lambda self, event, out: self._life.aborted((event.trajectory_id,), out),
    ev.Refused: lambda self, event, out: self._life.refused(event, out),
    ev.ManyAborted: Scheduler._many_aborted,
    ev.RewardReady: lambda self, event, out: self._life.scored(event, out),
    ev.PromptsAvailable: Scheduler._prompts_available,
    ev.Recovered: Scheduler._recovered,
    ev.RecoveredEpisodes: Scheduler._recovered,
    ev.EngineUp: Scheduler._engine_up,
    ev.EnginesUp: Scheduler._engines_up,
    ev.EngineDown: Scheduler._engine_down,
    ev.EngineLoad: Scheduler._engine_load,
    ev.BatchTaken: Scheduler._batch_taken,
    ev.UpdateRequested: Scheduler._update_requested,
    ev.WeightsPublished: Scheduler._weights_published,
}
_ENDS = frozenset(
    {
        ev.Finished,
        ev.TurnEnded,
        ev.EnvironmentReady,
        ev.EpisodeEnded,
        ev.EnvironmentFailed,
        ev.Aborted,
        ev.Refused,
        ev.RewardReady,
    }
)
"""Events after which `step` calls `_advance_unless_waiting`. The handlers of other events call
`_advance` themselves if it could do something."""
