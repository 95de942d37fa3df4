"""Injects faults into a run in one process.

The manager, the store, the clients of the engines and the scorers are the product's code. The
engines (`engines.py`, on a separate thread) and the trainer (`trainer.py`) are replaced, and calls
do not go through Ray.

Invariants
- If a fault that may end the run ended it, the run is resumed from its newest checkpoint, as a user
  would do. A run that ends for another reason has broken a promise.
- Every wait has a limit. Time limits fit runs in which an engine counts as hung after
  `SILENCE_SECONDS` without a sign of life.
- Findings about engines count only if this machine ran the event loops in time (`Gauge`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from megatron_async.checkpoint.manifest import (
    list_checkpoints,
)
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.tiny_model import EOS_ID, VOCAB_SIZE, write_character_tokenizer
from megatron_async.process_backends.local import local_backend
from megatron_async.rollout.fleet import EngineLauncher
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.tasks import build_task
from megatron_async.trajectory.types import CHUNK_TOKENS, Prompt
from tests.crash.checks import Rules, audit
from tests.crash.disk import Edges
from tests.crash.engines import EngineThread, FaultyLauncher, Served
from tests.crash.evidence import Seen, gather, look
from tests.crash.faults import FOR_GOOD, KINDS, SILENCE_SECONDS, Fault, Injected, may_end
from tests.crash.hostile_reward import COMMAND_VARIABLE, reward_of
from tests.crash.ledger import Account, NotingLauncher, ledger_file
from tests.crash.run import answer_decoder, lag_bound, of_episodes
from tests.crash.scorers import PlainScorer, ScorerProcesses, text_of
from tests.crash.trainer import Trainer

STOP_TOKEN = 2
MODEL = SimulatedEngineModel(
    vocab_size=4096, mean_length=40, step_seconds=0.01, stream_interval=4, max_running_requests=64
)
# Model for runs of episodes, whose tokens must decode to text.
TEXT_MODEL = replace(MODEL, vocab_size=VOCAB_SIZE, mean_length=12)
_CONTROL_SECONDS = 6.0
_LIFE_SECONDS = 120.0
_LOOK_SECONDS = 0.7
_LISTEN_SECONDS = 0.02
_COMMAND_SECONDS = 10.0


def settings(preset: str, **changes: Any) -> RunConfig:
    """Return the settings of a run with many requests and small batches."""
    base: dict[str, Any] = {
        "steps": 1_000_000,
        "schedule": {
            "preset": preset,
            "groups_per_batch": 4,
            "group_size": 4,
            "concurrency": 24,
            "updates_per_batch": 1,
            **lag_bound(preset),
        },
        "sampling": {"max_new_tokens": 96},
        "trainer": {"wait_for_batch_seconds": 60.0},
        "task": {"scorer_timeout_seconds": 2.0},
        "engines": {
            "count": 3,
            "device": "cpu",
            "max_restarts": 1_000_000,
            "hang_timeout_seconds": SILENCE_SECONDS,
        },
        "weights": {"timeout_seconds": 8.0},
        "store": {"compact_after_checkpoints": 2},
    }
    return build_config(merge(base, changes))


def episode_settings(preset: str, folder: Path, **changes: Any) -> RunConfig:
    """Return the settings of a run of episodes in the directory `folder`, and write a tokenizer.

    Args:
        preset: Preset of the schedule.
        folder: Directory of the run; the tokenizer is written to its parent.
        changes: Settings that replace the defaults, by section.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_character_tokenizer(folder.parent)
    own = of_episodes(folder.parent, folder.name)
    own["episode"] = {"step_seconds": 2.0, "memory_mib": 1024}
    own["model"] = {"path": str(folder.parent)}
    own["engines"] = {"kind": "simulated", "max_total_tokens": 1 << 16}
    own["weights"] = {"transport": "tensor", "verify": "never"}
    return settings(preset, **merge(own, changes))


