"""A run in one process, to which faults are done: the product's manager, store, client and scorers.

Everything between the engines' sockets and the trainer's calls is the product's own. Made up are
the engines (`engines.py`, on a thread of their own), the trainer, which makes the calls that
`train_loop/loop.py` makes and sends text for weights, and Ray, for which there is none.

Invariants
- A run that a fault has ended is resumed from its newest checkpoint, as a person would; whatever
  else ends it is a broken promise.
- Every wait has a limit. Seconds are those of a run in which an engine that is silent for
  `SILENCE_SECONDS` is hung.
- Findings about engines count only while this machine kept up (`Gauge`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.crash.checks import Rules, audit, weights_of
from benchmarks.crash.engines import EngineThread, FaultyLauncher, Served
from benchmarks.crash.evidence import Seen, gather, look
from benchmarks.crash.faults import FOR_GOOD, KINDS, SILENCE_SECONDS, Fault, Injected, may_end
from benchmarks.crash.hostile_reward import COMMAND_VARIABLE, IMPORT_PATH, reward_of
from benchmarks.crash.ledger import Account, Ledger, faults_file, trained_file
from megatron_async.checkpoint.manifest import (
    Manifest,
    SavedLayout,
    finalise,
    list_checkpoints,
    prune,
    step_directory,
)
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.tasks.scorer_count import ScorerCount
from megatron_async.tasks.scorer_work import Work
from megatron_async.tasks.verifier import VerifierWorker
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion, Prompt
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, call

STOP_TOKEN = 2
MODEL = SimulatedEngineModel(
    vocab_size=4096, mean_length=40, step_seconds=0.01, stream_interval=4, max_running_requests=64
)
_KEPT_CHECKPOINTS = 2
_CHECKPOINT_STEPS = 2
_LAST_STEPS = 2
_CONTROL_SECONDS = 6.0
_LIFE_SECONDS = 120.0
_LOOK_SECONDS = 0.7
_LISTEN_SECONDS = 0.02
_SCORERS = 2


def settings(preset: str, **changes: Any) -> RunConfig:
    """A run in which much is in the air."""
    base: dict[str, Any] = {
        "steps": 1_000_000,
        "schedule": {
            "preset": preset,
            "groups_per_batch": 4,
            "group_size": 4,
            "concurrency": 24,
            "updates_per_batch": 1,
            "max_async_level": 2 if preset == "async" else 4,
        },
        "sampling": {"max_new_tokens": 96},
        "trainer": {"wait_for_batch_seconds": 60.0},
        "task": {"verifier_timeout_seconds": 2.0},
        "engines": {
            "count": 3,
            "device": "cpu",
            "max_restarts": 1_000_000,
            "health_interval_seconds": SILENCE_SECONDS / 10,
            "no_progress_seconds": SILENCE_SECONDS,
            "request_timeout_seconds": 2 * SILENCE_SECONDS,
        },
        "weights": {"timeout_seconds": 8.0},
        "store": {"chunk_tokens": 16, "chunk_seconds": 0.5, "compact_after_checkpoints": 2},
    }
    return build_config(merge(base, changes))


def text_of(response_ids: Iterable[int]) -> str:
    """What is scored."""
    return " ".join(map(str, response_ids))


def rules_of(config: RunConfig) -> Rules:
    """What such a run promises."""
    return Rules(
        config.store.chunk_tokens,
        config.schedule.max_async_level,
        STOP_TOKEN,
        config.sampling.max_new_tokens,
        MODEL,
        by_version=True,
        reward_of=lambda tokens: reward_of(text_of(tokens)),
    )


class NumberedTask:
    """Prompts that no two groups share."""

    stop_token_ids = (STOP_TOKEN,)

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        places = range(position, position + count)
        return [Prompt(np.array([3, 3 + i % 64, 3 + i // 64], np.int32), "numbers") for i in places]

    def eval_prompts(self, count: int) -> list[Prompt]:
        return self.train_prompts(0, count)


class PlainScorer:
    """Scores without a process, for runs in which no scorer fails."""

    scorers = ScorerCount(1)

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        await asyncio.sleep(0)
        return reward_of(text_of(response_ids)), {}

    def close(self) -> None:
        """Nothing to end."""


class ScorerProcesses:
    """The product's scorer processes, with a scorer that fails when `command` asks for it."""

    scorers = ScorerCount(_SCORERS)

    def __init__(self, config: RunConfig, command: Path) -> None:
        os.environ[COMMAND_VARIABLE] = str(command)
        reward = RewardConfig.model_validate({"name": IMPORT_PATH})
        scoring = ScorerSettings(task=config.task, rewards=[reward])
        self._workers = [VerifierWorker(scoring) for _ in range(_SCORERS)]
        # One each: a score goes on in its thread when nobody waits for it any more.
        self._threads = [ThreadPoolExecutor(1, "scorer") for _ in self._workers]
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for place in range(_SCORERS):
            self._idle.put_nowait(place)

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        place = await self._idle.get()  # bounded: every score is
        loop = asyncio.get_running_loop()
        work = [Work(0, prompt.payload, (text_of(response_ids),))]
        try:
            [[scored]] = await loop.run_in_executor(
                self._threads[place], self._workers[place].score, work
            )
        finally:
            self._idle.put_nowait(place)
        return scored.reward, scored.detail

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True)
        for worker in self._workers:
            worker.close()


