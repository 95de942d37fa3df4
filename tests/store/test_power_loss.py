"""Power is lost on the manager's node, not on the trainer's: no batch is trained twice."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.store.store import TrajectoryStore
from tests.store.disk import keeping, needs_compiler

BATCHES = 3


def powerless(folder: Path, directory: str) -> list[dict[str, Any]]:
    """What a manager printed whose files are now what had been forced to disk, in their place."""
    run, durable = folder / "world" / "run", folder / "durable"
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.store.powerless_process"]
    life = subprocess.run(
        [*command, str(run), str(BATCHES), directory],
        env=keeping(folder / "world", durable),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert life.returncode == 0, life.stderr
    shutil.rmtree(folder / "world")
    durable.rename(folder / "world")
    return [json.loads(line) for line in life.stdout.splitlines()]


@needs_compiler
@pytest.mark.parametrize("where", ["in the run directory", "on a disk of the node"])
def test_a_batch_is_on_disk_before_the_trainer_gets_it(tmp_path: Path, where: str) -> None:
    """Everything may be lost that was not forced to disk, as of any commit but the batch's own."""
    directory = str(tmp_path / "world" / "scratch") if where != "in the run directory" else ""
    lines = powerless(tmp_path, directory)
    taken = [line for line in lines if "step" in line]
    assert [batch["step"] for batch in taken] == list(range(BATCHES))
    file, settings = tmp_path / "world" / "run" / "store.sqlite", StoreConfig(directory=directory)

    async def manager_that_comes_back() -> None:
        store = TrajectoryStore.open(file, settings, step=BATCHES, position=taken[-1]["position"])
        assert store.recovery is None
        assert offered(store).isdisjoint(i for batch in taken for i in batch["ids"])
        assert list(store.batch_sizes()) == list(range(BATCHES))
        await store.close()

    async def resume_without_the_node() -> None:
        """Only the run directory is left: the checkpoint's replica."""
        store = TrajectoryStore.open(
            file, settings, lineage=1, step=1, parent=0, position=lines[1]["checkpoint"]
        )
        assert store.recovery is not None
        assert not store.recovery.behind
        assert offered(store).isdisjoint(taken[0]["ids"])
        assert list(store.batch_sizes()) == [0]
        await store.close()

    shutil.copytree(tmp_path / "world", tmp_path / "node lost")
    asyncio.run(manager_that_comes_back())
    shutil.rmtree(tmp_path / "world")
    (tmp_path / "node lost").rename(tmp_path / "world")
    for database in (file, *(tmp_path / "world").glob("scratch/*/store.sqlite")):
        for name in database.parent.glob(f"{database.name}*"):
            name.unlink()
    asyncio.run(resume_without_the_node())


def offered(store: TrajectoryStore) -> set[int]:
    return {t.trajectory_id for group in store.unconsumed_groups() for t in group.trajectories}
