"""Power is lost on the manager's node, not on the trainer's: no batch is trained twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from megatron_async.store.store import TrajectoryStore
from tests.store.disk import keeping, needs_compiler

BATCHES = 3


@needs_compiler
def test_a_batch_is_on_disk_before_the_trainer_gets_it(tmp_path: Path) -> None:
    """Without any checkpoint, and though every commit but its own may be lost."""
    run, durable = tmp_path / "run", tmp_path / "durable"
    run.mkdir()
    command = [sys.executable, "-m", "tests.store.powerless_process", str(run), str(BATCHES)]
    life = subprocess.run(
        command, env=keeping(run, durable), capture_output=True, text=True, timeout=120
    )
    assert life.returncode == 0, life.stderr
    taken = [json.loads(line) for line in life.stdout.splitlines()]
    assert [batch["step"] for batch in taken] == list(range(BATCHES))

    async def manager_that_comes_back() -> None:
        store = TrajectoryStore.open(
            durable / "store.sqlite", step=BATCHES, position=taken[-1]["position"]
        )
        offered = {
            t.trajectory_id for group in store.unconsumed_groups() for t in group.trajectories
        }
        assert store.recovery is None
        assert offered.isdisjoint(i for batch in taken for i in batch["ids"])
        assert list(store.batch_sizes()) == list(range(BATCHES))
        await store.close()

    asyncio.run(manager_that_comes_back())
