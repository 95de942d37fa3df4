"""A rollout manager whose trainer takes some batches; see test_power_loss.py.

`python -m tests.store.powerless_process RUN BATCHES STORE_DIRECTORY` prints of each batch that the
trainer got, one line: its step, the store's position that came with it, and its trajectories. After
the first there is a checkpoint, whose position is the first line. Then it is gone.
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


async def live(run: Path, batches: int, directory: str) -> None:
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
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
