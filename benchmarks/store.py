"""How fast the trajectory store writes, reopens and copies itself, on this machine.

    python -m benchmarks.store [--directory DIR] [--trajectories 4096] [--tokens 1024]
        [--out benchmarks/results/store.md]

Prints one table; with --out, also writes it with the command, the date and the machine. Lines:
- sustained append: `TrajectoryStore.append` in chunks of 64 tokens to all trajectories in turn,
  from an asyncio loop, until all is committed; tokens per second, of wall time and of CPU time
  (of both threads together: what a busy machine changes least).
- longest append: the largest time that one call of `append` took, the event loop's stall.
- longest loop gap: the largest pause that a 1 ms ticker saw in the same loop, minus its period.
- durable commit: a small write and `sync(durable=True)`, as at the emission of each batch: median
  and longest of 50.
- compaction: 32 groups of 8 consumed trajectories of 4096 tokens leave the store, then one group of
  16 of 131072 tokens: tokens per second, the longest piece of it on the writer's thread (by the
  clock and in CPU time), and the longest that a commit and the event loop waited meanwhile.
- reopen: `TrajectoryStore.open` of a store killed with all trajectories running.
- list: all trajectories by state, as `megatron-async trajectories` reads them.
- replica: the copy of a checkpoint into the run directory.
- damaged: opening the same file with a page of zeros in its middle, which the replica replaces.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sqlite3
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import publish, table
from megatron_async.config.rollout import StoreConfig
from megatron_async.store.reader import StoreReader
from megatron_async.store.recovery import copy_database
from megatron_async.store.schema import PAGE_BYTES
from megatron_async.store.store import TrajectoryStore
from megatron_async.store.writer import Job
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Prompt,
    RequestKey,
    TrajectoryState,
)

CHUNK = 64
COMPACTIONS = ((32, 8, 4096), (1, 16, 131_072))  # groups, trajectories of each, their tokens
_TICK = 0.001
_LOOP_SHARE = 64  # appends between two turns of the event loop


class LoopGap:
    """Measures the longest pause of the event loop within an `async with` block, in seconds."""

    async def __aenter__(self) -> LoopGap:
        self.longest = 0.0
        self._ticking = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            self.longest = max(self.longest, time.perf_counter() - before - _TICK)


async def append_all(
    store: TrajectoryStore, requests: list[RequestKey], chunks: int
) -> dict[str, float]:
    """Append `chunks` chunks to each request.

    Returns:
        Seconds: of all (`wall`), of the CPU (`cpu`), of the longest call (`append`), and the
        longest pause of the event loop (`gap`).
    """
    tokens = np.arange(CHUNK, dtype=np.int32)
    logprobs = np.linspace(-3, 0, CHUNK, dtype=np.float32)
    version = PolicyVersion(0, 0)
    longest = 0.0
    async with LoopGap() as gap:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(chunks):
            for place, request in enumerate(requests):
                before = time.perf_counter()
                store.append(request, tokens, logprobs, version, "engine-0")
                longest = max(longest, time.perf_counter() - before)
                if place % _LOOP_SHARE == 0:
                    await asyncio.sleep(0)
        await store.sync()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu, "append": longest, "gap": gap.longest}


async def durable_commits(store: TrajectoryStore, requests: list[RequestKey]) -> list[float]:
    """Milliseconds of each."""
    took = []
    for request in requests[:50]:
        store.end_request(request)
        store.begin_request(request.trajectory_id)
        before = time.perf_counter()
        await store.sync(durable=True)
        took.append((time.perf_counter() - before) * 1e3)
    return took


async def compaction(directory: Path, groups: int, size: int, length: int) -> tuple[str, str]:
    """One line of the table."""
    name = f"compaction of {groups} x {size} x {length} tokens"
    settings = StoreConfig(compact_after_checkpoints=1)
    store = TrajectoryStore.open(directory / name / "trajectories.sqlite", settings)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 150_000, length).astype(np.int32)
    logprobs = -random.random(length).astype(np.float32)
    group_ids = []
    for _ in range(groups):
        group = store.add_group(Prompt(np.arange(200, dtype=np.int32), "benchmark"), size)
        group_ids.append(group.group_id)
        for trajectory_id in (t.trajectory_id for t in group.trajectories):
            request = store.begin_request(trajectory_id)
            for start in range(0, len(tokens), CHUNK):
                part = slice(start, start + CHUNK)
                version = PolicyVersion(0, 0)
                store.append(request, tokens[part], logprobs[part], version, "engine-0")
            store.end(trajectory_id, FinishReason.STOP)
            await store.sync()
            await store.set_reward(trajectory_id, 1.0)
    store.mark_batched(group_ids, 0)
    await store.sync(durable=True)
    wait = piece = piece_cpu = 0.0
    running = True
    run = store._writer.run

    def timed(job: Job) -> Future[Any]:
        def work(connection: sqlite3.Connection) -> Any:
            nonlocal piece, piece_cpu
            before, cpu = time.perf_counter(), time.thread_time()
            try:
                return job(connection)
            finally:
                piece = max(piece, time.perf_counter() - before)
                piece_cpu = max(piece_cpu, time.thread_time() - cpu)

        return run(work)

    store._writer.run = timed  # type: ignore[method-assign]

    async def commits() -> None:
        nonlocal wait
        while running:
            before = time.perf_counter()
            await store.sync()
            wait = max(wait, time.perf_counter() - before)
            await asyncio.sleep(20 * _TICK)

    async with LoopGap() as gap:
        committing = asyncio.create_task(commits())
        before = time.perf_counter()
        await store.checkpoint_finalized(1, [])
        await store._compactor.finish()
        took = time.perf_counter() - before
        running = False
        await committing
    exported = store.export_file.stat().st_size
    await store.close()
    total = groups * size * length
    return name, (
        f"{total / took / 1e6:.2f} M tokens/s; longest piece {piece * 1e3:.0f} ms "
        f"({piece_cpu * 1e3:.0f} ms of CPU), longest commit {wait * 1e3:.0f} ms, longest loop gap "
        f"{gap.longest * 1e3:.0f} ms; {exported / total:.1f} bytes/token exported"
    )


async def measure(directory: Path, trajectories: int, tokens: int) -> list[tuple[str, str]]:
    """The table's lines about the store itself."""
    # First, while the process holds little that Python's garbage collector would stop for.
    compactions = [await compaction(directory, *what) for what in COMPACTIONS]
    path = directory / "run" / "trajectories.sqlite"
    store = TrajectoryStore.open(path)
    prompt = Prompt(np.arange(64, dtype=np.int32), "benchmark")
    ids: list[int] = []
    while len(ids) < trajectories:
        group = store.add_group(prompt, 8)
        ids += [t.trajectory_id for t in group.trajectories]
    requests = [store.begin_request(trajectory_id) for trajectory_id in ids]
    await store.sync()
    chunks = -(-tokens // CHUNK)
    took = await append_all(store, requests, chunks)
    total = len(ids) * chunks * CHUNK
    durable = await durable_commits(store, requests)
    killed = directory / "killed"
    shutil.copytree(path.parent, killed, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    await store.close()
    size = path.stat().st_size

    start = time.perf_counter()
    again = TrajectoryStore.open(killed / path.name, lineage=1)
    reopen = time.perf_counter() - start
    found = sum(again.load_trajectory(i).response_length for i in ids)
    assert found == total, f"{found} of {total} tokens came back"
    await again.close()

    start = time.perf_counter()
    reader = StoreReader(path)
    listed = len(reader.summaries(TrajectoryState.RUNNING))
    reader.close()
    listing = time.perf_counter() - start
    assert listed == len(ids)

    start = time.perf_counter()
    copy_database(path, path.with_name("trajectories.replica.sqlite"))
    copying = time.perf_counter() - start
    with path.open("r+b") as file:
        file.seek(size // 2 // PAGE_BYTES * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))
    start = time.perf_counter()
    mended = TrajectoryStore.open(path, lineage=1)
    mending = time.perf_counter() - start
    assert mended.recovery is not None
    assert "lost" not in mended.recovery.message
    await mended.close()

    return [
        ("trajectories x tokens", f"{len(ids)} x {chunks * CHUNK} = {total / 1e6:.2f} M tokens"),
        ("sustained append", f"{total / took['wall'] / 1e6:.2f} M tokens/s"),
        ("the same, per CPU second", f"{total / took['cpu'] / 1e6:.2f} M tokens"),
        ("longest append", f"{took['append'] * 1e3:.1f} ms"),
        ("longest loop gap", f"{took['gap'] * 1e3:.1f} ms"),
        ("durable commit", f"{np.median(durable):.1f} ms, longest {max(durable):.1f} ms"),
        ("file", f"{size / 2**20:.1f} MiB, {size / total:.2f} bytes/token (8 are data)"),
        *compactions,
        ("reopen after a kill", f"{reopen:.2f} s"),
        ("list", f"{listing:.2f} s"),
        ("replica", f"{copying:.2f} s for {size / 2**20:.1f} MiB"),
        ("damaged, one page lost", f"{mending:.2f} s"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, help="where files are made (default: temporary)")
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="of each trajectory")
    parser.add_argument("--out", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="store-benchmark-", dir=arguments.directory
    ) as directory:
        sizes = (arguments.trajectories, arguments.tokens)
        rows = asyncio.run(measure(Path(directory), *sizes))
    rows.append(("load of the last minute (its own included)", f"{os.getloadavg()[0]:.1f}"))
    text = table("what | measured", rows) + f"\n\nSQLite {sqlite3.sqlite_version}"
    publish("benchmarks.store", "The trajectory store", text, arguments.out)


if __name__ == "__main__":
    main()
