"""Measures the costs of thousands of streams in the rollout manager, with stub engines.

    python -m benchmarks.streams [--streams 4096] [--engines 4] [--hosts 4] [--stubs 1]
        [--rate 40] [--interval 64] [--seconds 10] [--direct] [--out benchmarks/results/streams.md]

The rollout manager, its store and its recorded events are the real ones, in this process. The
engines have no model and only count (stub_engine.py); they are spread over `--stubs` processes.
Each of `--hosts` processes reads the streams of a share of the engines, as the host of an engine
does. With `--direct`, the manager reads the streams itself. The table has these rows and columns:

- submit: time from the publication of weights until every request has its first token.
- steady: `--seconds` in which only tokens arrive. CPU time is that of whole processes with all
  threads. It is given as the share of a core for the full rate of tokens, because fewer tokens may
  arrive on a busy machine. CPU time of the engines' processes has a separate column, because these
  processes share the cores.
- abort all: time from the request of a weight update until no request runs
  (`schedule.preset: copris`).
- loop: longest iteration of the manager's event loop, in wall time and in CPU time of its thread.
  Other processes on the machine do not change the CPU time.

At the end, the store must contain each token that an engine reported, exactly once, at the right
position and with the right log-prob. Otherwise, the benchmark fails. This is possible because each
response counts upwards from the last token of its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import aiohttp
import numpy as np
import uvloop

from benchmarks.reporting import publish, table
from benchmarks.stub_engine import VOCABULARY, logprob
from megatron_async.config import RunConfig, build_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.host import HostCalls
from megatron_async.engines.interface import EngineClient
from megatron_async.engines.relay import Pace, RelayedEngine, Started, StreamRelay
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.token_report import TokenReport
from megatron_async.process_backends.backend import MethodCall, RemoteObject, recorded
from megatron_async.process_backends.local import local_backend
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.runtime.garbage_collection import tune_gc
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.scoring.interface import Score
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import CHUNK_TOKENS, Prompt

_LIMIT_SECONDS = 300.0
_TICK_SECONDS = 0.005
_SETTLE_SECONDS = 3.0
"""Wait until each stream has its second report, so that reports are spread over time."""


class Counting:
    """A task and its scorer; any 131,072 successive prompts end in different tokens."""

    stop_token_ids = ()
    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        lasts = [(position + i) * 1021 % VOCABULARY for i in range(count)]
        return [Prompt(np.array([5, last], np.int32), "count") for last in lasts]

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        return 1.0, {}


def settings(streams: int, engines: int, interval: int, most: int = 60_000) -> RunConfig:
    """Return settings with a batch that never completes and responses of at most `most` tokens."""
    schedule = {"preset": "copris", "concurrency": streams, "groups_per_batch": streams}
    return build_config(
        {
            "schedule": {**schedule, "group_size": 8},
            "sampling": {"max_new_tokens": most},
            "engines": {"count": engines, "stream_interval": interval},
            "trainer": {"wait_for_batch_seconds": _LIMIT_SECONDS},
            "steps": 100,
        }
    )


# ---------------------------------------------------------------- engines


@contextlib.contextmanager
def stub_engines(engines: int, processes: int, interval: int, rate: float) -> Iterator[list[str]]:
    """Start `engines` engines in `processes` processes; yield the URLs of the engines."""
    started: list[subprocess.Popen[str]] = []
    try:
        for place in range(processes):
            share = len(range(place, engines, processes))
            command = [sys.executable, "-m", "benchmarks.stub_engine"]
            command += [str(share), str(interval), str(rate)]
            started.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        lines = [process.stdout.readline() for process in started if process.stdout is not None]
        yield [f"http://127.0.0.1:{port}" for line in lines for port in line.split()]
    finally:
        for process in started:
            # This closes the input, so the process exits.
            process.communicate(timeout=20)


class Relays:
    """The work of the hosts of several engines, in one process."""

    def __init__(self) -> None:
        self._relays: dict[str, StreamRelay] = {}
        # The host of an engine also tunes the garbage collector.
        tune_gc()

    async def serve(self, engine_id: str, url: str, settings: EngineConfig) -> None:
        client = SGLangClient(engine_id, url, settings)
        self._relays[engine_id] = StreamRelay(client, CHUNK_TOKENS)

    async def update(self, of: str, started: Sequence[Started], canceled: Sequence[int]) -> None:
        self._relays[of].update(started, canceled)

    async def abort(self, of: str, requests: Mapping[str, int]) -> None:
        await self._relays[of].abort(requests)

    async def report(self, of: str, acknowledged: Sequence[int]) -> TokenReport:
        return await self._relays[of].report(acknowledged)

    async def cpu_seconds(self) -> float:
        return time.process_time()


@dataclass(frozen=True)
class _Part:
    """Remote object for the relay of one engine in a host with several relays."""

    host: RemoteObject[Any]
    engine_id: str

    async def call(self, what: Any, *, limit: float) -> Any:
        call = recorded(what)
        of_engine = MethodCall(call.method, (self.engine_id, *call.arguments))
        return await self.host.call(lambda _: cast(Any, of_engine), limit=limit)


class Launcher:
    """Launcher for engines that already run.

    Engines are assigned to `hosts` in rotation, which read their streams. If `hosts` is empty, this
    process reads the streams.
    """

    def __init__(
        self, config: RunConfig, urls: Sequence[str], hosts: Sequence[RemoteObject[Any]]
    ) -> None:
        self._config, self._urls, self._hosts = config, urls, hosts
        self._pace = Pace()

    async def launch(self, index: int) -> EngineClient:
        engine_id, url, engines = f"engine{index}", self._urls[index], self._config.engines
        server = await SGLangClient.connect(engine_id, url, engines)
        if not self._hosts:
            return server
        host = self._hosts[index % len(self._hosts)]
        await host.call(lambda host: host.serve(engine_id, url, engines), limit=_LIMIT_SECONDS)
        part: Any = _Part(host, engine_id)
        calls = HostCalls(part, engine_id, _LIMIT_SECONDS)
        return RelayedEngine(server, calls, self._pace)

    async def alive(self, index: int) -> bool:
        return True

    async def stop(self, index: int) -> None:
        return None


# ---------------------------------------------------------------- measuring


@dataclass
class Phase:
    """Measurements of one phase of the run, in seconds.

    Attributes:
        name: Name of the phase.
        wall: Wall time.
        manager: CPU time of the rollout manager's process.
        hosts: CPU time of the hosts' processes.
        engines: CPU time of the engines' processes.
        tokens: Number of tokens that arrived.
        loop_wall: Wall time of the event loop's longest iteration.
        loop_cpu: CPU time of the event loop's longest iteration.
    """

    name: str
    wall: float = 0.0
    manager: float = 0.0
    hosts: float = 0.0
    engines: float = 0.0
    tokens: int = 0
    loop_wall: float = 0.0
    loop_cpu: float = 0.0


@dataclass
class Figures:
    """Results of a whole run.

    Attributes:
        phases: Measurements by phase.
        reported: Number of tokens that engines reported.
        found: Number of checked tokens in the store.
        trajectories: Number of trajectories with tokens in the store.
        warnings: The manager's newest warnings by name.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    reported: int = 0
    found: int = 0
    trajectories: int = 0
    warnings: dict[str, str] = field(default_factory=dict)


