"""Counters of a run's processes in memory-mapped files, for `benchmarks.restart`.

A value that a process has written to a memory-mapped file survives a kill of the process. The
counters therefore contain the number of tokens that engines had generated at a SIGKILL. `COUNTING`
adds the counters to the processes of a run (`tests/crash/injection.py`).
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
TRAINED_TOKENS = 64
"""Tokens of each response that the trainer gets. All tokens would take minutes on two cores."""
_TRAJECTORY = re.compile(r"(?<![\w-])t(\d+)-\d+;")


class Counters:
    """The numbers in `FIELDS` and one number for each trajectory, in a memory-mapped file.

    `first` and `last` are times in seconds since the epoch. Numbers that were never set are 0.
    """

    def __init__(self, file: Path, *, new: bool = True) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = (len(FIELDS) + MAX_TRAJECTORIES,)
        self._all = np.asarray(np.memmap(file, "f8", "w+" if new else "r", shape=shape))

    @property
    def trajectories(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Writable array with the number of each trajectory."""
        return self._all[len(FIELDS) :]

    def __getitem__(self, name: str) -> float:
        return float(self._all[FIELDS.index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        self._all[FIELDS.index(name)] = value

    def happened(self) -> None:
        """Set `last` to the current time; also set `first` if it is not set."""
        now = time.time()
        self["first"] = self["first"] or now
        self["last"] = now

    def waited(self, seconds: float) -> None:
        """Add a wait of `seconds` to the number, the sum and the maximum of waits."""
        self["events"] += 1
        self["seconds"] += seconds
        self["longest"] = max(self["longest"], seconds)


@cache
def of_this_process(kind: str) -> Counters:
    """Return the counters of this kind for this process, in the folder that `VARIABLE` names."""
    return Counters(Path(os.environ[VARIABLE]) / f"{kind}-{os.getpid()}")


def read_counters(folder: Path, kind: str) -> list[Counters]:
    """Return the counters of this kind of all processes."""
    return [Counters(file, new=False) for file in sorted(folder.glob(f"{kind}-*"))]


@lru_cache(maxsize=4 * MAX_TRAJECTORIES)
def trajectory_of(request_id: str) -> int | None:
    """Return the trajectory ID in a request ID; None for requests of evaluations and checks."""
    found = _TRAJECTORY.search(request_id)
    return None if found is None else int(found[1])


COUNTING: Final = {
    "megatron_async.engines.simulated.engine": f"{__name__}:count_steps",
    "megatron_async.engines.relay": f"{__name__}:count_back_pressure",
    "megatron_async.engines.host": f"{__name__}:count_waits_for_the_store",
    "megatron_async.train_loop.manager_client": f"{__name__}:count_batches",
}
"""Functions that change modules, for `injection.injected`. The processes also need `VARIABLE`."""


def count_steps(module: ModuleType) -> None:
    """Count the steps and pauses of simulated engines.

    A wait is the time from the end of a step to the end of the next step. The number of a
    trajectory is its length in tokens, including the prompt, at the engine's newest token.
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
    """Count the waits of streams that are not read, because the store has not written a chunk."""
    relay_class = module.StreamRelay
    room = relay_class._room

    async def counted_room(relay: Any, stream: int) -> None:
        began = time.monotonic()
        await room(relay, stream)
        of_this_process("relay").waited(time.monotonic() - began)

    relay_class._room = counted_room


def count_waits_for_the_store(module: ModuleType) -> None:
    """Replace clients of engines by `CountingClient`."""
    launcher_class = module.HostedEngines
    launch = launcher_class.launch

    async def counted_launch(launcher: Any, index: int) -> EngineClient:
        return CountingClient(await launch(launcher, index))

    launcher_class.launch = counted_launch


def count_batches(module: ModuleType) -> None:
    """Count the tokens of the trainer's batches; cut each response to `TRAINED_TOKENS`."""
    link_class = module.RemoteLink
    next_batch = link_class.next_batch

    def counted_batch(link: Any) -> Any:
        batch = next_batch(link)
        if not isinstance(batch, TokenBatch):
            return batch
        counters = of_this_process("trainer")
        counters["tokens"] += batch.num_tokens - float(batch.prompt_lengths_S.sum())
        counters.happened()
        return cut(batch, TRAINED_TOKENS)

    link_class.next_batch = counted_batch


class CountingClient(ForwardingClient):
    """Client that also measures the time that the reader of a stream takes for each chunk.

    In this time, the reader adds the chunk to the store and, if a full chunk is not committed yet,
    waits for its commit. The number of a trajectory is the length with which its first request
    started, including the prompt.
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
    """Return the batch with each response cut to at most `tokens` tokens."""
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
