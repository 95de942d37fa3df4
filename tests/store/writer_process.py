"""Runs a rollout manager with a tiny trainer in one process, which test_kill.py kills.

`python -m tests.store.writer_process RUN_DIR LINEAGE SEED STORE_DIRECTORY` resumes from the newest
manifest. It prints one unbuffered line for everything that it has appended, finished, batched or
committed. A line that reports durable data is printed only after the store has confirmed it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from megatron_async.config.rollout import StoreConfig
from megatron_async.store import buffers
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, PolicyVersion, TrajectoryState
from tests.trajectory.builders import STORE, append, prompt

CHUNK = 32
GROUPS_IN_WORK, SIZE, GROUPS_PER_BATCH, CHECKPOINT_EVERY = 8, 2, 2, 3


def length_of(trajectory_id: int) -> int:
    """Return the number of tokens that a trajectory will have in the end."""
    return 40 + trajectory_id * 7919 % 400


def emit(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def newest_manifest(run: Path) -> dict[str, int]:
    """Return lineage, step and store position of the newest checkpoint; all are 0 without one."""
    found = [json.loads(path.read_text()) for path in run.glob("checkpoint-*.json")]
    start = {"lineage": 0, "step": 0, "position": 0}
    return max(found, key=lambda m: (m["lineage"], m["step"]), default=start)


class Manager:
    """Generates trajectories at random paces, batches complete groups and makes checkpoints."""

    def __init__(self, run: Path, lineage: int, seed: int, directory: str) -> None:
        restored = newest_manifest(run)
        self.run, self.rng = run, random.Random(seed)
        self.step, self.lineage = restored["step"], lineage
        self.store = TrajectoryStore.open(
            run / STORE,
            StoreConfig(directory=directory, compact_after_checkpoints=2),
            lineage=lineage,
            step=restored["step"],
            parent=restored["lineage"] if lineage else None,
            position=restored["position"] if lineage else None,
        )

    async def finish(self, trajectory_id: int) -> None:
        """Generate the rest of a trajectory, whatever its state, and store its reward."""
        if self.store.load_trajectory(trajectory_id).state is not TrajectoryState.FINISHED:
            await self.generate(trajectory_id)
        await self.store.set_reward(trajectory_id, 1.0)

    async def generate(self, trajectory_id: int) -> None:
        store = self.store
        done = store.load_trajectory(trajectory_id).response_length
        store.begin_request(trajectory_id)
        while done < length_of(trajectory_id):
            count = min(self.rng.randint(1, 16), length_of(trajectory_id) - done)
            append(store, trajectory_id, done, count, PolicyVersion(self.lineage, self.step))
            done += count
            emit("appended", trajectory_id, done)
            await store.written(trajectory_id)
            await asyncio.sleep(self.rng.random() * 0.002)
        store.end(trajectory_id, FinishReason.STOP)
        await store.sync()
        emit("finished", trajectory_id)

    async def work(self) -> None:
        emit("open", self.lineage, self.step)
        tasks: dict[int, asyncio.Task[None]] = {}
        while True:
            while len(self.store.unconsumed_groups()) < GROUPS_IN_WORK:
                self.store.add_group(prompt(), SIZE)
            for group in self.store.unconsumed_groups():
                for t in group.trajectories:
                    i = t.trajectory_id
                    if t.state is not TrajectoryState.SCORED and i not in tasks:
                        tasks[i] = asyncio.create_task(self.finish(i))
            await self.train()
            await asyncio.sleep(0.002)
            for task in tasks.values():
                if task.done():
                    task.result()

    async def train(self) -> None:
        complete = [
            group.group_id
            for group in self.store.unconsumed_groups()
            if all(t.state is TrajectoryState.SCORED for t in group.trajectories)
        ]
        if len(complete) < GROUPS_PER_BATCH:
            return
        batch = complete[:GROUPS_PER_BATCH]
        self.store.mark_batched(batch, self.step)
        await self.store.sync()
        emit("batched", self.step, *batch)
        self.step += 1
        if self.step % CHECKPOINT_EVERY == 0:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        position = await self.store.sync(durable=True)
        self.store.replicate()
        content = {"lineage": self.lineage, "step": self.step, "position": position}
        target = self.run / f"checkpoint-{self.step}.json"
        temporary = target.with_suffix(".part")
        temporary.write_text(json.dumps(content))
        temporary.rename(target)
        emit("checkpoint", self.step)
        await self.store.checkpoint_finalized(self.step, [])


if __name__ == "__main__":
    buffers.CHUNK_TOKENS = CHUNK
    manager = Manager(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    asyncio.run(manager.work())