class Run:
    """A run of one rollout manager with stub engines."""

    def __init__(
        self,
        config: RunConfig,
        urls: Sequence[str],
        hosts: Sequence[RemoteObject[Any]],
        folder: Path,
    ) -> None:
        task: Any = Counting()
        self._config, self._urls, self._hosts = config, urls, hosts
        self._store_file = folder / "store.sqlite"
        self.figures = Figures()
        self.manager = RolloutManager(
            config,
            task=task,
            scorers=task,
            launcher=Launcher(config, urls, hosts),
            store_file=self._store_file,
            events_directory=folder / "events",
        )

    @contextlib.asynccontextmanager
    async def phase(self, name: str) -> Any:
        """Measure the block and record it as phase `name`."""
        phase = self.figures.phases[name] = Phase(name)
        hosts, engines = await self._host_seconds(), (await self._engines())[1]
        tokens = self.tokens
        ticker = asyncio.create_task(_tick(phase))
        wall, manager = time.perf_counter(), time.process_time()
        yield
        phase.wall = time.perf_counter() - wall
        phase.manager = time.process_time() - manager
        ticker.cancel()
        phase.tokens = self.tokens - tokens
        phase.hosts = await self._host_seconds() - hosts
        phase.engines = (await self._engines())[1] - engines
        print(phase, file=sys.stderr)

    async def _host_seconds(self) -> float:
        asked = [
            host.call(lambda one: one.cpu_seconds(), limit=_LIMIT_SECONDS) for host in self._hosts
        ]
        return float(sum(await asyncio.gather(*asked)))

    @property
    def tokens(self) -> int:
        """Number of tokens that have arrived."""
        return int(self.manager.status().get("tokens", 0))

    async def until(self, tokens: int) -> None:
        """Wait until `tokens` tokens have arrived."""
        async with asyncio.timeout(_LIMIT_SECONDS):
            while self.tokens < tokens:
                await asyncio.sleep(_TICK_SECONDS)

    async def stop_generation(self, number: int) -> list[str]:
        """Start the update to version `number`, which aborts all requests; return engine IDs."""
        return [engine.engine_id for engine in await self.manager.begin_update(0, number)]

    async def publish(self, number: int, engine_ids: Sequence[str]) -> None:
        """Set version `number` on all engines and end the update, so that engines generate."""
        async with aiohttp.ClientSession() as http:
            for url in self._urls:
                body = {"weight_version": f"0.{number}"}
                async with http.post(f"{url}/update_weights_from_disk", json=body) as answer:
                    answer.raise_for_status()
        await self.manager.end_update(0, number, engine_ids, False)

    async def _engines(self) -> tuple[int, float]:
        """Return the number of tokens that engines reported, and their processes' CPU time."""
        reported, seconds = 0, {}
        async with aiohttp.ClientSession() as http:
            for url in self._urls:
                async with http.get(f"{url}/stub") as answer:
                    stub = await answer.json()
                reported += stub["reported"]
                seconds[stub["process"]] = stub["cpu_seconds"]
        return reported, sum(seconds.values())

    async def finish(self) -> Figures:
        """Stop the manager, check the stored tokens, and return the results.

        Raises:
            ValueError: The store does not contain exactly the tokens that engines reported.
        """
        self.figures.reported = (await self._engines())[0]
        session = self.manager._session
        assert session is not None
        self.figures.warnings = dict(session.driver.statistics.warnings)
        await self.manager.stop()
        await self._check()
        return self.figures

    async def _check(self) -> None:
        """Check each stored token and log-prob; raise ValueError if one is wrong or missing."""
        store = TrajectoryStore.open(self._store_file, lineage=1)
        for trajectory in [t for g in store.unconsumed_groups() for t in g.trajectories]:
            if not trajectory.segments:
                continue
            tokens = np.concatenate([s.token_ids for s in trajectory.segments])
            logprobs = np.concatenate([s.logprobs for s in trajectory.segments])
            last = int(trajectory.prompt.token_ids[-1])
            if not np.array_equal(tokens, (last + 1 + np.arange(len(tokens))) % VOCABULARY):
                raise ValueError(f"trajectory {trajectory.trajectory_id} has wrong tokens")
            if not np.allclose(logprobs, logprob(tokens), atol=1e-6):
                raise ValueError(f"trajectory {trajectory.trajectory_id} has wrong log-probs")
            self.figures.trajectories += 1
            self.figures.found += len(tokens)
        await store.close()
        if self.figures.found != self.figures.reported:
            raise ValueError(
                f"the store has {self.figures.found} of {self.figures.reported} reported tokens. "
                f"Newest warnings: {self.figures.warnings}"
            )


