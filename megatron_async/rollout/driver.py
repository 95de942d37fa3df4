"""Provides the asyncio driver, which runs the scheduler against engines, scorers, prompts and the
store.

Invariants
- Every event reaches the scheduler through `_feed`, one event at a time, on the event loop, and the
  driver carries out the resulting actions in order. Nothing else changes the scheduler. Requests
  that end before their response is complete (`Aborted`) in one iteration of the event loop are
  collected and reported as one event. Only `TokensArrived` and `LeftQueue` events, which belong to
  requests that still run, may be passed on before it.
- The scheduler's actions that pause engines, allow an update and resume engines are carried out one
  after the other, never concurrently.
- A stale engine (a new or restarted engine, or one that missed an update) serves no requests. The
  scheduler gets its `EngineUp` only when it has loaded the current version.
- The driver calls `generation`, `admission` and `monitor`. They report back only by events and by
  the engines that they take out of service.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineClient, EngineError
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.rollout.admission import Admission
from megatron_async.rollout.background import BackgroundTasks
from megatron_async.rollout.episodes import Episodes
from megatron_async.rollout.generation import Generation
from megatron_async.rollout.monitor import EngineMonitor
from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.rollout.scoring import Scoring, reward_means
from megatron_async.rollout.statistics import statistics_of
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.runtime.time_limits import AwakeClock
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scoring.interface import Scorers
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import DropReason, PolicyVersion

# Maximum number of prompts that are turned into groups at once. A run needs hundreds of groups at
# its start; in smaller portions they do not block the event loop.
_GROUPS_AT_A_TIME = 16


class RolloutDriver:
    """Driver of one training session's rollouts; owns the scheduler, the store and the state of
    each engine.

    Attributes:
        background: Background tasks of the driver and its first failure.
        lost_engines: Queue of (engine id, reason) of engines that were taken out of service.
        statistics: Counters and warnings of the rollout side.
        sampling: Task in which engines sample tokens for a verification that the trainer has not
            completed yet; None if there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        scheduler: Scheduler,
        store: TrajectoryStore,
        prompts: TaskPrompts,
        scorers: Scorers,
        version: PolicyVersion,
        stop_token_ids: Sequence[int] = (),
        vocabulary: int | None = None,
        recorder: Recorder | None = None,
        environments: EnvironmentWorkers | None = None,
    ) -> None:
        """Create a driver that has not started yet; `start` starts its work.

        Args:
            version: Policy version with which the session starts.
            stop_token_ids: Tokens that end a response.
            vocabulary: Number of tokens in the model's vocabulary; None if it is unknown.
            recorder: Recorder of the scheduler's events; None to record none.
            environments: Workers that run the environments; None if trajectories are not episodes.
        """
        self._config = config
        self._scheduler = scheduler
        self._store = store
        self._scorers = scorers
        self._version = version
        self._recorder = recorder
        self._clock = AwakeClock()
        self._tracked_engines: dict[str, TrackedEngine] = {}
        self._aborted: list[tuple[int]] = []
        self._control: asyncio.Queue[ev.Action] = asyncio.Queue()
        self._batches: asyncio.Queue[TokenBatch] = asyncio.Queue()
        self._update_allowed: dict[int, asyncio.Event] = {}
        self._stale = asyncio.Event()
        self._need_engines: set[asyncio.Task[Any]] = set()
        self.sampling: asyncio.Task[Any] | None = None
        self._closed = False
        self._quiesced = False
        self.background = BackgroundTasks(self.describe)
        # Maximum number of tokens of prompt and response that an engine accepts; 0 if unknown.
        self._longest = 0
        self.lost_engines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.statistics = statistics_of(config.schedule, version.number, store.batch_sizes())
        self._admission = Admission(
            config, store, prompts, self.statistics, self.background.fail, vocabulary
        )
        self._monitor = EngineMonitor(
            config.engines, self._tracked_engines, self.statistics, self._feed, self.engine_failed
        )
        self._generation = Generation(
            config,
            store,
            self.statistics,
            stop_token_ids,
            self._admission,
            self._monitor,
            self.background,
            self._feed,
        )
        self._scoring = Scoring(
            store, prompts, scorers, self.statistics, config.scorers.of_groups, self._reward_ready
        )
        to_scheduler = (self.background, self._feed, self._max_sequence_tokens)
        self._episodes = Episodes(config, store, environments, self.statistics, *to_scheduler)

    # ------------------------------------------------------------ start and close

    def start(self) -> None:
        """Start the driver's background tasks, and pass to the scheduler the stored groups on which
        the current weights were not trained."""
        for work in (self._control_loop(), self._clock.run(), self._watch_engines()):
            self.background.spawn(work)
        recovered = self._admission.recovered(self._generation.end_if_complete)
        if recovered:
            self._episodes.recovered(recovered)
            self._feed(self._admission.event_of(recovered))

    async def close(self, *, leave: bool = False) -> None:
        """Cancel all requests and background tasks of this driver, then flush and close the store.

        Engine processes keep running. Tokens that have arrived are kept.

        Args:
            leave: Whether the run may continue on another node; see `TrajectoryStore.close`.
        """
        self._closed = True
        self.background.close()
        # Set before requests are canceled, so that their ends cannot start new work.
        self._quiesced = True
        self._monitor.close()
        try:
            await self._generation.close()
        finally:
            await self.background.cancel()
            await self._store.close(leave=leave)

    # ------------------------------------------------------------ engines

    def add_engine(self, client: EngineClient) -> None:
        """Register an engine as stale: it serves no requests until it has loaded the current
        version."""
        self._tracked_engines[client.engine_id] = TrackedEngine(client, self._clock)
        self._stale.set()

    def engine_failed(self, engine_id: str, why: str) -> None:
        """Take an engine out of service and report it in `lost_engines`; ignore an engine that is
        not registered.

        The engine's trajectories are resumed on other engines from their last stored token.
        """
        if self._detach(engine_id, "engine_failed", why) is not None:
            self.lost_engines.put_nowait((engine_id, why))

    async def suspect(self, engine: EngineClient, why: str) -> None:
        """Check whether an engine on which something failed still replies, and take it out of
        service if not."""
        tracked = self._tracked_engines.get(engine.engine_id)
        if tracked is not None:
            await self._monitor.suspect(tracked, why)

    def engine_stale(self, engine_id: str, why: str) -> None:
        """Mark an engine that has loaded wrong weights as stale: it serves no requests until the
        weights have been sent to it again.

        The engine's trajectories are resumed on other engines from their last stored token.
        """
        if (tracked := self._detach(engine_id, "engine_stale", why)) is not None:
            self.add_engine(tracked.client)

    def _detach(self, engine_id: str, warning: str, why: str) -> TrackedEngine | None:
        if (tracked := self._tracked_engines.get(engine_id)) is None:
            return None
        self.statistics.warned(warning, why)
        self.statistics.engine_lost(engine_id)
        # The scheduler may submit further requests to this engine here. `detach_engine` then
        # removes these requests together with the running ones.
        self._step_aborted()
        self._generation.detach_engine(tracked, failed=warning == "engine_failed")
        del self._tracked_engines[engine_id]
        if tracked.up:
            self._feed(ev.EngineDown(engine_id))
        return tracked

    def stale_engines(self) -> list[EngineClient]:
        """Return the clients of all registered engines that have not loaded the current version."""
        return [tracked.client for tracked in self._tracked_engines.values() if not tracked.up]

    def engines(self) -> list[EngineClient]:
        """Return the clients of all registered engines."""
        return [tracked.client for tracked in self._tracked_engines.values()]

    def serving(self) -> list[EngineClient]:
        """Return the clients of engines that have loaded the current version and are not paused,
        updated or verified now."""
        return [s.client for s in self._tracked_engines.values() if s.up and not s.health.suspended]

    async def ask(
        self, engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Call `what` on all `engines` concurrently; take each engine whose call fails out of
        service."""

        async def one(engine: EngineClient) -> None:
            try:
                await what(engine)
            except EngineError as error:
                # After `close` the next driver may use the engine already, so its failure is not
                # reported.
                if not self._closed:
                    self.engine_failed(engine.engine_id, str(error))

        await asyncio.gather(*map(one, engines))

    async def _watch_engines(self) -> None:
        settings = self._config.engines
        while True:
            await asyncio.sleep(settings.health_interval_seconds)
            for tracked in await self._monitor.poll():
                self._generation.end_silent(tracked, settings.silence_seconds)

    # ------------------------------------------------------------ calls by the trainer

    async def next_batch(self, timeout: float) -> TokenBatch | TrainerTask:
        """Wait for the next batch and return it, or return the task that the trainer must do first.

        If `sampling` ends before a batch is ready, the trainer must verify the weights first. Until
        then stale engines do not end the wait, because some of them may be engines that have just
        received the current weights.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            ComponentFailure: The rollout side has failed, or no batch came in time.
        """
        sampling = self.sampling
        task = TrainerTask.SEND_WEIGHTS if sampling is None else TrainerTask.VERIFY
        if sampling is not None and sampling.done():
            return task
        interrupt = self._stale.wait() if sampling is None else _ended(sampling)
        batch = await self.background.wait_for(
            self._batches.get(), timeout, "a batch", other=interrupt
        )
        if not isinstance(batch, TokenBatch):
            return task
        self._feed(ev.BatchTaken(batch.step, time.monotonic()))
        return batch

    async def begin_update(self, version: PolicyVersion) -> list[EngineClient]:
        """Wait until the engines are ready for weights of `version`; return the clients of engines
        that must receive them.

        Depending on `schedule.weight_update` and `schedule.boundary`, engines are ready when no
        request runs or when they are paused (`scheduler/update_gate.py`). If no engine has loaded
        the current version, there is no wait. The wait has the same limit as the wait for a batch
        (`trainer.wait_for_batch_seconds`), because with `drain` it lasts until the longest running
        response is complete. If `version` is the current version already, only stale engines are
        returned.

        Raises:
            ComponentFailure: The rollout side has failed, or the engines are not ready in time.
        """
        timeout = self._config.trainer.wait_for_batch_seconds
        if version != self._version and any(
            tracked.up for tracked in self._tracked_engines.values()
        ):
            allowed = self._update_allowed.setdefault(version.number, asyncio.Event())
            self._feed(ev.UpdateRequested(version.number))
            await self.background.wait_for(allowed.wait(), timeout, f"engines to load {version}")
        if version != self._version:
            self.statistics.update_started()
        receivers = [
            s for s in self._tracked_engines.values() if version != self._version or not s.up
        ]
        for tracked in receivers:
            # Engines may not reply until they have received the weights.
            tracked.suspend()
        return [tracked.client for tracked in receivers]

    def sent(self, version: PolicyVersion, engine_ids: Sequence[str]) -> None:
        """Record that `version` was sent to engines, and hold back tokens made with it until
        `verified` is called."""
        for engine_id in engine_ids:
            if (tracked := self._tracked_engines.get(engine_id)) is not None:
                tracked.await_verification(version)

    def verified(self, engine_ids: Sequence[str]) -> None:
        """Accept tokens from these engines, because the version that was last sent to them is
        verified."""
        for engine_id in engine_ids:
            if (tracked := self._tracked_engines.get(engine_id)) is not None:
                tracked.accept()

    def abandon_verification(self) -> None:
        """Mark engines whose newest version is not verified as stale, because it will not be
        verified any more; their tokens of this version are discarded."""
        self.sampling = None
        for tracked in list(self._tracked_engines.values()):
            if tracked.unverified:
                self.engine_stale(tracked.engine_id, "its newest weights were not verified")

    def end_update(self, version: PolicyVersion, engine_ids: Sequence[str]) -> None:
        """Make `version` the current version and let the engines in `engine_ids`, which have loaded
        it, serve requests.

        Tokens that they make wait until `verified` is called, which may be before or after this
        call.
        """
        self.sent(version, engine_ids)
        self.statistics.update_ended()
        self._update_allowed.pop(version.number, None)
        is_new = version != self._version
        self._version = version
        newly_up = []
        max_running = self._config.engines.max_running_requests
        for engine_id, tracked in self._tracked_engines.items():
            tracked.release()
            if engine_id in engine_ids and not tracked.up:
                tracked.up = True
                capacity = tracked.client.kv_capacity_tokens
                newly_up.append(ev.EngineUp(engine_id, version, capacity, max_running))
        if is_new:
            self._feed(ev.WeightsPublished(version))
        if newly_up:
            self._feed(ev.EnginesUp(tuple(newly_up)))
        if not self.stale_engines():
            self._stale.clear()

    async def until_idle(self, timeout: float) -> None:
        """Wait until no request runs on any engine.

        Raises:
            ComponentFailure: The rollout side has failed, or a request still runs after `timeout`
                seconds.
        """
        idle = self._generation.until_idle()
        await self.background.wait_for(idle, timeout, "running requests to end")

    async def quiesce(self) -> None:
        """Start no more requests, and continue paused engines so that running requests can
        proceed."""
        self._quiesced = True
        for tracked in self._tracked_engines.values():
            tracked.release()
        await self.ask(self.engines(), lambda client: client.resume())

    async def end_generation(self) -> None:
        """Abort all running requests and wait until they have ended; the tokens they have made are
        kept.

        Call this after `quiesce`.
        """
        await self._generation.abort(self._generation.mark_for_abort())

    def drop_batch(self, step: int, reason: DropReason) -> None:
        """Drop the batch of training step `step` and its trajectories, which the trainer could not
        use."""
        count = self._store.drop_batch(step, reason)
        self.statistics.batch_dropped(step, reason, count)

    # ------------------------------------------------------------ events and actions

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.Aborted):
            if not self._aborted:
                self.background.spawn(self._feed_aborted())
            self._aborted.append((event.trajectory_id,))
            return
        # `TokensArrived` and `LeftQueue` events belong to requests that still run, so they need not
        # wait until the collected aborts are reported.
        if not isinstance(event, (ev.TokensArrived, ev.LeftQueue)):
            self._step_aborted()
        self._step(event)

    async def _feed_aborted(self) -> None:
        self._step_aborted()

    def _step_aborted(self) -> None:
        """Report all requests that ended in this iteration of the event loop before their response
        was complete (`Aborted`) to the scheduler as one event.

        Reporting them together saves work, because hundreds of requests are aborted at once when a
        batch is emitted.
        """
        if self._aborted:
            ended, self._aborted = self._aborted, []
            self._step(ev.ManyAborted(tuple(ended)) if len(ended) > 1 else ev.Aborted(*ended[0]))

    def _step(self, event: ev.Event) -> None:
        if self._recorder is None:
            actions = self._scheduler.step(event)
        else:
            actions = self._recorder.step(self._scheduler, event)
        self.statistics.trainer_awaited(self._scheduler.waits_for_trainer)
        if self._quiesced:
            return
        for action in actions:
            if not isinstance(action, ev.Abort):
                self._carry_out(action)
        to_abort = [action.trajectory_id for action in actions if isinstance(action, ev.Abort)]
        requests = self._generation.mark_for_abort(to_abort)
        if requests:
            self.background.spawn(self._generation.abort(requests))

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Submit():
                tracked = self._tracked_engines[action.engine_id]
                self._generation.submit(action.trajectory_id, tracked)
            case ev.Score():
                self.background.spawn(self._scoring.score(action.trajectory_id))
            case ev.RequestPrompts():
                self.background.spawn(self._fetch_prompts(action.count))
            case ev.EmitBatch():
                self._admission.batch_emitted()
                self.background.spawn(self._emit(action))
            case ev.StartEpisode():
                self._episodes.begin(action.trajectory_id)
            case ev.StepEnvironment():
                self._episodes.step(action.trajectory_id)
            case ev.Drop():
                self._episodes.forget(action.trajectory_id)
                self._store.drop(action.trajectory_id, action.reason)
                self.statistics.dropped(action.trajectory_id, action.reason)
                if action.reason is DropReason.FILTERED:
                    self._admission.filtered(self._scheduler.complete_groups)
                for waiting in self._scoring.dropped(action.trajectory_id):
                    asyncio.get_running_loop().call_soon(self._reward_ready, waiting, None)
            case ev.Restart():
                self._episodes.forget(action.trajectory_id)
                self._store.restart(action.trajectory_id)
            case ev.Warn():
                self.statistics.warned(action.name, action.message)
            case ev.PauseEngines() | ev.AllowUpdate() | ev.ResumeEngines():
                self._control.put_nowait(action)

    def need_engines(self, task: asyncio.Task[Any]) -> None:
        """Do not pause engines before `task`, which uses them, has ended.

        The trainer waits for such a task. Without this rule, `boundary: pause` could pause the
        engines until the trainer's next update, which would never come.
        """
        self._need_engines.add(task)
        task.add_done_callback(self._need_engines.discard)

    async def _control_loop(self) -> None:
        while True:
            await self._control_engines(await self._control.get())

    async def _control_engines(self, action: ev.Action) -> None:
        up = [tracked.client for tracked in self._tracked_engines.values() if tracked.up]
        match action:
            case ev.PauseEngines():
                while self._need_engines:
                    await asyncio.wait(self._need_engines)
                await self.ask(up, lambda engine: engine.pause(action.mode))
            case ev.ResumeEngines():
                await self.ask(up, lambda engine: engine.resume())
            case ev.AllowUpdate():
                self._update_allowed.setdefault(action.number, asyncio.Event()).set()

    # ------------------------------------------------------------ prompts, rewards, batches

    def _reward_ready(self, trajectory_id: int, reward: float | None) -> None:
        self.statistics.rewarded(trajectory_id, self._version.number)
        regenerate = self._config.task.on_scorer_timeout == "regenerate"
        self._feed(ev.RewardReady(trajectory_id, reward, regenerate))

    async def _fetch_prompts(self, count: int) -> None:
        groups = await self._admission.take(
            min(count, _GROUPS_AT_A_TIME), self._max_sequence_tokens()
        )
        # At most `_GROUPS_AT_A_TIME` groups are passed on. If the scheduler can start more
        # requests, it replies with another `RequestPrompts`.
        self._feed(ev.PromptsAvailable(groups))

    def _max_sequence_tokens(self) -> int | None:
        """Return the largest of the engines' limits on the tokens of prompt and response together;
        None if no limit is known."""
        # The largest limit counts, because an engine with a smaller limit refuses a longer request
        # itself. As long as one engine reports no limit, it may accept longer requests than all
        # others, so no new limit is derived.
        limits = [
            tracked.client.max_sequence_tokens or 0 for tracked in self._tracked_engines.values()
        ]
        if limits and all(limits):
            self._longest = max(self._longest, *limits)
        return self._longest or None

    async def _emit(self, action: ev.EmitBatch) -> None:
        groups = [self._store.load_group(group_id) for group_id in action.group_ids]
        self._store.mark_batched(action.group_ids, action.step)
        # The record that these groups are in a batch is made durable before the trainer gets the
        # batch. Otherwise a power loss could undo the record, and the groups would be trained
        # twice.
        position = await self._store.sync(durable=True)
        batch = pack_groups(
            groups,
            step=action.step,
            lineage=self._version.lineage,
            branch_points=self._store.branch_points(),
            temperature=self._config.sampling.temperature,
            mask_before=action.mask_before,
            discount=self._config.environment.turn_discount,
        )
        metrics = self.statistics.batch_metrics(batch, self._scheduler.view(), self._scorers.size)
        metrics |= reward_means(groups)
        masked = {f"rollout/{name}": value for name, value in batch.extra_metrics.items()}
        self._batches.put_nowait(
            replace(batch, extra_metrics={**metrics, **masked}, store_position=position)
        )
        if self._recorder is not None:
            self._recorder.flush()

    # ------------------------------------------------------------ reports

    def status(self) -> dict[str, Any]:
        """Return the numbers of engines, requests and tokens, the number of trajectories in each
        state, and the warnings, for display."""
        return {
            "engines_up": sum(tracked.up for tracked in self._tracked_engines.values()),
            "engines": len(self._tracked_engines),
            "running": len(self._generation),
            "tokens": self.statistics.counts.tokens,
            "version": str(self._version),
            "warnings": dict(self.statistics.warnings),
            "states": self._store.counts(),
        }

    def describe(self) -> str:
        """Return a line with the numbers of serving engines and running requests and the current
        version, for error messages."""
        return (
            f"{sum(tracked.up for tracked in self._tracked_engines.values())} of "
            f"{len(self._tracked_engines)} engines are serving, {len(self._generation)} requests "
            f"are running, the current version is {self._version}"
        )


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait until `task` has ended, whatever its result."""
    await asyncio.wait([task])
