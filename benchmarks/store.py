"""Measures how fast the trajectory store writes, opens and copies its database.

    python -m benchmarks.store [--directory DIR] [--trajectories 4096] [--tokens 1024]
        [--out benchmarks/results/store.md]

The program prints one table. With --out, it also writes the table with the command, the date and
the machine. The table has these lines:

- sustained append: `TrajectoryStore.append` adds chunks of 64 tokens to all trajectories, one after
  the other, in an asyncio loop, until all tokens are committed. The results are tokens per second
  of wall time and of CPU time. CPU time is that of both threads together; other work on the machine
  changes it least.
- longest append: longest duration of one call of `append`, during which the event loop stalls.
- longest loop gap: longest pause of a 1 ms ticker in the same event loop, minus its period.
- durable commit: median and longest duration of 50 small writes with `sync(durable=True)`, as at
  the emission of each batch.
- compaction: 32 groups of 8 consumed trajectories with 4096 tokens are removed from the database,
  and in a second measurement one group of 16 trajectories with 131072 tokens. The results are
  tokens per second, the longest job of the writer thread (wall and CPU time), and the longest wait
  of a commit and of the event loop during the compaction.
- reopen: `TrajectoryStore.open` after a kill while all trajectories were running.
- list: all trajectories by state, as `megatron-async trajectories` reads them.
- replica: the copy of the database that every checkpoint makes.
- damaged: `TrajectoryStore.open` of a database with one page of zeros in its middle, which is
  replaced by the replica.
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
COMPACTIONS = (
    (32, 8, 4096),
    (1, 16, 131_072),
)  # groups, trajectories per group, tokens per trajectory
_TICK = 0.001
_LOOP_SHARE = 64  # appends in one iteration of the event loop


class LoopGap:
    """Measures the longest pause of the event loop in an `async with` block, in seconds."""

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
        Seconds of wall time (`wall`), CPU time (`cpu`), the longest call (`append`), and the
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
    """Return the milliseconds of each of 50 durable commits."""
    took = []
    for request in requests[:50]:
        store.end_request(request)
        store.begin_request(request.trajectory_id)
        before = time.perf_counter()
        await store.sync(durable=True)
        took.append((time.perf_counter() - before) * 1e3)
    return took


async def compaction(directory: Path, groups: int, size: int, length: int) -> tuple[str, str]:
    """Measure one compaction; return its line of the table."""
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
    """Measure the store; return the lines of the table."""
    # Compaction is measured first, because the process still has few objects for which Python's
    # garbage collector would pause.
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
    assert found == total, f"only {found} of {total} tokens were restored"
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
    """Measure the store and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--directory", type=Path, help="parent directory of the files (default: temporary)"
    )
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each trajectory")
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
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
