"""Tests that the number of objects in a manager does not grow with its training steps."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

from tests.rollout.stand_ins import settings
from tests.rollout.test_manager import Trainer

STEPS = 100
OF_A_STEP = ("Event", "deque", "PolicyVersion", "BatchRow", "TrajectoryRecord", "GroupRecord")


async def after(trainer: Trainer, steps: range) -> Counter[str]:
    """Train `steps` and return the number of objects of each class in `OF_A_STEP`."""
    for step in steps:
        await trainer.batch()
        await trainer.publish(0, step + 1)
        if step % 10 == 9:
            await trainer.manager.position(0)
            await trainer.manager.checkpoint_finalized(0, step + 1, [])
    gc.collect()
    kinds = Counter(type(one).__name__ for one in gc.get_objects())
    return Counter({kind: kinds[kind] for kind in OF_A_STEP})


async def test_number_of_objects_does_not_grow_with_steps(tmp_path: Path) -> None:
    config = settings("async").model_copy(update={"steps": 10 * STEPS})
    trainer = await Trainer(tmp_path, config).started()
    before = await after(trainer, range(STEPS))
    more = await after(trainer, range(STEPS, 2 * STEPS)) - before
    await trainer.manager.stop()
    assert all(count < STEPS / 2 for count in more.values()), more
