"""Tests that no batch is trained twice when only the manager's node loses power."""

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


def run_until_power_loss(folder: Path, directory: str) -> list[dict[str, Any]]:
    """Run a manager until it loses power; return the lines that it printed.

    Below `folder`/world are then only files that it had forced to disk.
    """
    run, durable = folder / "world" / "run", folder / "durable"
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.store.powerless_process"]
    process = subprocess.run(
        [*command, str(run), str(BATCHES), directory],
        env=keeping(folder / "world", durable),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    shutil.rmtree(folder / "world")
    durable.rename(folder / "world")
    return [json.loads(line) for line in process.stdout.splitlines()]


@needs_compiler
@pytest.mark.parametrize("where", ["in the run directory", "on a disk of the node"])
def test_batch_is_on_disk_before_the_trainer_receives_it(tmp_path: Path, where: str) -> None:
    """Everything that was not forced to disk is lost, such as commits after that of the batch."""
    directory = str(tmp_path / "world" / "scratch") if where != "in the run directory" else ""
    lines = run_until_power_loss(tmp_path, directory)
    batches = [line for line in lines if "step" in line]
    assert [batch["step"] for batch in batches] == list(range(BATCHES))
    file, settings = tmp_path / "world" / "run" / "store.sqlite", StoreConfig(directory=directory)

    async def manager_that_comes_back() -> None:
        store = TrajectoryStore.open(file, settings, step=BATCHES, position=batches[-1]["position"])
        assert store.recovery is None
        assert unconsumed_ids(store).isdisjoint(i for batch in batches for i in batch["ids"])
        assert list(store.batch_sizes()) == list(range(BATCHES))
        await store.close()

    async def resume_without_the_node() -> None:
        """Resume from the checkpoint's replica in the run directory, without the database."""
        store = TrajectoryStore.open(
            file, settings, lineage=1, step=1, parent=0, position=lines[1]["checkpoint"]
        )
        assert store.recovery is not None
        assert not store.recovery.behind
        assert unconsumed_ids(store).isdisjoint(batches[0]["ids"])
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


def unconsumed_ids(store: TrajectoryStore) -> set[int]:
    return {t.trajectory_id for group in store.unconsumed_groups() for t in group.trajectories}
