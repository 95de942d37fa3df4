"""Provides the rollout manager: the calls through which a trainer uses the whole rollout side of a
run.

The manager is a plain class, owned by a separate process (`manager_host.py`) or by a test. The
trainer makes its calls in a fixed order. It calls `attach` once. Then it repeats these calls:
`next_batch`, which returns a batch or a task that the trainer must do first; `begin_update`; then
the trainer transfers the weights itself; `end_update`, after which the engines generate and sample
tokens for the verification; `verification_samples`, which returns these tokens; `verify_update`
with the trainer's log-probs of them; and `evaluate` if the result of `verify_update` says that an
evaluation is due. The trainer may ask for the next batch and compute gradients of it before it
verifies, but it verifies before it changes its weights. Every call carries the lineage of its
trainer. A lineage is a number that each session of a run gets when it starts or resumes; a later
session has a larger number.

Invariants
- An engine counts as updated only if its checksum agrees with that of the other engines and the
  trainer's log-probs of tokens that it sampled match its own (`weight_checks.py`). The trainer
  sends the weights once more to an engine that fails a check. If the engine fails again, it is
  restarted.
- No token reaches the store before its engine is verified for the token's version. Engines generate
  during the verification, and their tokens wait for its result (`tracked_engine.py`). Engines that
  share the trainer's devices cannot generate then; they are offloaded until they are verified.
- A trainer is superseded when a trainer of a newer lineage attaches. Its calls then change nothing
  for the newer trainer: `_session_of` refuses calls that start later, and `_check_current` stops
  calls that were running, after each wait.
- The trainer calls `checkpoint_finalized` only after the checkpoint's manifest exists.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
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
from megatron_async.rollout.trainer_task import TrainerTask
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
    "{} was removed or replaced while the run writes to it; trajectories since the last checkpoint "
    "are lost when the rollout manager exits. Stop the run with Ctrl-C and resume it."
)


@dataclass(frozen=True, eq=False)
class _Sampled:
    """Result of the checks of a weight update that need no trainer.

    Attributes:
        loaded: Engines that have loaded the version and failed no check so far.
        tokens: Tokens that these engines sampled for the comparison with the trainer.
        offloaded: Whether the engines stay offloaded until the update is verified.
    """

    loaded: list[EngineClient]
    tokens: Sequence[ProbeSample] = ()
    offloaded: bool = False


@dataclass(frozen=True, eq=False)
class _PendingUpdate:
    """A weight update between `end_update` and `verify_update`; `sampling` checks checksums, lets
    the engines generate and samples tokens."""

    version: PolicyVersion
    sampling: asyncio.Task[_Sampled]


@dataclass(frozen=True, eq=False)
class _Session:
    """Objects that exist from one `attach`, the call by which a trainer connects, to the next:
    resume point, driver, store, prompts, recorder and evaluations."""

    resume: ResumePoint
    store: TrajectoryStore
    driver: RolloutDriver
    prompts: TaskPrompts
    recorder: Recorder | None
    evaluations: Evaluations


async def _result(sampling: asyncio.Task[_Sampled]) -> _Sampled:
    # If the caller is canceled, `sampling` continues.
    return await asyncio.shield(sampling)


def _superseded(lineage: int, by: int) -> ComponentFailure:
    what = "has attached again" if by == lineage else f"is superseded by that of lineage {by}"
    return ComponentFailure(f"the trainer of lineage {lineage} {what}")


class RolloutManager:
    """Serves a trainer's calls for batches, weight updates, evaluations and checkpoints.

    The manager owns the engine fleet for as long as it exists. When a trainer connects (`attach`),
    it opens the trajectory store and creates a driver, which requests responses from the engines;
    both exist until the next `attach`.
    """

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
        """Create a manager without running engines; `start` starts them.

        Args:
            launcher: Starts and stops the engine processes.
            store_file: Path of the trajectory store.
            events_directory: Folder for recordings of the scheduler's events; None to record none.
            environments: Workers that run the environments; None if trajectories are not episodes.
        """
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
        self._receivers: set[str] = set()
        self._loaded: list[EngineClient] = []
        self._suspects: set[str] = set()
        self._last_reason = "there is no engine"
        self._checks = WeightChecks(config, self._probe_prompts)
        self._update: _PendingUpdate | None = None
        self._devices = SharedDevices(config.engines.placement == "colocated", self._ask)

    # ------------------------------------------------------------ start, attach and stop

    async def start(self) -> None:
        """Start all inference engines and wait until they run.

        Raises:
            ComponentFailure: An engine cannot be started.
        """
        await self._fleet.start()

    async def attach(self, resume: ResumePoint) -> None:
        """Start a session for a trainer that starts at `resume`: open the store at that position,
        and create a new driver and scheduler.

        The previous session is closed. There are two reasons for a second `attach`. A trainer whose
        ranks were restarted from a checkpoint attaches with a new lineage: the store keeps its
        trajectories but is rolled back to the checkpoint, and all engines count as stale. A trainer
        whose manager's process was lost attaches to the restarted manager with the lineage it has
        and at the step it has reached.

        Raises:
            ComponentFailure: A trainer with a newer lineage is attached.
        """
        async with self._attaching:
            await self._attach(resume)

    async def _attach(self, resume: ResumePoint) -> None:
        if self._session is not None and resume.lineage < self._session.resume.lineage:
            raise _superseded(resume.lineage, self._session.resume.lineage)
        try:
            await self._detach(lambda s: _superseded(s.resume.lineage, resume.lineage), leave=False)
        # The previous session's trainer got this failure already, so it does not stop the new
        # session.
        except ComponentFailure as error:
            _logger.warning("failed to close the previous session: %s", error)
        # In a thread, because opening a large file takes seconds, and the event loop has to serve
        # the engines meanwhile.
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
        # The number of prompts that were read is counted in the store, which includes groups that
        # were added after the checkpoint, so their prompts are not read again.
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
        self._abandon_verification()
        if session is not None:
            # Calls of the previous trainer that still wait end with this error.
            session.driver.background.fail(why(session))
            try:
                await session.driver.close(leave=leave)
            finally:
                session.prompts.close()
                if session.recorder is not None:
                    session.recorder.close()

    async def stop(self) -> None:
        """Close the current session and its store, keeping all tokens, and stop the engines."""
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
        """Return the session that was started by the `attach` of the trainer with this lineage.

        Raises:
            ComponentFailure: A trainer with a newer lineage is attached.
            NotAttached: No trainer of this lineage is attached.
        """
        session = self._session
        if session is None or session.resume.lineage < lineage:
            raise NotAttached(f"no trainer of lineage {lineage} is attached to the rollout manager")
        if session.resume.lineage > lineage:
            raise _superseded(lineage, session.resume.lineage)
        return session

    def _check_current(self, session: _Session) -> None:
        """Raise ComponentFailure if `session` is no longer the current session; call this after
        each wait."""
        if self._attached is not session:
            raise _superseded(session.resume.lineage, self._attached.resume.lineage)

    def status(self) -> dict[str, Any]:
        """Return numbers of engines, requests and trajectories, warnings and the failure, if any,
        for the progress display; {} before `attach`."""
        if self._session is None:
            return {}
        failure = self._driver.background.failure
        return {**self._driver.status(), "failure": None if failure is None else str(failure)}

    # ------------------------------------------------------------ batches

    async def next_batch(self, lineage: int) -> TokenBatch | TrainerTask:
        """Wait for the next batch and return it, or return the task that the trainer must do first.

        If the newest update is not verified yet and its samples are available before a batch is
        ready, the trainer must verify it first. Engines that share the trainer's devices are
        offloaded before this returns.

        Raises:
            ComponentFailure: The rollout side has failed, no batch came within
                `trainer.wait_for_batch_seconds`, or the trainer is superseded.
        """
        session = self._session_of(lineage)
        driver, limit = session.driver, self._config.trainer.wait_for_batch_seconds
        batch = await driver.next_batch(limit)
        self._check_current(session)
        if batch is TrainerTask.VERIFY:
            return batch
        if isinstance(batch, TokenBatch) and self._devices.shared:
            # An engine can be offloaded only when it is idle, and requests that were aborted for
            # the batch take a moment to end.
            await driver.until_idle(limit)
        await self._devices.offload(driver.engines())
        if (lost := session.store.pop_lost_database()) is not None:
            driver.statistics.warned("store_lost", _STORE_LOST.format(lost))
        more = session.prompts.take_metrics()
        if isinstance(batch, TrainerTask) or not more:
            return batch
        return replace(batch, extra_metrics={**batch.extra_metrics, **more})

    async def drop_batch(self, lineage: int, step: int, reason: str) -> None:
        """Drop the batch of training step `step` with all its trajectories, because the trainer
        could not use it."""
        self._session_of(lineage).driver.drop_batch(step, DropReason(reason))

    # ------------------------------------------------------------ weights

    async def begin_update(self, lineage: int, number: int) -> list[EngineAddress]:
        """Wait until engines are ready to receive the weights of version `number`; return the
        addresses of the engines that must receive them."""
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        if self._abandon_verification():
            session.driver.abandon_verification()
        await session.evaluations.suspend()
        engines = await session.driver.begin_update(version)
        self._check_current(session)
        # An engine that was offloaded has lost its weights, so all engines receive them, even those
        # that had loaded this version.
        if self._devices.shared:
            engines = self._driver.engines()
            await self._devices.offload(engines)
            await self._devices.onload_weights(engines)
        elif self._config.schedule.weight_update == "boundary":
            # In this mode engines are idle and not paused. SGLang refuses an update that flushes
            # its cache as long as it has not yet removed a request that has just ended.
            # `flush_cache` waits until it has.
            await self._ask(engines, lambda engine: engine.flush_cache())
            remaining = self._driver.engines()
            engines = [engine for engine in engines if engine in remaining]
        self._check_current(session)
        self._receivers = {engine.engine_id for engine in engines}
        return [EngineAddress(engine.engine_id, engine.url) for engine in engines]

    async def end_update(
        self, lineage: int, number: int, engine_ids: Sequence[str], verify: bool
    ) -> bool:
        """Let the engines that have loaded version `number` generate; with `verify`, compare their
        checksums first, and let them sample tokens for the comparison with the trainer.

        This returns before the engines have done so, unless they share the trainer's devices. The
        trainer then calls `verification_samples` and `verify_update`, also without `verify`.
        Tokens that engines generate meanwhile are not stored before `verify_update` accepts them.

        An engine that was to receive the weights and is not in `engine_ids` is taken out of
        service. An engine that fails a check becomes stale again.

        Args:
            engine_ids: Engines to which the trainer has sent the weights.
            verify: Whether to compare checksums and to sample tokens.

        Returns:
            Whether the trainer must complete the verification before it asks for a batch. This is
            the case if there is nothing to wait for, if engines share the trainer's devices, if
            the trainer must wait for an evaluation, and after the last training step.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        for engine_id in self._receivers - set(engine_ids):
            self._driver.engine_failed(engine_id, f"engine {engine_id} did not load {version}")
        self._driver.sent(version, engine_ids)
        sampling = session.driver.background.spawn(
            self._sample(session, set(engine_ids), version, verify)
        )
        self._update = _PendingUpdate(version, sampling)
        session.driver.sampling = sampling
        session.driver.need_engines(sampling)
        at_once = (
            not verify
            or self._devices.shared
            or number >= self._config.steps
            or session.evaluations.blocks(version)
        )
        if at_once:
            await self._sampled(session, sampling)
        return at_once

    async def _sample(
        self, session: _Session, engine_ids: Collection[str], version: PolicyVersion, verify: bool
    ) -> _Sampled:
        """Let the engines in `engine_ids` generate with `version`; with `verify`, check their
        checksums before, and sample tokens from each of them."""
        loaded = [e for e in self._driver.engines() if e.engine_id in engine_ids]
        await self._devices.onload(self._driver.engines())
        stale = [engine for engine in self._driver.stale_engines() if engine in loaded]
        # If the previous trainer died during an update, the engines that it was updating are still
        # paused.
        await self._ask(stale, lambda engine: engine.resume())
        # The KV cache of an engine that was stale was computed with other weights, and `kv: keep`
        # does not flush it.
        await self._ask(stale, lambda engine: engine.flush_cache())
        if verify:
            loaded = self._handle_outcome(
                session, await self._checks.check_checksums(loaded, version)
            )
        self._check_current(session)
        if not verify:
            await self._generate_or_quiesce(session, loaded, version)
            self._driver.verified([engine.engine_id for engine in loaded])
            return _Sampled(loaded)
        sampling = asyncio.ensure_future(self._checks.sample_tokens(loaded, version))
        try:
            # Give `sampling` a turn, so that its requests reach the engines before the requests
            # that `end_update` of the driver causes.
            await asyncio.sleep(0)
            # Engines on shared devices start no training requests before they are verified, because
            # they are offloaded for the trainer's computation of the log-probs.
            if not self._devices.shared:
                await self._generate_or_quiesce(session, loaded, version)
            outcome, tokens = await sampling
        finally:
            sampling.cancel()
        loaded = self._handle_outcome(session, outcome)
        await self._devices.offload(self._driver.engines(), keep_weights=True)
        return _Sampled(loaded, tokens, offloaded=self._devices.shared)

    async def _sampled(self, session: _Session, sampling: asyncio.Task[_Sampled]) -> _Sampled:
        """Wait for the result of `sampling`.

        Raises:
            ComponentFailure: The rollout side has failed, or the trainer is superseded.
        """
        # `sample_tokens` limits its own time to weights.timeout_seconds. The limit here also covers
        # the calls before it.
        limit = 2 * self._config.weights.timeout_seconds
        # The shield keeps the task when the wait ends early, for instance because a trainer's call
        # is canceled: the trainer may repeat the call.
        found = await session.driver.background.wait_for(
            _result(sampling), limit, "engines to sample tokens for the verification"
        )
        self._check_current(session)
        assert isinstance(found, _Sampled)
        return found

    def _pending(self, version: PolicyVersion) -> _PendingUpdate:
        update = self._update
        if update is None or update.version != version:
            raise ComponentFailure(f"cannot verify {version}: end_update was not called for it")
        return update

    def _abandon_verification(self) -> bool:
        """Stop the sampling for a verification that its trainer has not completed; return whether
        there was one."""
        update, self._update = self._update, None
        if update is not None:
            update.sampling.cancel()
        return update is not None

    async def verification_samples(self, lineage: int, number: int) -> TokenBatch | None:
        """Wait until the engines have sampled tokens with version `number`; return these tokens,
        packed as a batch.

        The trainer computes log-probs of them and passes these to `verify_update`.

        Returns:
            The batch; None if the update is not verified, or if no engine has sampled tokens.

        Raises:
            ComponentFailure: `end_update` was not called for this version, or sampling failed.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        found = await self._sampled(session, self._pending(version).sampling)
        return packed(found.tokens, self._config.sampling.temperature) if found.tokens else None

    async def _generate_or_quiesce(
        self, session: _Session, loaded: Sequence[EngineClient], version: PolicyVersion
    ) -> None:
        """Let engines generate with `version`, or start no more requests if that is the run's last
        version."""
        if version.number < self._config.steps:
            session.driver.end_update(version, [engine.engine_id for engine in loaded])
        else:
            await session.driver.quiesce()

    async def verify_update(
        self, lineage: int, number: int, logprobs_T: FloatArray | None, float32: bool
    ) -> UpdateReport:
        """Compare the log-probs of the tokens that engines sampled with version `number` with the
        trainer's, accept all tokens of engines that pass, and report the outcome.

        After the last training step this also ends all generation.

        Args:
            logprobs_T: Trainer's log-probs of the batch that `verification_samples` returned; None
                if it returned none.
            float32: Whether the trainer computed the log-probs in float32.

        Raises:
            ComponentFailure: `end_update` was not called for this version, or after the last step
                no engine has passed.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        update = await self._sampled(session, self._pending(version).sampling)
        self._update = session.driver.sampling = None
        last = number >= self._config.steps
        await self._devices.onload(self._driver.engines())
        outcome, metrics = self._checks.check_ratios(
            [engine for engine in update.loaded if engine in self._driver.engines()],
            update.tokens,
            logprobs_T,
            version,
            float32=float32,
        )
        loaded = self._handle_outcome(session, outcome)
        if update.tokens:
            self._suspects.difference_update(engine.engine_id for engine in loaded)
        if update.offloaded:
            await self._generate_or_quiesce(session, loaded, version)
        self._driver.verified([engine.engine_id for engine in loaded])
        if last:
            await session.driver.end_generation()
            await self._ask(loaded, lambda engine: engine.flush_cache())
        if last and not loaded:
            raise ComponentFailure(
                f"no engine has loaded the last version, {version}: {self._last_reason}"
            )
        self._loaded = loaded
        due = session.evaluations.updated(version, loaded=bool(loaded))
        if last and not due:
            await self._devices.offload(self._driver.engines())
        return UpdateReport(
            metrics=metrics,
            passed=len(loaded) == len(self._receivers),
            evaluation_due=due,
            evaluations=session.evaluations.take(),
            warnings=self._driver.statistics.take_warnings(),
        )

    async def _ask(
        self, engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Call `what` on all `engines` concurrently, and take each engine whose call fails out of
        service."""
        session = self._attached
        await session.driver.ask(engines, what)
        self._check_current(session)

    def _probe_prompts(self) -> list[IntArray]:
        return [prompt.token_ids for prompt in self._task.train_prompts(0, PROMPTS)]

    async def evaluate(self, lineage: int, number: int) -> tuple[Evaluation, ...]:
        """Evaluate version `number`; return the results of evaluations that have finished since the
        last report, with this one last.

        Call this when `verify_update` has reported that an evaluation is due.

        Raises:
            ComponentFailure: No engine that has loaded the version is in service, or the evaluation
                failed or took too long.
        """
        session, version = self._session_of(lineage), PolicyVersion(lineage, number)
        evaluation = asyncio.ensure_future(
            session.evaluations.evaluate_blocking(version, self._loaded)
        )
        session.driver.need_engines(evaluation)
        await evaluation
        self._check_current(session)
        if number >= self._config.steps:
            await self._devices.offload(self._driver.engines())
        return session.evaluations.take()

    def _handle_outcome(self, session: _Session, outcome: CheckOutcome) -> list[EngineClient]:
        """Return the engines that passed a check; take engines that did not reply out of service,
        and mark engines with wrong weights as stale.

        The trainer sends the weights again to a stale engine. If its weights are wrong a second
        time, the engine is taken out of service.
        """
        self._check_current(session)
        for engine_id, why in outcome.failed.items():
            self._driver.engine_failed(engine_id, why)
        for engine_id, why in outcome.wrong.items():
            self._last_reason = why
            if engine_id in self._suspects:
                self._suspects.discard(engine_id)
                self._driver.engine_failed(engine_id, f"{why}, twice")
            else:
                self._suspects.add(engine_id)
                self._driver.engine_stale(engine_id, why)
        return outcome.good

    # ------------------------------------------------------------ checkpoints

    async def position(self, lineage: int) -> dict[str, Any]:
        """Write everything in the store durably to disk and return the store's position (its number
        of transactions). A checkpoint records the position, so that a resume from the checkpoint
        can open the store there (`ResumePoint.store_position`).

        Engines that share the trainer's devices are offloaded first, because the trainer is about
        to use all of its memory.
        """
        session = self._session_of(lineage)
        await self._devices.offload(session.driver.engines())
        position = await session.store.sync(durable=True)
        session.store.replicate()
        self._check_current(session)
        return {"store_position": position}

    async def checkpoint_finalized(
        self, lineage: int, step: int, kept: Sequence[PolicyVersion]
    ) -> None:
        """Tell the store that the checkpoint of `step` is finalized, so that it may remove
        trajectories that no checkpoint needs.

        Args:
            kept: Versions of the checkpoints that can still be restored.
        """
        await self._session_of(lineage).store.checkpoint_finalized(step, kept)
