"""Counters of one run's processes in files that are mapped into memory (`benchmarks.restart`).

A page that a process has written to such a file stays there when the process is killed, so that
the counters hold what the engines had generated at the moment of a SIGKILL. `COUNTING` puts them
into the processes of a run (`tests/crash/injection.py`).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatron_async.engines.interface import (
    EngineClient,
    ForwardingClient,
    GenerationRequest,
    PauseMode,
    TokenChunk,
)

if TYPE_CHECKING:
    from megatron_async.rollout.fleet import EngineLauncher
    from megatron_async.train_loop.manager_client import RolloutLink
    from megatron_async.trajectory.batch import TokenBatch

VARIABLE = "RESTART_COUNTERS"
FIELDS = ("first", "last", "events", "longest", "seconds", "stream_seconds", "tokens", "pauses")
LARGEST_TRAJECTORIES = 8192
TRAINED_TOKENS = 64  # of each response: a model on two cores would take minutes for all of them
_TRAJECTORY = re.compile(r"(?<![\w-])t(\d+)-\d+;")


class Counters:
    """Named numbers and one number for each trajectory, in one file.

    `first` and `last` are times of day; 0 is a number that was never set.
    """

    def __init__(self, file: Path, *, new: bool = True) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = (len(FIELDS) + LARGEST_TRAJECTORIES,)
        self._all = np.asarray(np.memmap(file, "f8", "w+" if new else "r", shape=shape))

    @classmethod
    def of_this_process(cls, kind: str) -> Counters:
        """Return new counters in the directory that the environment names."""
        return cls(Path(os.environ[VARIABLE]) / f"{kind}-{os.getpid()}")

    @property
    def trajectories(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the number of each trajectory, to be read or set."""
        return self._all[len(FIELDS) :]

    def __getitem__(self, name: str) -> float:
        return float(self._all[FIELDS.index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        self._all[FIELDS.index(name)] = value

    def happened(self) -> None:
        """Set the time of the last event to now, and that of the first if there was none."""
        now = time.time()
        self["first"] = self["first"] or now
        self["last"] = now

    def waited(self, seconds: float) -> None:
        """Add one wait."""
        self["events"] += 1
        self["seconds"] += seconds
        self["longest"] = max(self["longest"], seconds)


def read_counters(folder: Path, kind: str) -> list[Counters]:
    """Return the counters of all processes of this kind."""
    return [Counters(file, new=False) for file in sorted(folder.glob(f"{kind}-*"))]


@lru_cache(maxsize=4 * LARGEST_TRAJECTORIES)
def trajectory_of(request_id: str) -> int | None:
    """Return the trajectory of a request; None for requests of evaluations and checks."""
    found = _TRAJECTORY.search(request_id)
    return None if found is None else int(found[1])


COUNTING: Final = {
    "megatron_async.engines.simulated.engine": f"{__name__}:count_steps",
    "megatron_async.engines.relay": f"{__name__}:count_back_pressure",
    "megatron_async.engines.host": f"{__name__}:count_waits_for_the_store",
    "megatron_async.train_loop.manager_client": f"{__name__}:count_batches",
}
"""Changes for `injection.injected`. The processes also need `VARIABLE`."""


# ------------------------------------------------------------ in engines and their hosts


def count_steps(module: ModuleType) -> None:
    """Count steps of the engine: the wait is the time from the end of one to that of the next.

    The number of a trajectory is its length, prompt included, as of the engine's newest token.
    """
    if "megatron_async.engines.simulated.server" not in sys.orig_argv:
        return  # another process imports the module for what it says of an engine
    engine_class, counters = module.SimulatedEngine, Counters.of_this_process("engine")
    step, pause = engine_class._step, engine_class.pause
    busy_since = 0.0

    def counted_step(engine: Any) -> None:
        nonlocal busy_since
        running = [(trajectory_of(name), one) for name, one in engine._running.items()]
        step(engine)
        lengths = {number: one.position for number, one in running if number is not None}
        if lengths:
            counters.trajectories[list(lengths)] = list(lengths.values())
            counters["tokens"] += len(lengths)
            counters.happened()
        now = time.monotonic()
        if busy_since and lengths:
            counters.waited(now - busy_since)
        busy_since = now if engine._running else 0.0

    async def counted_pause(engine: Any, mode: PauseMode) -> None:
        counters["pauses"] += bool(engine._running)
        await pause(engine, mode)

    engine_class._step = counted_step
    engine_class.pause = counted_pause


def count_back_pressure(module: ModuleType) -> None:
    """Count the waits of streams that are not read on, since the store has not written a chunk."""
    if not any(word.endswith("-host") for word in sys.orig_argv):
        return  # the rollout manager, which holds the other ends of the relays
    relay_class, counters = module.StreamRelay, Counters.of_this_process("relay")
    room = relay_class._room

    async def counted_room(relay: Any, stream: int) -> None:
        began = time.monotonic()
        await room(relay, stream)
        counters.waited(time.monotonic() - began)

    relay_class._room = counted_room


# ------------------------------------------------------------ in the manager and the trainer


def count_waits_for_the_store(module: ModuleType) -> None:
    """Let clients of engines count how long the reader of a stream takes for each chunk."""
    hosted_engines = module.HostedEngines

    def counting_engines(*arguments: Any) -> CountingLauncher:
        _time_opening()
        return CountingLauncher(hosted_engines(*arguments))

    module.HostedEngines = counting_engines  # type: ignore[attr-defined]


def count_batches(module: ModuleType) -> None:
    """Let the trainer's batches be counted and cut."""
    placed_link = module.PlacedLink

    def counting_link(*arguments: Any) -> CountingLink:
        return CountingLink(placed_link(*arguments))

    module.PlacedLink = counting_link  # type: ignore[attr-defined]


def _time_opening() -> None:
    """Count how long the store takes to be opened: it reads every token that is in it."""
    from megatron_async.store.store import TrajectoryStore

    counters, opened = Counters.of_this_process("store"), TrajectoryStore.open

    def timed(*arguments: Any, **settings: Any) -> TrajectoryStore:
        began = time.monotonic()
        store = opened(*arguments, **settings)
        counters.waited(time.monotonic() - began)
        counters.happened()
        return store

    TrajectoryStore.open = timed  # type: ignore[method-assign]


class CountingLauncher:
    """Another launcher whose clients count."""

    def __init__(self, launcher: EngineLauncher) -> None:
        self._launcher = launcher
        self._counters = Counters.of_this_process("manager")

    async def launch(self, index: int) -> EngineClient:
        return CountingClient(await self._launcher.launch(index), self._counters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


class CountingClient(ForwardingClient):
    """Another client that counts how long the reader of a stream takes for each chunk.

    That is the time to add it to the store, and to wait where a full chunk is not committed yet.
    The number of a trajectory is the length, prompt included, that its first request began with.
    """

    def __init__(self, client: EngineClient, counters: Counters) -> None:
        super().__init__(client)
        self._counters = counters

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        counters, trajectory_id = self._counters, trajectory_of(request.request_id)
        if trajectory_id is not None:
            counters.happened()
            started = counters.trajectories
            started[trajectory_id] = started[trajectory_id] or len(request.input_ids)
        since = time.monotonic()
        async for chunk in self._client.generate(request):
            came = time.monotonic()
            yield chunk
            if trajectory_id is not None:
                now = time.monotonic()
                counters.waited(now - came)
                counters["stream_seconds"] += now - since
                since = now


class CountingLink:
    """Another link that counts batches, and gives the trainer the start of each response."""

    def __init__(self, link: RolloutLink) -> None:
        self._link = link
        self._counters = Counters.of_this_process("trainer")

    def next_batch(self) -> TokenBatch | None:
        batch = self._link.next_batch()
        if batch is None:
            return None
        self._counters["tokens"] += batch.num_tokens - float(batch.prompt_lengths_S.sum())
        self._counters["events"] += 1
        self._counters.happened()
        return cut(batch, TRAINED_TOKENS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def cut(batch: TokenBatch, tokens: int) -> TokenBatch:
    """Return the batch with at most so many tokens of each response."""
    lengths_S = np.minimum(batch.lengths_S(), batch.prompt_lengths_S + tokens)
    starts = batch.cu_seqlens_S1[:-1]
    kept = np.concatenate(
        [np.arange(start, start + n) for start, n in zip(starts, lengths_S, strict=True)]
    )
    ends = np.concatenate([[0], np.cumsum(lengths_S)]).astype(batch.cu_seqlens_S1.dtype)
    per_token = {name: values[kept] for name, values in _per_token(batch)}
    columns: Mapping[str, Any] = {name: values[kept] for name, values in batch.columns.items()}
    return replace(batch, **per_token, columns=columns, cu_seqlens_S1=ends)


def _per_token(batch: TokenBatch) -> Iterator[tuple[str, Any]]:
    return ((name, values) for name, values in vars(batch).items() if name.endswith("_T"))