async def _tick(phase: Phase) -> None:
    """Measure the longest iterations of the event loop until the task is canceled."""
    while True:
        wall, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(_TICK_SECONDS)
        late = time.perf_counter() - wall - _TICK_SECONDS
        phase.loop_wall = max(phase.loop_wall, late)
        phase.loop_cpu = max(phase.loop_cpu, time.thread_time() - cpu)


async def measure(run: Run, streams: int, seconds: float) -> Figures:
    """Measure all phases of a run: submit, steady, abort all, submit again; return the results."""
    await run.manager.start()
    # The manager's host also tunes the garbage collector.
    tune_gc()
    await run.manager.attach(ResumePoint(0))
    ids = await run.stop_generation(0)
    async with run.phase("first submit"):
        await run.publish(0, ids)
        await run.until(streams)
    await asyncio.sleep(_SETTLE_SECONDS)
    async with run.phase("steady"):
        await asyncio.sleep(seconds)
    async with run.phase("abort all"):
        ids = await run.stop_generation(1)
    before = run.tokens
    async with run.phase("submit again"):
        await run.publish(1, ids)
        await run.until(before + streams)
    await asyncio.sleep(_SETTLE_SECONDS)
    await run.stop_generation(2)
    return await run.finish()


def rows_of(figures: Figures, wanted: float) -> list[tuple[str, ...]]:
    """Return a row for each phase; `wanted` is the full rate in tokens per second."""
    rows = []
    for phase in figures.phases.values():
        times = [phase.manager, phase.manager + phase.hosts, phase.engines]
        shares = [f"{seconds:.2f} s" for seconds in times]
        if phase.name == "steady":
            full = wanted / max(phase.tokens, 1)
            shares = [f"{100 * seconds * full:.1f} %" for seconds in times]
        rate = f"{phase.tokens / phase.wall:,.0f}"
        loop = [f"{1e3 * seconds:.0f} ms" for seconds in (phase.loop_wall, phase.loop_cpu)]
        rows.append((phase.name, f"{phase.wall:.2f} s", rate, *shares, *loop))
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=4096, help="N', requests in flight")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=4, help="processes that read streams")
    parser.add_argument("--stubs", type=int, default=1, help="processes of the engines")
    parser.add_argument("--rate", type=float, default=40, help="tokens per second of a stream")
    parser.add_argument("--interval", type=int, default=64, help="engines.stream_interval")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of the phase `steady`")
    parser.add_argument("--direct", action="store_true", help="the manager reads the streams")
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    config = settings(arguments.streams, arguments.engines, arguments.interval)
    with (
        tempfile.TemporaryDirectory(prefix="streams-") as scratch,
        local_backend(Path(scratch)) as backend,
        stub_engines(
            arguments.engines, arguments.stubs, arguments.interval, arguments.rate
        ) as urls,
    ):
        names = [] if arguments.direct else [f"host{i}" for i in range(arguments.hosts)]
        hosts = [backend.start(Relays, name=name) for name in names]
        run = Run(config, urls, hosts, Path(scratch))
        figures = uvloop.run(measure(run, arguments.streams, arguments.seconds))
    wanted = arguments.streams * arguments.rate
    header = "part | took | tokens/s | manager CPU | with hosts | stub CPU | loop | loop, CPU"
    text = (
        f"{arguments.streams:,} streams over {arguments.engines} engines, with a full rate of "
        f"{wanted:,.0f} tokens/s. {figures.found:,} of {figures.reported:,} tokens are stored, in "
        f"{figures.trajectories:,} trajectories. The load is {os.getloadavg()[0]:.1f}.\n\n"
        f"{table(header, rows_of(figures, wanted))}"
    )
    print(*figures.warnings.items(), sep="\n")
    publish("benchmarks.streams", "Thousands of streams", text, arguments.out)


if __name__ == "__main__":
    # The module is imported by its name, because the processes of the hosts import the class
    # `Relays` from the module that defines it.
    from benchmarks import streams

    streams.main()
