"""Store every token of your own rollout loop, so that a kill loses no finished response."""

import asyncio
import sys
from pathlib import Path

import numpy as np

from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Prompt


async def rollout(run: Path) -> None:
    """Store one group of two responses; the process may be killed at any time."""
    store = TrajectoryStore.open(run / "trajectories.sqlite", lineage=0, step=0)
    group = store.add_group(Prompt(np.array([1, 2, 3], np.int32), task="toy"), size=2)
    policy = PolicyVersion(lineage=0, number=0)
    for i in (trajectory.trajectory_id for trajectory in group.trajectories):
        request = store.begin_request(i)  # only this request may append tokens
        store.append(request, [11, 12], [-0.1, -0.2], policy, "engine-0")
        await store.written(i)  # a kill loses at most the chunk that is not full yet
        store.append(request, [13], [-0.3], policy, "engine-0", end=FinishReason.STOP)
        await store.sync()  # commits the end of the response with its last tokens
        await store.set_reward(i, float(i))
    store.mark_batched([group.group_id], step=0)
    await store.sync(durable=True)  # fsync before a trainer may read the batch
    await store.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asyncio.run(rollout(folder))
    reader = StoreReader(folder / "trajectories.sqlite")  # any process may read, also during a run
    for one in reader.summaries():
        segments = reader.trajectory(one.trajectory_id).segments
        print(one.trajectory_id, one.state.value, one.reward, [len(s.token_ids) for s in segments])
