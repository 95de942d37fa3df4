"""Runs a rollout manager whose trainer receives some batches, for test_power_loss.py.

`python -m tests.store.powerless_process RUN BATCHES STORE_DIRECTORY` prints one JSON line for each
batch that the trainer received: the batch's step, the store's position that came with the batch,
and the ids of its trajectories. After the first batch a checkpoint is made, and one line has its
position. The process then ends without closing anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from megatron_async.rollout.manager import ResumePoint
from tests.rollout.stand_ins import settings
from tests.rollout.test_manager import Trainer


def emit(**line: object) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())


async def run_manager(run: Path, batches: int, directory: str) -> None:
    config = settings("async")
    store = config.store.model_copy(update={"directory": directory})
    trainer = Trainer(run, config.model_copy(update={"store": store}))
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    for step in range(batches):
        batch = await trainer.batch()
        emit(step=batch.step, position=batch.store_position, ids=batch.trajectory_ids_S.tolist())
        await trainer.publish(0, step + 1)
        if step == 0:
            emit(checkpoint=(await trainer.manager.position(0))["store_position"])
            assert trainer.manager._session is not None
            await trainer.manager._session.store._replicator.finish()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(run_manager(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