def rules_of(config: RunConfig) -> Rules:
    """Return the settings of a run that the checks need."""
    return Rules(
        CHUNK_TOKENS,
        config.schedule.max_async_level,
        EOS_ID if config.has_episodes else STOP_TOKEN,
        config.sampling.max_new_tokens,
        model_of(config),
        by_version=True,
        reward_of=None if config.has_episodes else lambda tokens: reward_of(text_of(tokens)),
    )


def model_of(config: RunConfig) -> SimulatedEngineModel:
    """Return the model from which `weights_of` derives the tokens of each policy version."""
    return TEXT_MODEL if config.has_episodes else MODEL


class NumberedTask:
    """Task that gives each group a different prompt."""

    stop_token_ids = (STOP_TOKEN,)

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        places = range(position, position + count)
        return [Prompt(np.array([3, 3 + i % 64, 3 + i // 64], np.int32), "numbers") for i in places]

    def eval_prompts(self, count: int) -> list[Prompt]:
        return self.train_prompts(0, count)


class Gauge:
    """Measures for how long an event loop was blocked.

    Attributes:
        worst: Longest time in seconds, without the time that a fault blocked the loop on purpose.
        meant: Seconds for which a fault blocks the loop during the current interval.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self.meant = 0.0

    async def run(self, interval: float = 0.05) -> None:
        """Measure until canceled, once per `interval` seconds."""
        while True:
            self.meant, due = 0.0, time.monotonic() + interval
            await asyncio.sleep(interval)
            self.worst = max(self.worst, time.monotonic() - due - self.meant)


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        preset: Preset of the run.
        seed: Seed of the sequence of faults.
        injected: Faults that were injected.
        broken: Messages about broken promises.
        slow_seconds: Longest time in seconds for which this machine blocked an event loop.
        reasons: Warnings of the run about engines, with the seconds since the start.
        resumes: Number of times that the run was resumed.
        trajectories: Number of trajectories.
        batches: Number of batches that the trainer received.
        largest_lag: Largest lag of a batch.
        seconds: Duration of the run in seconds.
    """

    preset: str
    seed: str
    injected: tuple[Injected, ...] = ()
    broken: list[str] = field(default_factory=list)
    slow_seconds: float = 0.0
    reasons: dict[str, float] = field(default_factory=dict)
    resumes: int = 0
    trajectories: int = 0
    batches: int = 0
    largest_lag: int = 0
    seconds: float = 0.0

    @property
    def slow(self) -> bool:
        """Whether this machine was too slow for the run to be evidence about engines."""
        return self.slow_seconds > SILENCE_SECONDS / 4


class World:
    """Carries out faults on one run.

    Attributes:
        directory: The run's directory.
        config: The run's configuration.
        injected: Faults that were injected so far.
        endings: Reasons for which the run ended before its end.
        broken: Messages about broken promises.
        looks: Contents of the store at moments during the run.
        reasons: Warnings of the run about engines, with the seconds since the start.
    """

    def __init__(
        self, folder: Path, config: RunConfig, *, edges: Edges | None, scorer_processes: bool
    ) -> None:
        """Prepare a run in `folder`.

        Args:
            folder: The run's directory.
            config: The run's configuration.
            edges: Control of the disk and the clock; None if they cannot fail.
            scorer_processes: Whether to use the product's scorer processes, which can fail.
        """
        self.directory = RunDirectory(folder)
        folder.mkdir(parents=True)
        self.config = config
        self._edges = edges
        self._scorer_processes = scorer_processes
        # The faults of the disk do not affect files of the ledger.
        self._command = folder / "ledger" / "scorer_fault"
        self._engines = EngineThread()
        self._launcher: FaultyLauncher | None = None
        self._manager: RolloutManager | None = None
        self._trainer: Trainer | None = None
        self._training: asyncio.Task[None] | None = None
        self._replaced: set[asyncio.Task[None]] = set()
        self._lineage = -1
        self._enough = asyncio.Event()
        self._gauges = (Gauge(), Gauge())
        self._account = Account(ledger_file(folder, "faults"))
        self._began = time.monotonic()
        self._waits: set[asyncio.Task[None]] = set()
        self.injected: list[Injected] = []
        self.endings: list[str] = []
        self.broken: list[str] = []
        self.looks: list[dict[int, Seen]] = []
        self.reasons: dict[str, float] = {}

    # ------------------------------------------------------------ the run

    async def run(self, faults: Sequence[Fault]) -> None:
        """Start the run, inject `faults` after its first step, and wait for its end.

        Broken promises are added to `broken`.
        """
        measuring = asyncio.create_task(self._gauges[0].run())
        others = self._engines.call(self._gauges[1].run())
        looking = asyncio.create_task(self._look())
        listening = asyncio.create_task(self._listen())
        scorer: Any = PlainScorer()
        if self.config.has_episodes:
            os.environ[COMMAND_VARIABLE] = str(
                self._command
            )  # The environments' workers inherit it.
        if self._scorer_processes:
            scorer = ScorerProcesses(self.config, self._command)
        try:
            injecting = asyncio.create_task(self._inject(faults))
            injecting.add_done_callback(lambda _: self._enough.set())
            try:
                await self._lives(scorer)
            finally:
                injecting.cancel()
                [outcome] = await asyncio.gather(injecting, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome
        finally:
            for task in (measuring, looking, listening, *self._waits, *self._replaced):
                task.cancel()
            await asyncio.gather(*self._waits, *self._replaced, return_exceptions=True)
            others.cancel()
            if self._edges is not None:
                self._edges.heal()
            scorer.close()
            self._engines.close()

    async def _lives(self, scorer: Any) -> None:
        """Start the run, and resume it each time that a fault which may end the run ended it."""
        while True:
            ending = await self._life(scorer)
            if ending is None:
                return
            self.endings.append(ending)
            if not may_end(self.injected):
                self.broken.append(f"a run did not continue: {ending}")
                return
            if len(self.endings) > sum(KINDS[one.kind].ends for one in self.injected):
                self.broken.append(f"a run ended more often than its faults explain: {ending}")
                return
            if self._edges is not None:
                self._edges.heal()  # A user repairs the disk before the resume.

    async def _life(self, scorer: Any) -> str | None:
        """Run from a start or a resume to the next end.

        Returns:
            None if the run has completed, otherwise the error message with which it ended.
        """
        config = self.config
        if not config.has_episodes:
            return await self._run_until_end(scorer, NumberedTask(), None)
        task = build_task(config.task, config.model.path, config.eval, has_episodes=True)
        with local_backend(self.directory.path / "ledger") as backend:
            return await self._run_until_end(scorer, task, EnvironmentWorkers(config, backend))

    async def _run_until_end(
        self, scorer: Any, task: Any, environments: EnvironmentWorkers | None
    ) -> str | None:
        model = model_of(self.config)
        self._launcher = FaultyLauncher(
            self.config.engines, model, self._engines, control_seconds=_CONTROL_SECONDS
        )
        self._manager = manager = RolloutManager(
            self.config,
            task=task,
            environments=environments,
            scorers=scorer,
            launcher=cast(EngineLauncher, NotingLauncher(self._launcher, self.directory.path)),
            store_file=self.directory.store_file,
            events_directory=None,
        )
        try:
            async with asyncio.timeout(_LIFE_SECONDS):
                await manager.start()
                self._begin_trainer()
                while self._training is not None:
                    training = self._training
                    await asyncio.wait([training])
                    if self._training is training:
                        training.result()
                        return None
        except ComponentFailure as failure:
            return str(failure)
        except UserError as refused:
            return f"the resume was refused: {refused}"
        except TimeoutError:
            return f"the run did not end within {_LIFE_SECONDS:g} s: {manager.status()}"
        finally:
            if self._training is not None:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)
            self._training = None
            await self._stop(manager)
        return None

    async def _stop(self, manager: RolloutManager) -> None:
        for served in self._launcher.serving() if self._launcher else ():
            self._engines.do(served.server.heal)  # The stop would wait for each hanging engine.
        try:
            async with asyncio.timeout(_LIFE_SECONDS):
                await manager.stop()
        except ComponentFailure as failure:
            if not may_end(self.injected):
                self.broken.append(f"a stop failed: {failure}")

    def _begin_trainer(self) -> None:
        """Start a trainer in a new lineage, from the newest checkpoint if there is one."""
        assert self._manager is not None
        self._lineage += 1
        resume = ResumePoint(self._lineage)
        newest = next(iter(list_checkpoints(self.directory.checkpoints)), None)
        if newest is not None:
            position = int(newest.manifest.extra["store_position"])
            resume = ResumePoint(self._lineage, newest.step, newest.manifest.lineage, position)
        model = model_of(self.config)
        self._trainer = Trainer(self.config, self.directory, self._manager, model)
        self._training = asyncio.create_task(self._trainer.live(resume, self._enough))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.looks.append(await asyncio.to_thread(look, self.directory))

    async def _listen(self) -> None:
        """Collect the run's warnings about engines; they are only printed, no check uses them."""
        while True:
            await asyncio.sleep(_LISTEN_SECONDS)
            warnings = self._manager.status().get("warnings", {}) if self._manager else {}
            at = round(time.monotonic() - self._began, 2)
            for name in {"engine_failed", "engine_stale"} & warnings.keys():
                self.reasons.setdefault(warnings[name], at)

    # ------------------------------------------------------------ faults

    async def _inject(self, faults: Sequence[Fault]) -> None:
        await self._first_step()
        for fault in faults:
            await asyncio.sleep(fault.after)
            await self._do(fault)
        for wait in list(self._waits):
            await wait
        await self._command_taken()
        self._heal()

    async def _first_step(self) -> None:
        while self._trainer is None or self._trainer.step < 1:
            await asyncio.sleep(0.02)

    async def _do(self, fault: Fault) -> None:
        match KINDS[fault.kind].edge:
            case "engine":
                self._engine_fault(fault)
            case "trainer":
                self._trainer_fault(fault)
            case "manager":
                self._note(fault)
                for gauge in self._gauges[:1]:
                    gauge.meant += fault.seconds
                time.sleep(fault.seconds)
            case "environment" if fault.kind == "environment worker dies":
                self._note(fault)
                for process in psutil.Process().children():
                    if "process_backends.host environments" in " ".join(process.cmdline()):
                        process.kill()
            case "scorer" | "environment":
                await self._command_taken()
                self._note(fault)
                prepared = self._command.with_suffix(".next")
                prepared.write_text(fault.kind)
                prepared.rename(self._command)
            case "disk":
                self._disk_fault(fault)
            case "clock":
                assert self._edges is not None
                self._note(fault)
                ahead = 1 if fault.kind == "clock jumps ahead" else -1
                self._edges.jump(ahead * fault.seconds)
            case "run":
                self._note(fault)
                await asyncio.to_thread(self._second_run)

    async def _command_taken(self) -> None:
        """Wait until a process has removed the last command, at most for `_COMMAND_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMMAND_SECONDS):
                while self._command.exists():
                    await asyncio.sleep(0.02)

    def _note(self, fault: Fault, engine: str = "") -> None:
        at = round(time.monotonic() - self._began, 2)
        one = Injected(fault.kind, engine, fault.count, at)
        self.injected.append(one)
        self._account.add(kind=one.kind, engine=one.engine, count=one.count, at=one.at)

    def _engine_fault(self, fault: Fault) -> None:
        serving = self._launcher.serving() if self._launcher is not None else []
        if not serving:
            return  # An engine that is still being started cannot be hit.
        served = serving[fault.target % len(serving)]
        self._note(fault, served.url)
        server = served.server
        match fault.kind:
            case "engine hangs" | "engine hangs for a moment":
                self._engines.do(server.hang)
            case "engine answers late":
                self._engines.do(server.late)
            case "engine answers nothing but 5xx":
                self._engines.do(server.broken)
            case "engine restarts with old weights":
                self._engines.do(server.restart)
            case "engine holds another version than it reports":
                self._engines.do(server.lie, fault.count)
            case "engine dies":
                self._later(0.0, self._engines.call(served.end()))
            case _:
                self._engines.do(server.spoil, fault.kind, fault.count)
        if 0 < fault.seconds < FOR_GOOD:
            self._later(fault.seconds, self._healed(served))

    async def _healed(self, served: Served) -> None:
        self._engines.do(served.server.heal)

    def _trainer_fault(self, fault: Fault) -> None:
        if self._trainer is None or self._training is None:
            return
        self._note(fault)
        if fault.kind == "trainer pauses":
            self._trainer.pause_seconds = fault.seconds
            return
        before = self._training
        self._begin_trainer()
        # For an even target the old trainer stays alive and makes calls, which are refused.
        if fault.target % 2:
            before.cancel()
        self._replaced.add(before)

    def _disk_fault(self, fault: Fault) -> None:
        assert self._edges is not None
        self._note(fault)
        self._edges.disk(fault.kind)
        self._later(fault.seconds, self._disk_works())

    async def _disk_works(self) -> None:
        assert self._edges is not None
        self._edges.heal()

    def _second_run(self) -> None:
        """Try to open the store of the running run, which must be refused."""
        with contextlib.suppress(UserError):
            TrajectoryStore.open(self.directory.store_file, self.config.store)
            self.broken.append("a second run opened the store")

    def _later(self, seconds: float, work: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await work

        task = asyncio.create_task(wait())
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    def _heal(self) -> None:
        if self._edges is not None:
            self._edges.heal()
        self._command.unlink(missing_ok=True)

    @property
    def slow_seconds(self) -> float:
        """Longest time in seconds for which an event loop was blocked, except by a fault."""
        return max(gauge.worst for gauge in self._gauges)


async def suffer(
    folder: Path,
    config: RunConfig,
    faults: Sequence[Fault],
    *,
    seed: str = "",
    edges: Edges | None = None,
    scorer_processes: bool = False,
) -> Result:
    """Run with these faults and check the evidence of the run.

    Args:
        folder: The run's directory.
        config: The run's configuration.
        faults: Faults in order.
        seed: Seed of the sequence, for the result.
        edges: Control of the disk and the clock; None if they cannot fail.
        scorer_processes: Whether to use the product's scorer processes, which can fail.
    """
    world = World(folder, config, edges=edges, scorer_processes=scorer_processes)
    began = time.monotonic()
    await world.run(faults)
    result = Result(
        config.schedule.preset,
        seed,
        tuple(world.injected),
        list(world.broken),
        slow_seconds=world.slow_seconds,
        reasons=world.reasons,
        resumes=len(world.endings),
        seconds=time.monotonic() - began,
    )
    if not world.broken:
        _account(world, result)
    return result


def _account(world: World, result: Result) -> None:
    try:
        has_episodes = world.config.has_episodes
        decode = answer_decoder(world.config.model.path) if has_episodes else None
        lives = 1 + len(world.injected)  # Each fault may end an environment's worker.
        evidence = gather(world.directory, world.looks, decode=decode, lives=lives)
    except ValueError as error:
        result.broken.append(f"failed to read the evidence: {error}")
        return
    for name, found in audit(evidence, rules_of(world.config)).items():
        result.broken += [f"{name}: {sentence}" for sentence in found]
    result.trajectories, result.batches = evidence.trajectories, len(evidence.batches)
    result.largest_lag = max((batch.lag for batch in evidence.batches), default=0)
