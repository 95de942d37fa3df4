"""A rollout manager whose trainer takes some batches and no checkpoint; see test_power_loss.py.

`python -m tests.store.powerless_process FOLDER BATCHES` says of each batch that the trainer got,
one line: its step, the store's position that came with it, and its trajectories. Then it is gone.
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


async def live(folder: Path, batches: int) -> None:
    trainer = Trainer(folder, settings("async"))
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    for step in range(batches):
        batch = await trainer.batch()
        line = {
            "step": batch.step,
            "position": batch.store_position,
            "ids": batch.trajectory_ids_S.tolist(),
        }
        os.write(1, (json.dumps(line) + "\n").encode())
        if step + 1 < batches:
            await trainer.publish(0, step + 1)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2])))
