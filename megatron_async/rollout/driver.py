"""The asyncio driver: runs the sans-IO scheduler against engines, scorers, prompts and the store.

Invariants
- Every event reaches the scheduler through `_feed`, one at a time, on the event loop; its actions
  are carried out in order. Nothing else changes the scheduler. Requests that end early in one turn
  of the loop are one event, which nothing but tokens of others overtakes.
- Pausing, allowing an update and resuming are carried out one after the other, never at once.
- A stale engine (new, restarted, or one that missed an update) serves nothing: it is `EngineUp`
  only when it holds the current version.
- Calls go down, from here to `generation`, `admission` and `monitor`; what comes back are events
  and engines that are given up.
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
from megatron_async.runtime.time_limits import AwakeClock
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scoring.interface import Scorers
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import DropReason, PolicyVersion

_GROUPS_AT_A_TIME = 16  # a start wants hundreds, and the event loop has other work too


class RolloutDriver:
    """The rollout side of a run: owns scheduler, store and engine clients."""

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
        """`prompts` and `scorers` belong to the task, `stop_token_ids` end a response.

        `vocabulary`: tokens of the model; None: not known. `environments`: where trajectories are
        episodes.
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
        self._allowed: dict[int, asyncio.Event] = {}
        self._stale = asyncio.Event()
        self._closed = False
        self._quiet = False
        self.background = BackgroundTasks(self.describe)
        self._longest = 0  # tokens of prompt and response; 0: not known
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
        to_scheduler = (self.background, self._feed, self._longest_tokens)
        self._episodes = Episodes(config, store, environments, self.statistics, *to_scheduler)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin work: recovered groups first, then new prompts as the scheduler asks for them."""
        for work in (self._control_loop(), self._clock.run(), self._watch_engines()):
            self.background.spawn(work)
        recovered = self._admission.recovered(self._generation.end_if_complete)
        if recovered:
            self._episodes.recovered(recovered)
            self._feed(self._admission.event_of(recovered))

    async def close(self, *, leave: bool = False) -> None:
        """Abort what runs, keep its tokens, flush and close the store. Engines go on.

        `leave`: see `TrajectoryStore.close`.
        """
        self._closed = True
        self.background.close()
        self._quiet = True  # first: what still ends meanwhile must start nothing
        self._monitor.close()
        try:
            await self._generation.close()
        finally:
            await self.background.cancel()
            await self._store.close(leave=leave)

    # ------------------------------------------------------------ engines

    def add_engine(self, client: EngineClient) -> None:
        """An engine is there; it is stale until weights are published to it."""
        self._tracked_engines[client.engine_id] = TrackedEngine(client, self._clock)
        self._stale.set()

    def engine_failed(self, engine_id: str, why: str) -> None:
        """Take an engine out of service and inform the fleet; a second report is ignored.

        Its trajectories go on elsewhere from their last stored token.
        """
        if self._forget(engine_id, "engine_failed", why) is not None:
            self.lost_engines.put_nowait((engine_id, why))

    async def suspect(self, engine: EngineClient, why: str) -> None:
        """Take an engine on which something has failed out of service if it does not answer."""
        tracked = self._tracked_engines.get(engine.engine_id)
        if tracked is not None:
            await self._monitor.suspect(tracked, why)

    def engine_stale(self, engine_id: str, why: str) -> None:
        """Let an engine that holds other weights serve nothing until it was sent them again.

        Its trajectories go on elsewhere from their last stored token.
        """
        if (tracked := self._forget(engine_id, "engine_stale", why)) is not None:
            self.add_engine(tracked.client)

    def _forget(self, engine_id: str, warning: str, why: str) -> TrackedEngine | None:
        if (tracked := self._tracked_engines.get(engine_id)) is None:
            return None
        self.statistics.warned(warning, why)
        self.statistics.engine_lost(engine_id)
        self._step_aborted()  # what it submits to this engine is forgotten with all that runs there
        self._generation.detach_engine(tracked, failed=warning == "engine_failed")
        del self._tracked_engines[engine_id]
        if tracked.up:
            self._feed(ev.EngineDown(engine_id))
        return tracked

    def stale_engines(self) -> list[EngineClient]:
        """Engines that do not hold the current version."""
        return [tracked.client for tracked in self._tracked_engines.values() if not tracked.up]

    def engines(self) -> list[EngineClient]:
        """All engines that are there."""
        return [tracked.client for tracked in self._tracked_engines.values()]

    def serving(self) -> list[EngineClient]:
        """Engines that generate with a verified version now."""
        return [s.client for s in self._tracked_engines.values() if s.up and not s.health.suspended]

    async def ask(
        self, engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Ask engines, all at once; one that fails is taken out of service at once."""

        async def one(engine: EngineClient) -> None:
            try:
                await what(engine)
            except EngineError as error:
                if not self._closed:  # else it belongs to a successor, or to nobody
                    self.engine_failed(engine.engine_id, str(error))

        await asyncio.gather(*map(one, engines))

    async def _watch_engines(self) -> None:
        settings = self._config.engines
        while True:
            await asyncio.sleep(settings.health_interval_seconds)
            for tracked in await self._monitor.look():
                self._generation.end_silent(tracked, settings.silence_seconds)

    # ------------------------------------------------------------ the trainer's side

    async def next_batch(self, timeout: float) -> TokenBatch | None:
        """The next batch, or None when stale engines want weights first.

        Raises ComponentFailure when the rollout side has failed or nothing came in time.
        """
        batch = await self.background.wait_for(
            self._batches.get(), timeout, "a batch", other=self._stale.wait()
        )
        if not isinstance(batch, TokenBatch):
            return None
        self._feed(ev.BatchTaken(batch.step, time.monotonic()))
        return batch

    async def begin_update(self, version: PolicyVersion) -> list[EngineClient]:
        """Wait until the engines are ready for `version`; returns those that must receive it.

        They are ready when no request runs, or when they are paused (`scheduler/update_gate.py`).
        That may take as long as a batch may: `drain` waits for the longest response.
        """
        timeout = self._config.trainer.wait_for_batch_seconds
        if version != self._version and any(
            tracked.up for tracked in self._tracked_engines.values()
        ):
            allowed = self._allowed.setdefault(version.number, asyncio.Event())
            self._feed(ev.UpdateRequested(version.number))
            await self.background.wait_for(allowed.wait(), timeout, f"engines to take {version}")
        if version != self._version:
            self.statistics.update_began()
        receivers = [
            s for s in self._tracked_engines.values() if version != self._version or not s.up
        ]
        for tracked in receivers:
            tracked.suspend()  # they may answer nothing until they have the weights
        return [tracked.client for tracked in receivers]

    def sent(self, version: PolicyVersion, engine_ids: Sequence[str]) -> None:
        """Note that engines were sent `version`: tokens made with it wait for `verified`."""
        for engine_id in engine_ids:
            if (tracked := self._tracked_engines.get(engine_id)) is not None:
                tracked.await_verification(version)

    def verified(self, engine_ids: Sequence[str]) -> None:
        """Take the tokens of engines: what they were sent last is right."""
        for engine_id in engine_ids:
            if (tracked := self._tracked_engines.get(engine_id)) is not None:
                tracked.accept()

    def end_update(self, version: PolicyVersion, engine_ids: Sequence[str]) -> None:
        """Let engines generate with `version` from now on; it is `verified` before or after."""
        self.sent(version, engine_ids)
        self.statistics.update_ended()
        self._allowed.pop(version.number, None)
        is_new = version != self._version
        self._version = version
        newly_up = []
        most = self._config.engines.max_running_requests
        for engine_id, tracked in self._tracked_engines.items():
            tracked.release()
            if engine_id in engine_ids and not tracked.up:
                tracked.up = True
                capacity = tracked.client.kv_capacity_tokens
                newly_up.append(ev.EngineUp(engine_id, version, capacity, most))
        if is_new:
            self._feed(ev.WeightsPublished(version))
        if newly_up:
            self._feed(ev.EnginesUp(tuple(newly_up)))
        if not self.stale_engines():
            self._stale.clear()

    async def until_idle(self, timeout: float) -> None:
        """Wait until no request runs. Raises ComponentFailure when one does after `timeout`."""
        idle = self._generation.until_idle()
        await self.background.wait_for(idle, timeout, "running requests to end")

    async def quiesce(self) -> None:
        """Start nothing more; what runs goes on, also where an update has paused it."""
        self._quiet = True
        for tracked in self._tracked_engines.values():
            tracked.release()
        await self.ask(self.engines(), lambda client: client.resume())

    async def end_generation(self) -> None:
        """Abort running requests after `quiesce`; their tokens are kept."""
        await self._generation.abort(self._generation.mark_for_abort())

    def drop_batch(self, step: int, reason: DropReason) -> None:
        """The trainer could not use the batch of `step`."""
        count = self._store.drop_batch(step, reason)
        self.statistics.batch_dropped(step, reason, count)

    # ------------------------------------------------------------ scheduler in the middle

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.Aborted):
            if not self._aborted:
                self.background.spawn(self._feed_aborted())
            self._aborted.append((event.trajectory_id,))
            return
        if not isinstance(event, (ev.TokensArrived, ev.LeftQueue)):  # of others: these have ended
            self._step_aborted()
        self._step(event)

    async def _feed_aborted(self) -> None:
        self._step_aborted()

    def _step_aborted(self) -> None:
        """Report all that ended early in this turn of the event loop: at a boundary hundreds do."""
        if self._aborted:
            ended, self._aborted = self._aborted, []
            self._step(ev.ManyAborted(tuple(ended)) if len(ended) > 1 else ev.Aborted(*ended[0]))

    def _step(self, event: ev.Event) -> None:
        if self._recorder is None:
            actions = self._scheduler.step(event)
        else:
            actions = self._recorder.step(self._scheduler, event)
        if self._quiet:
            return
        for action in actions:
            if not isinstance(action, ev.Abort):
                self._carry_out(action)
        unwanted = [action.trajectory_id for action in actions if isinstance(action, ev.Abort)]
        requests = self._generation.mark_for_abort(unwanted)
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
                self.statistics.dropped(action.reason)
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

    async def _control_loop(self) -> None:
        while True:
            await self._control_engines(await self._control.get())

    async def _control_engines(self, action: ev.Action) -> None:
        up = [tracked.client for tracked in self._tracked_engines.values() if tracked.up]
        match action:
            case ev.PauseEngines():
                await self.ask(up, lambda engine: engine.pause(action.mode))
            case ev.ResumeEngines():
                await self.ask(up, lambda engine: engine.resume())
            case ev.AllowUpdate():
                self._allowed.setdefault(action.number, asyncio.Event()).set()

    # ------------------------------------------------------------ prompts, rewards, batches

    def _reward_ready(self, trajectory_id: int, reward: float | None) -> None:
        regenerate = self._config.task.on_scorer_timeout == "regenerate"
        self._feed(ev.RewardReady(trajectory_id, reward, regenerate))

    async def _fetch_prompts(self, count: int) -> None:
        groups = await self._admission.take(min(count, _GROUPS_AT_A_TIME), self._longest_tokens())
        self._feed(ev.PromptsAvailable(groups))  # which asks for more while slots are free

    def _longest_tokens(self) -> int | None:
        """Tokens of prompt and response that engines take; None: not known."""
        # One alone that reports less than another may be wrong, and refuses by itself if it is not;
        # one that reports nothing may take more than all others.
        limits = [
            tracked.client.max_sequence_tokens or 0 for tracked in self._tracked_engines.values()
        ]
        if limits and all(limits):
            self._longest = max(self._longest, *limits)
        return self._longest or None

    async def _emit(self, action: ev.EmitBatch) -> None:
        groups = [self._store.load_group(group_id) for group_id in action.group_ids]
        self._store.mark_batched(action.group_ids, action.step)
        position = await self._store.sync(durable=True)  # else a power loss: it is trained twice
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
        """Queue and buffer sizes, counters and warnings, for a person."""
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
        """Return a line about what is going on, for error messages."""
        return (
            f"{sum(tracked.up for tracked in self._tracked_engines.values())} of "
            f"{len(self._tracked_engines)} engines serve, {len(self._generation)} requests run, "
            f"current version {self._version}"
        )
