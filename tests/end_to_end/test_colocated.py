"""Tests generation and training on the same devices: every rank releases its memory before engines
use it.

tests/rollout/test_shared_devices.py tests that the engines do so; test_recipes_on_engine.py tests
the order of both with a real engine.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import run_ranks


def releases_before_engines_start(folder: Path) -> int:
    """Return how often rank 1 had released its memory when rank 0 gave the memory to the
    engines."""
    import torch.distributed as dist

    from megatron_async.train_loop.loop import TrainLoop
    from megatron_async.trainer.offload import DeviceContents
    from megatron_async.trajectory.types import PolicyVersion

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: list[int] = []

    def keep_on_device(residence: Any) -> None:
        if rank == 1 and residence is DeviceContents.NOTHING:
            time.sleep(0.3)  # Rank 0 finishes long before.
            (folder / f"{len(list(folder.iterdir()))}").touch()

    link = SimpleNamespace(
        begin_update=lambda number: [],
        end_update=lambda *_: not found.append(len(list(folder.iterdir()))),
        verification_samples=lambda *_: None,
        verify_update=lambda *_: SimpleNamespace(
            evaluation_due=False, passed=True, warnings=[], metrics={}
        ),
        checkpoint_finalized=lambda *_: None,
    )
    config: Any = SimpleNamespace(steps=0, weights=SimpleNamespace(verify="every"))
    loop: Any = TrainLoop(
        config=config,
        trainer=SimpleNamespace(step=0, version=PolicyVersion(0, 0)),  # type: ignore[arg-type]
        publisher=SimpleNamespace(publish=lambda *_: [], settle=lambda: None),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(wait=lambda: None, take_finalized=list),  # type: ignore[arg-type]
        link=link if rank == 0 else None,  # type: ignore[arg-type]
        metrics=None,
        memory=SimpleNamespace(keep_on_device=keep_on_device),
    )
    assert loop.run()
    dist.destroy_process_group()
    return sum(found)


@pytest.mark.slow
def test_engines_get_memory_only_after_every_rank_has_released_it(tmp_path: Path) -> None:
    assert run_ranks(releases_before_engines_start, 2, tmp_path) == [1, 0]