class Gauge:
    """How long an event loop was kept from running, but for `seconds` that a fault took."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.meant = 0.0

    async def run(self, interval: float = 0.05) -> None:
        """For ever."""
        while True:
            self.meant, due = 0.0, time.monotonic() + interval
            await asyncio.sleep(interval)
            self.worst = max(self.worst, time.monotonic() - due - self.meant)


class ManagerCalls:
    """Calls a manager as Ray does: a call goes on when its caller is gone."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of the manager."""
        task = asyncio.ensure_future(getattr(self._manager, method)(*arguments))
        self._calls.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone


class Trainer:
    """Calls a manager as the training loop does, with pauses where it is asked to pause."""

    def __init__(self, config: RunConfig, directory: RunDirectory, manager: RolloutManager) -> None:
        self._config, self._directory = config, directory
        self._call = ManagerCalls(manager).call
        self._account = Account(trained_file(directory.path))
        self.lineage, self.step = 0, 0
        self.pause_seconds = 0.0

    async def live(self, resume: ResumePoint, until: asyncio.Event) -> None:
        """Train until asked to end, and some steps more; the last of them has a checkpoint.

        Raises ComponentFailure.
        """
        self.lineage, self.step = resume.lineage, resume.step
        self._account.add(attach=resume.lineage, step=resume.step, parent=resume.parent)
        await self._call("attach", resume)
        await self._publish()
        end: int | None = None
        while self.step != end:
            if end is None and until.is_set():
                end = self.step + _LAST_STEPS
            batch = await self._call("next_batch", self.lineage)
            await self._pause()
            if batch is None:
                await self._publish()
                continue
            self._note(batch)
            self.step += 1
            await self._publish()
            if self.step % _CHECKPOINT_STEPS == 0 or self.step == end:
                await self._checkpoint()

    async def _pause(self) -> None:
        seconds, self.pause_seconds = self.pause_seconds, 0.0
        await asyncio.sleep(seconds)

    def _note(self, batch: TokenBatch) -> None:
        self._account.add(
            batch=batch.step,
            lineage=self.lineage,
            ids=batch.trajectory_ids_S.tolist(),
            responses=[
                batch.token_ids_T[start + prompt : end].tolist()
                for (start, end), prompt in zip(
                    pairwise(batch.cu_seqlens_S1.tolist()), batch.prompt_lengths_S, strict=True
                )
            ],
            lag=int(batch.lag_T[batch.loss_mask_T > 0].max(initial=0)),
        )

    async def _publish(self) -> None:
        lineage, number = self.lineage, self.step
        version = PolicyVersion(lineage, number)
        addresses = await self._call("begin_update", lineage, number)
        await self._pause()
        reached = await self._send(addresses, version)
        samples = await self._call("end_update", lineage, number, reached, True)
        await self._pause()
        logprobs_T = None if samples is None else _logprobs(samples, version)
        await self._call("verify_update", lineage, number, logprobs_T, True)

    async def _send(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> list[str]:
        """As a sender does: to all, and again without those that failed."""
        wanted = list(engines)
        while wanted:
            sent = await asyncio.gather(*(asyncio.to_thread(self._to, e, version) for e in wanted))
            if all(sent):
                break
            wanted = [engine for engine, good in zip(wanted, sent, strict=True) if good]
        return [engine.engine_id for engine in wanted]

    def _to(self, engine: EngineAddress, version: PolicyVersion) -> bool:
        deadline = time.monotonic() + self._config.weights.timeout_seconds
        body = {
            "serialized_named_tensors": [f"weights {version}"],
            "weight_version": str(version),
        }

        def post(path: str, content: dict[str, Any]) -> None:
            call(engine, "POST", path, content, max(deadline - time.monotonic(), 0.05))

        try:
            try:
                post("begin_weight_update", {})
            except EngineCallError as error:
                if "already open" not in str(error):
                    raise
                post("end_weight_update", {})
                post("begin_weight_update", {})
            post("update_weights_from_tensor", body)
            post("end_weight_update", {})
        except EngineCallError:
            return False
        return True

    async def _checkpoint(self) -> None:
        extra = await self._call("position", self.lineage)
        await self._pause()
        kept = await asyncio.to_thread(self._save, extra)
        await self._call("checkpoint_finalised", self.lineage, self.step, kept)

    def _save(self, extra: dict[str, Any]) -> list[int]:
        root = self._directory.checkpoints
        temporary = root / f".saving_{self.lineage}.{self.step}"
        manifest = Manifest(self.lineage, self.step, SavedLayout(1, 1, 1), {}, extra=extra)
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            finalise(temporary, step_directory(root, self.step), manifest)
        except OSError as error:
            raise ComponentFailure(f"the checkpoint could not be written: {error}") from error
        prune(root, _KEPT_CHECKPOINTS)
        return sorted(one.step for one in list_checkpoints(root))


def _logprobs(samples: TokenBatch, version: PolicyVersion) -> FloatArray:
    """What a trainer with these weights computes."""
    model = weights_of(MODEL, version)
    bounds = pairwise(samples.cu_seqlens_S1.tolist())
    sequences = [samples.token_ids_T[start:end] for start, end in bounds]
    values = [model.logprob(int(t), place) for ids in sequences for place, t in enumerate(ids)]
    return np.asarray(values, np.float32) * samples.loss_mask_T


@dataclass
class Result:
    """The outcome of a run. `slow`: this machine stood still too long to be evidence."""

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
        return self.slow_seconds > SILENCE_SECONDS / 4


class Edges(Protocol):
    """Disk and clock that can fail (`disk.py`)."""

    def disk(self, kind: str = "") -> None: ...

    def jump(self, seconds: float) -> None: ...

    def heal(self) -> None: ...


class World:
    """One run and its faults."""

    def __init__(
        self, folder: Path, config: RunConfig, *, edges: Edges | None, scorer_processes: bool
    ) -> None:
        """`edges`: disk and clock that can fail; None where nothing is preloaded."""
        self.directory = RunDirectory(folder)
        folder.mkdir(parents=True)
        self.config = config
        self._edges = edges
        self._scorer_processes = scorer_processes
        self._command = folder / "ledger" / "scorer_fault"  # the ledger is on no disk that fails
        self._engines = EngineThread()
        self._launcher: FaultyLauncher | None = None
        self._manager: RolloutManager | None = None
        self._trainer: Trainer | None = None
        self._training: asyncio.Task[None] | None = None
        self._replaced: set[asyncio.Task[None]] = set()
        self._lineage = -1
        self._enough = asyncio.Event()
        self._gauges = (Gauge(), Gauge())
        self._account = Account(faults_file(folder))
        self._began = time.monotonic()
        self._waits: set[asyncio.Task[None]] = set()
        self.injected: list[Injected] = []
        self.endings: list[str] = []
        self.broken: list[str] = []
        self.looks: list[dict[int, Seen]] = []
        self.reasons: dict[str, float] = {}

    # ------------------------------------------------------------ the run

    async def run(self, faults: Sequence[Fault]) -> None:
        """From the first step over all faults to the end; what went wrong is in `broken`."""
        measuring = asyncio.create_task(self._gauges[0].run())
        others = self._engines.call(self._gauges[1].run())
        looking = asyncio.create_task(self._look())
        listening = asyncio.create_task(self._listen())
        scorer: Any = PlainScorer()
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
            await asyncio.to_thread(scorer.close)
            self._engines.close()

    async def _lives(self, scorer: Any) -> None:
        """A life ends as it should, or by a fault that may end it and then there is another."""
        while True:
            ending = await self._life(scorer)
            if ending is None:
                return
            self.endings.append(ending)
            if not may_end(self.injected):
                self.broken.append(f"a run did not go on: {ending}")
                return
            if len(self.endings) > sum(KINDS[one.kind].ends for one in self.injected):
                self.broken.append(f"a run ended more often than by its faults: {ending}")
                return
            if self._edges is not None:
                self._edges.heal()  # a person makes room, then resumes

    async def _life(self, scorer: Any) -> str | None:
        """One process tree's; None when it came to its end, else the sentence that ended it."""
        self._launcher = FaultyLauncher(
            self.config.engines, MODEL, self._engines, control_seconds=_CONTROL_SECONDS
        )
        self._manager = manager = RolloutManager(
            self.config,
            task=NumberedTask(),  # type: ignore[arg-type]
            verifier=scorer,
            launcher=Ledger(self.directory.path).launcher(self._launcher),
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
            return f"it did not come to its end within {_LIFE_SECONDS:g} s: {manager.status()}"
        finally:
            if self._training is not None:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)
            self._training = None
            await self._stop(manager)
        return None

    async def _stop(self, manager: RolloutManager) -> None:
        for served in self._launcher.serving() if self._launcher else ():
            self._engines.do(served.server.heal)  # else each is waited for
        try:
            async with asyncio.timeout(_LIFE_SECONDS):
                await manager.stop()
        except ComponentFailure as failure:
            if not may_end(self.injected):
                self.broken.append(f"a stop failed: {failure}")

    def _begin_trainer(self) -> None:
        """A trainer (again): from the newest checkpoint, on a line of its own."""
        assert self._manager is not None
        self._lineage += 1
        resume = ResumePoint(self._lineage)
        newest = next(iter(list_checkpoints(self.directory.checkpoints)), None)
        if newest is not None:
            position = int(newest.extra["store_position"])
            resume = ResumePoint(self._lineage, newest.step, newest.lineage, position)
        self._trainer = Trainer(self.config, self.directory, self._manager)
        self._training = asyncio.create_task(self._trainer.live(resume, self._enough))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.looks.append(await asyncio.to_thread(look, self.directory))

    async def _listen(self) -> None:
        """What the run itself reports about engines: for a person, no check reads it."""
        while True:
            await asyncio.sleep(_LISTEN_SECONDS)
            warnings = self._manager.status().get("warnings", {}) if self._manager else {}
            at = round(time.monotonic() - self._began, 2)
            for name in {"engine_failed", "engine_stale"} & warnings.keys():
                self.reasons.setdefault(warnings[name], at)

    # ------------------------------------------------------------ its faults

    async def _inject(self, faults: Sequence[Fault]) -> None:
        await self._first_step()
        for fault in faults:
            await asyncio.sleep(fault.after)
            await self._do(fault)
        for wait in list(self._waits):
            await wait
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
            case "scorer":
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

    def _note(self, fault: Fault, engine: str = "") -> None:
        at = round(time.monotonic() - self._began, 2)
        one = Injected(fault.kind, engine, fault.count, at)
        self.injected.append(one)
        self._account.add(kind=one.kind, engine=one.engine, count=one.count, at=one.at)

    def _engine_fault(self, fault: Fault) -> None:
        serving = self._launcher.serving() if self._launcher is not None else []
        if not serving:
            return  # the one that is just being started is nobody's yet
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
        if fault.target % 2:  # else it lives on and makes calls, which are refused
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
        """Whoever opens the same store meanwhile is refused, and has changed nothing."""
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
        """The longest time for which an event loop stood still, and not by a fault."""
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
    """A run that has these faults, and its audit."""
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
        evidence = gather(world.directory, world.looks)
    except ValueError as error:
        result.broken.append(f"the accounts cannot be read: {error}")
        return
    for name, found in audit(evidence, rules_of(world.config)).items():
        result.broken += [f"{name}: {sentence}" for sentence in found]
    result.trajectories, result.batches = evidence.trajectories, len(evidence.batches)
    result.largest_lag = max((batch.lag for batch in evidence.batches), default=0)
