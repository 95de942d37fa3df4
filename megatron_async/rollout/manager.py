"""The rollout manager: the whole rollout side of a run behind a handful of calls.

It is a plain class that a process of its own (`manager_host.py`) or a test holds. The trainer's
calls come in a fixed order: `attach`, then again and again `next_batch` (a batch, or the news that
stale engines want weights), `begin_update`, the transfer itself (which the trainer does),
`end_update`, `verify_update` with the trainer's log-probs of what that returned, and `evaluate`
when that asks for it. Every call carries its trainer's lineage.

Invariants
- An update counts only for engines that agree on their checksum and whose own tokens have ratio 1
  under the trainer (`weight_checks.py`). One that does not is sent the weights once more; if that
  does not help either, it is replaced.
- No token reaches the store before its engine is verified for its version: what engines generate
  meanwhile waits (`tracked_engine.py`). Engines that share the trainer's devices are offloaded
  then.
- A superseded trainer changes nothing for its successor: neither by a call that begins
  later (`_session_of`, the door of every call) nor by one that was under way (`_still`).
- `checkpoint_finalized` is called after the manifest exists, never before.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.engines.interface import EngineClient
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.evaluate import Evaluation, Evaluations, Evaluator
from megatron_async.rollout.fleet import EngineLauncher, Fleet
from megatron_async.rollout.messages import NotAttached, ResumePoint, UpdateReport
from megatron_async.rollout.probe import PROMPTS, ProbeSample, packed
from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.rollout.shared_devices import SharedDevices
from megatron_async.rollout.weight_checks import CheckOutcome, WeightChecks
from megatron_async.scheduler.record import Recorder, new_record
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scoring.interface import Scorers
from megatron_async.store.store import TrajectoryStore
from megatron_async.tasks.base import Task
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import DropReason, FloatArray, IntArray, PolicyVersion
from megatron_async.weight_sync.http import EngineAddress

_logger = logging.getLogger(__name__)


_STORE_LOST = (
    "{} was removed or replaced while the run writes it: trajectories since the last checkpoint "
    "end with the rollout manager; end the run with Ctrl-C and resume it"
)


@dataclass(frozen=True, eq=False)
class _PendingUpdate:
    """An update between `end_update` and `verify_update`; `rests`: engines do so meanwhile."""

    version: PolicyVersion
    holders: list[EngineClient]
    samples: Sequence[ProbeSample] = ()
    rests: bool = False


@dataclass(frozen=True, eq=False)
class _Session:
    """State from one `attach` to the next."""

    resume: ResumePoint
    store: TrajectoryStore
    driver: RolloutDriver
    prompts: TaskPrompts
    recorder: Recorder | None
    evaluations: Evaluations


def _superseded(lineage: int, by: int) -> ComponentFailure:
    what = "has attached once more" if by == lineage else f"is superseded by that of lineage {by}"
    return ComponentFailure(f"the trainer of lineage {lineage} {what}")


class RolloutManager:
    """Owns the fleet for its whole life, and driver and store from one `attach` to the next."""

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        scorers: Scorers,
        launcher: EngineLauncher,
        store_file: Path,
        events_directory: Path | None,
        environments: EnvironmentWorkers | None = None,
    ) -> None:
        """`environments`: what episodes are played against; None where there is none."""
        self._environments = environments
        self._config = config
        self._task = task
        self._scorers = scorers
        self._evaluator = Evaluator(config, task, scorers, environments)
        self._store_file = store_file
        self._events_directory = events_directory
        self._fleet = Fleet(config.engines, launcher)
        self._session: _Session | None = None
        self._attaching = asyncio.Lock()
        self._addressed: set[str] = set()
        self._holders: list[EngineClient] = []
        self._suspects: set[str] = set()
        self._why = "none is there"
        self._checks = WeightChecks(config, self._probe_prompts)
        self._update: _PendingUpdate | None = None
        self._devices = SharedDevices(config.engines.placement == "colocated", self._ask)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engines. Raises ComponentFailure when one cannot start."""
        await self._fleet.start()

    async def attach(self, resume: ResumePoint) -> None:
        """A trainer begins at `resume`: open the store there, with a new scheduler.

        A trainer that comes back (restarted ranks) attaches again: what the store holds survives,
        everything is rolled back to its checkpoint, and all engines count as stale. So does a
        trainer whose manager was lost: it goes on with its own lineage, at the step it has reached.
        Raises ComponentFailure for a trainer that is superseded already.
        """
        async with self._attaching:
            await self._attach(resume)

    async def _attach(self, resume: ResumePoint) -> None:
        if self._session is not None and resume.lineage < self._session.resume.lineage:
            raise _superseded(resume.lineage, self._session.resume.lineage)
        try:
            await self._detach(lambda s: _superseded(s.resume.lineage, resume.lineage), leave=False)
        except ComponentFailure as error:  # of the trainer before, who has been given it already
            _logger.warning("the session before could not be closed: %s", error)
        # On a thread: a large file takes seconds, in which engines want to be heard.
        store = await asyncio.to_thread(
            TrajectoryStore.open,
            self._store_file,
            self._config.store,
            lineage=resume.lineage,
            step=resume.step,
            parent=resume.parent,
            position=resume.store_position,
        )
        version = PolicyVersion(resume.lineage, resume.step)
        try:
            recorder = new_record(self._events_directory, self._config, version, time.time)
        except BaseException:
            await store.close()
            raise
        # Prompts that became groups after the checkpoint are in the store already.
        prompts = TaskPrompts(
            self._task,
            self._config.task.difficulty,
            self._store_file.with_name("difficulty.jsonl"),
            store.prompts_read,
            self._config.eval.solved_at,
        )
        driver = RolloutDriver(
            self._config,
            scheduler=Scheduler(
                self._config.resolved_schedule, first_step=resume.step, version=version
            ),
            store=store,
            prompts=prompts,
            scorers=self._scorers,
            version=version,
            stop_token_ids=self._task.stop_token_ids,
            vocabulary=vocabulary_of(self._config.model.path),
            recorder=recorder,
            environments=self._environments,
        )
        evaluations = Evaluations(self._config, self._evaluator, driver)
        self._session = _Session(resume, store, driver, prompts, recorder, evaluations)
        if store.recovery is not None:
            driver.statistics.warned("store_recovered", store.recovery.message)
        driver.start()
        self._fleet.attach(driver)
        await self._devices.offload(driver.engines())

    async def _detach(self, why: Callable[[_Session], ComponentFailure], leave: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.driver.background.fail(why(session))  # nothing will come for those that wait
            try:
                await session.driver.close(leave=leave)
            finally:
                session.prompts.close()
                if session.recorder is not None:
                    session.recorder.close()

    async def stop(self) -> None:
        """Keep every token, close the store, end the engines."""
        async with self._attaching:
            stopped = ComponentFailure("the rollout manager was stopped")
            try:
                await self._detach(lambda _: stopped, leave=True)
            finally:
                await self._fleet.stop()

    @property
    def _attached(self) -> _Session:
        if self._session is None:
            raise NotAttached("no trainer is attached to the rollout manager")
        return self._session

    @property
    def _driver(self) -> RolloutDriver:
        return self._attached.driver

    def _session_of(self, lineage: int) -> _Session:
        """Return the session that the calling trainer of `lineage` has attached.

        Raises ComponentFailure when it is superseded, NotAttached when it must attach first.
        """
        session = self._session
        if session is None or session.resume.lineage < lineage:
            raise NotAttached(f"no trainer of lineage {lineage} is attached to the rollout manager")
        if session.resume.lineage > lineage:
            raise _superseded(lineage, session.resume.lineage)
        return session

    def _still(self, session: _Session) -> None:
        """Check after a wait that `session` is not superseded. Raises ComponentFailure."""
        if self._attached is not session:
            raise _superseded(session.resume.lineage, self._attached.resume.lineage)

    def status(self) -> dict[str, Any]:
        """Queue and buffer sizes and counters, for the progress display; empty before `attach`."""
        if self._session is None:
            return {}
        failure = self._driver.background.failure
        return {**self._driver.status(), "failure": None if failure is None else str(failure)}

    # ------------------------------------------------------------ batches

    async def next_batch(self, lineage: int) -> TokenBatch | None:
        """The next batch, or None when stale engines want weights. Raises ComponentFailure."""
        session = self._session_of(lineage)
        driver, limit = session.driver, self._config.trainer.wait_for_batch_seconds
        batch = await driver.next_batch(limit)
        self._still(session)
        if batch is not None and self._devices.shared:
            await driver.until_idle(limit)  # what was ended early is on its way out
        await self._devices.offload(driver.engines())
        if (lost := session.store.pop_lost_database()) is not None:
            driver.statistics.warned("store_lost", _STORE_LOST.format(lost))
        more = session.prompts.take_metrics()
        if batch is None or not more:
            return batch
        return replace(batch, extra_metrics={**batch.extra_metrics, **more})

    async def drop_batch(self, lineage: int, step: int, reason: str) -> None:
        """The trainer could not use the batch of `step` (all its trajectories are dropped)."""
        self._session_of(lineage).driver.drop_batch(step, DropReason(reason))

    # ------------------------------------------------------------ weights

    async def begin_update(self, lineage: int, number: int) -> list[EngineAddress]:
        """Make engines ready for version `number`; returns those that must receive it."""
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        await session.evaluations.suspend()
        engines = await session.driver.begin_update(version)
        self._still(session)
        if self._devices.shared:  # who gave its memory away has lost its weights
            engines = self._driver.engines()
            await self._devices.offload(engines)
            await self._devices.onload_weights(engines)
        elif self._config.schedule.weight_update == "boundary":
            # Nothing is paused then, and SGLang refuses an update that flushes its cache while a
            # request that has just ended is still on its way out. This waits for that.
            await self._ask(engines, lambda engine: engine.flush_cache())
            left = self._driver.engines()
            engines = [engine for engine in engines if engine in left]
        self._still(session)
        self._addressed = {engine.engine_id for engine in engines}
        return [EngineAddress(engine.engine_id, engine.url) for engine in engines]

    async def end_update(
        self, lineage: int, number: int, engine_ids: Sequence[str], verify: bool
    ) -> TokenBatch | None:
        """The engines that hold version `number` now; they generate from here on.

        With `verify`, what each of them sampled, for the trainer to compute log-probs of, which
        `verify_update` wants; None without. An engine that fails a check is stale again.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        for engine_id in self._addressed - set(engine_ids):
            self._driver.engine_failed(engine_id, f"engine {engine_id} did not take {version}")
        self._driver.sent(version, engine_ids)
        holders = [e for e in self._driver.engines() if e.engine_id in set(engine_ids)]
        await self._devices.onload(self._driver.engines())
        stale = [engine for engine in self._driver.stale_engines() if engine in holders]
        # A trainer that died in the middle of an update has left them paused.
        await self._ask(stale, lambda engine: engine.resume())
        # What an idle engine has cached was made by other weights (`kv: keep` does not flush).
        await self._ask(stale, lambda engine: engine.flush_cache())
        if verify:
            holders = self._passed(session, await self._checks.held(holders, version))
        self._still(session)
        if not verify:
            await self._go_on(session, holders, version)
            self._driver.verified([engine.engine_id for engine in holders])
            self._update = _PendingUpdate(version, holders)
            return None
        sampling = asyncio.ensure_future(self._checks.sampled(holders, version))
        try:
            await asyncio.sleep(0)  # the samples are asked for before anything else
            if not self._devices.shared:  # there engines are offloaded until they are verified
                await self._go_on(session, holders, version)
            outcome, samples = await sampling
        finally:
            sampling.cancel()
        holders = self._passed(session, outcome)
        await self._devices.offload(self._driver.engines(), keep_weights=True)
        self._update = _PendingUpdate(version, holders, samples, rests=self._devices.shared)
        return packed(samples, self._config.sampling.temperature) if samples else None

    async def _go_on(
        self, session: _Session, holders: Sequence[EngineClient], version: PolicyVersion
    ) -> None:
        """Generation with `version`; after the last step nothing new is started."""
        if version.number < self._config.steps:
            session.driver.end_update(version, [engine.engine_id for engine in holders])
        else:
            await session.driver.quiesce()

    async def verify_update(
        self, lineage: int, number: int, logprobs_T: FloatArray | None, float32: bool
    ) -> UpdateReport:
        """Release what engines generated under version `number`, if they are right.

        `logprobs_T` are the trainer's of the batch that `end_update` returned, computed in
        `float32` or with fewer bits; None where there was none. Raises ComponentFailure when no
        engine is left after the last step.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        update, self._update = self._update, None
        if update is None or update.version != version:
            raise ComponentFailure(f"{version} was to be verified before its update had ended")
        last = number >= self._config.steps
        await self._devices.onload(self._driver.engines())
        outcome, metrics = self._checks.ratios(
            update.holders, update.samples, logprobs_T, version, float32=float32
        )
        holders = self._passed(session, outcome)
        if update.samples:
            self._suspects.difference_update(engine.engine_id for engine in holders)
        if update.rests:
            await self._go_on(session, holders, version)
        self._driver.verified([engine.engine_id for engine in holders])
        if last:
            await session.driver.end_generation()
            await self._ask(holders, lambda engine: engine.flush_cache())
        if last and not holders:
            raise ComponentFailure(f"no engine holds the last version, {version}: {self._why}")
        self._holders = holders
        due = session.evaluations.updated(version, held=bool(holders))
        if last and not due:
            await self._devices.offload(self._driver.engines())
        return UpdateReport(
            metrics=metrics,
            passed=len(holders) == len(self._addressed),
            evaluation_due=due,
            evaluations=session.evaluations.take(),
            warnings=self._driver.statistics.take_warnings(),
        )

    async def _ask(
        self, engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Ask engines, all at once; one that fails is taken out of service."""
        session = self._attached
        await session.driver.ask(engines, what)
        self._still(session)

    def _probe_prompts(self) -> list[IntArray]:
        return [prompt.token_ids for prompt in self._task.train_prompts(0, PROMPTS)]

    async def evaluate(self, lineage: int, number: int) -> tuple[Evaluation, ...]:
        """Evaluate version `number`, after the `verify_update` that found it due; with it,
        those that have ended meanwhile.

        Raises ComponentFailure when no engine that holds it is left, or past the limit.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        await session.evaluations.evaluate_blocking(version, self._holders)
        self._still(session)
        if number >= self._config.steps:
            await self._devices.offload(self._driver.engines())
        return session.evaluations.take()

    def _passed(self, session: _Session, outcome: CheckOutcome) -> list[EngineClient]:
        """Return engines that passed a check. Others are sent the weights again, then replaced."""
        self._still(session)
        for engine_id, why in outcome.failed.items():
            self._driver.engine_failed(engine_id, why)
        for engine_id, why in outcome.wrong.items():
            self._why = why
            if engine_id in self._suspects:
                self._suspects.discard(engine_id)
                self._driver.engine_failed(engine_id, f"{why}, twice")
            else:
                self._suspects.add(engine_id)
                self._driver.engine_stale(engine_id, why)
        return outcome.good

    # ------------------------------------------------------------ checkpoints

    async def position(self, lineage: int) -> dict[str, Any]:
        """Return what a checkpoint keeps of the rollout side (`ResumePoint` is made from it).

        The trainer is about to hold all of its memory: engines that share it are offloaded.
        """
        session = self._session_of(lineage)
        await self._devices.offload(session.driver.engines())
        position = await session.store.sync(durable=True)
        session.store.replicate()
        self._still(session)
        return {"store_position": position}

    async def checkpoint_finalized(
        self, lineage: int, step: int, kept: Sequence[PolicyVersion]
    ) -> None:
        """The manifest of `step` exists; `kept` can still be restored."""
        await self._session_of(lineage).store.checkpoint_finalized(step, kept)
