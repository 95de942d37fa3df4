"""Counters of one run's processes in files that are mapped into memory (`benchmarks.restart`).

A page that a process has written to such a file stays there when the process is killed, so that
the counters hold what the engines had generated at the moment of a SIGKILL. `COUNTING` puts them
into the processes of a run (`tests/crash/injection.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from megatron_async.engines.interface import (
    EngineClient,
    ForwardingClient,
    GenerationRequest,
    PauseMode,
    TokenChunk,
)
from megatron_async.trajectory.batch import TokenBatch

VARIABLE = "RESTART_COUNTERS"
FIELDS = ("first", "last", "events", "longest", "seconds", "tokens", "pauses")
MAX_TRAJECTORIES = 8192
TRAINED_TOKENS = 64  # of each response: a model on two cores would take minutes for all of them
_TRAJECTORY = re.compile(r"(?<![\w-])t(\d+)-\d+;")


class Counters:
    """Named numbers and one number for each trajectory, in one file.

    `first` and `last` are times of day; 0 is a number that was never set.
    """

    def __init__(self, file: Path, *, new: bool = True) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = (len(FIELDS) + MAX_TRAJECTORIES,)
        self._all = np.asarray(np.memmap(file, "f8", "w+" if new else "r", shape=shape))

    @property
    def trajectories(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The number of each trajectory, to be read or set."""
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


@cache
def of_this_process(kind: str) -> Counters:
    """Return this process's counters of one kind, in the folder that the environment names."""
    return Counters(Path(os.environ[VARIABLE]) / f"{kind}-{os.getpid()}")


def read_counters(folder: Path, kind: str) -> list[Counters]:
    """Return the counters of all processes of this kind."""
    return [Counters(file, new=False) for file in sorted(folder.glob(f"{kind}-*"))]


@lru_cache(maxsize=4 * MAX_TRAJECTORIES)
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


def count_steps(module: ModuleType) -> None:
    """Count an engine's steps: a wait is the time from the end of one to that of the next.

    The number of a trajectory is its length, prompt included, as of the engine's newest token.
    """
    engine_class = module.SimulatedEngine
    step, pause = engine_class._step, engine_class.pause
    busy_since = 0.0

    def counted_step(engine: Any) -> None:
        nonlocal busy_since
        counters = of_this_process("engine")
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
        if engine._running:
            of_this_process("engine")["pauses"] += 1
        await pause(engine, mode)

    engine_class._step = counted_step
    engine_class.pause = counted_pause


def count_back_pressure(module: ModuleType) -> None:
    """Count the waits of streams that are not read on, since the store has not written a chunk."""
    relay_class = module.StreamRelay
    room = relay_class._room

    async def counted_room(relay: Any, stream: int) -> None:
        began = time.monotonic()
        await room(relay, stream)
        of_this_process("relay").waited(time.monotonic() - began)

    relay_class._room = counted_room


def count_waits_for_the_store(module: ModuleType) -> None:
    """Let clients of engines count how long the reader of a stream takes for each chunk."""
    launcher_class = module.HostedEngines
    launch = launcher_class.launch

    async def counted_launch(launcher: Any, index: int) -> EngineClient:
        return CountingClient(await launch(launcher, index))

    launcher_class.launch = counted_launch


def count_batches(module: ModuleType) -> None:
    """Count the trainer's batches, and give it only the start of each response."""
    link_class = module.RemoteLink
    next_batch = link_class.next_batch

    def counted_batch(link: Any) -> TokenBatch | None:
        batch: TokenBatch | None = next_batch(link)
        if batch is None:
            return None
        counters = of_this_process("trainer")
        counters["tokens"] += batch.num_tokens - float(batch.prompt_lengths_S.sum())
        counters.happened()
        return cut(batch, TRAINED_TOKENS)

    link_class.next_batch = counted_batch


class CountingClient(ForwardingClient):
    """A client that also counts how long the reader of a stream takes for each chunk.

    That is the time to add it to the store, and to wait where a full chunk is not committed yet.
    The number of a trajectory is the length, prompt included, that its first request began with.
    """

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        counters = of_this_process("manager")
        trajectory_id = trajectory_of(request.request_id)
        if trajectory_id is not None:
            counters.happened()
            started = counters.trajectories
            started[trajectory_id] = started[trajectory_id] or len(request.input_ids)
        async for chunk in self._client.generate(request):
            came = time.monotonic()
            yield chunk
            if trajectory_id is not None:
                counters.waited(time.monotonic() - came)


def cut(batch: TokenBatch, tokens: int) -> TokenBatch:
    """Return the batch with at most `tokens` tokens of each response."""
    lengths_S = np.minimum(batch.lengths_S(), batch.prompt_lengths_S + tokens)
    starts = batch.cu_seqlens_S1[:-1]
    kept = np.concatenate(
        [np.arange(start, start + n) for start, n in zip(starts, lengths_S, strict=True)]
    )
    changes: dict[str, Any] = {
        name: values[kept] for name, values in vars(batch).items() if name.endswith("_T")
    }
    changes["columns"] = {name: values[kept] for name, values in batch.columns.items()}
    ends = np.concatenate([[0], np.cumsum(lengths_S)])
    return replace(batch, cu_seqlens_S1=ends.astype(batch.cu_seqlens_S1.dtype), **changes)
