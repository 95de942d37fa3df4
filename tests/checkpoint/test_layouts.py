"""Tests checkpoints of several ranks: memory use, a full disk of one rank, and a killed save."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.writer import SaveJob
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import ComponentFailure
from megatron_async.models.tiny_model import TinyModel, random_model
from megatron_async.trainer.step import PolicyTrainer
from tests.distributed import RankFailure, run_ranks
from tests.trainer.cases import ragged_batch, settings, trainer_session

pytestmark = pytest.mark.slow

TP2 = {"parallel": {"ranks": 2, "tensor": 2}}
DP2 = {"parallel": {"ranks": 2}}


def train(trainer: PolicyTrainer, steps: int) -> list[float]:
    return [trainer.train_batch(ragged_batch(trainer.step)).loss for _ in range(steps)]


def full_disk_on_one_rank(model_dir: Path, root: Path) -> str:
    """On every rank, return the message of a save that fails; check that the next save succeeds."""
    config = settings(model_dir, TP2)
    checkpoints = CheckpointManager(root, CheckpointConfig())
    write = SaveJob._write_files

    def full(job: SaveJob) -> Any:
        if int(os.environ["RANK"]) == 1:
            raise OSError(28, "No space left on device")
        return write(job)

    with trainer_session(config) as trainer:
        train(trainer, 1)
        checkpoints.save(trainer, {})
        train(trainer, 1)
        message = ""
        with mock.patch.object(SaveJob, "_write_files", full):
            try:
                checkpoints.save(trainer, {})
                checkpoints.wait()
            except ComponentFailure as failure:
                message = str(failure)
        if os.environ["RANK"] == "0":  # Other ranks may see the next save's directory.
            names = sorted(path.name for path in root.iterdir())
            assert names == ["step_000001"], names
        checkpoints.save(trainer, {})
        checkpoints.close()
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.step == 2
    return message


def test_save_fails_on_all_ranks_when_one_ranks_disk_is_full(
    model_dir: Path, tmp_path: Path
) -> None:
    for message in run_ranks(full_disk_on_one_rank, 2, model_dir, tmp_path, timeout_seconds=90):
        assert "No space left on device" in message
        assert "step_000001" in message


def killed_while_saving(model_dir: Path, root: Path) -> None:
    """On rank 0, kill this process after all files of a save are written and before its manifest
    is."""
    config = settings(model_dir, DP2)
    checkpoints = CheckpointManager(root, CheckpointConfig(asynchronous=False))
    with trainer_session(config) as trainer:
        train(trainer, 1)
        checkpoints.save(trainer, {})
        train(trainer, 1)

        def die(job: SaveJob) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(SaveJob, "_commit", die):
            checkpoints.save(trainer, {})


def resumed_step(model_dir: Path, root: Path) -> int:
    """Resume a trainer from the newest checkpoint; return its step."""
    checkpoints = CheckpointManager(root, CheckpointConfig())
    with trainer_session(settings(model_dir, DP2)) as trainer:
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(trainer, newest)
        return trainer.step


def test_resume_uses_previous_checkpoint_when_save_was_killed(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure):
        run_ranks(killed_while_saving, 2, model_dir, tmp_path, timeout_seconds=60)
    assert run_ranks(resumed_step, 2, model_dir, tmp_path, timeout_seconds=60) == [1, 1]


MEGABYTE = 1 << 20
# Memory for the checksum's chunks, a buffer for reading, the header, and the allocator's cache.
SLACK = 40 * MEGABYTE


def peak_growth(action: Callable[[], object]) -> int:
    """Return by how many resident bytes this process grows at most during `action`."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = resident("VmRSS:")
    action()
    return resident("VmHWM:") - before


def memory(model_dir: Path, root: Path) -> dict[str, tuple[int, int, int]]:
    """Return, for each kind of optimizer, this rank's state and the growth by a save and by a load.

    All three are in bytes.
    """
    found = {}
    for distributed in (True, False):
        checkpoints = CheckpointManager(root / str(distributed), CheckpointConfig())
        config = settings(model_dir, {**DP2, "optimizer": {"distributed": distributed}})
        with trainer_session(config) as trainer:

            def save() -> None:
                checkpoints.save(trainer, {})  # noqa: B023 - called immediately
                checkpoints.close()  # noqa: B023

            saving = peak_growth(save)
            newest = checkpoints.newest()
            assert newest is not None
            loading = peak_growth(lambda: checkpoints.load(trainer, newest))  # noqa: B023
            state = sum(p.numel() for p in trainer.wrapped.parameters()) * 12
            found[str(distributed)] = (state, saving, loading)
    return found


def test_save_and_load_use_no_more_memory_than_the_ranks_share(tmp_path: Path) -> None:
    """With two data-parallel ranks, each copies half of the state at a save; a load copies nothing.

    After a load the weights go from rank to rank bucket by bucket, as after any step. On a CPU all
    weights are one bucket, which gloo copies.
    """
    shape = TinyModel(hidden_size=512, layers=4, heads=8, kv_heads=8, head_dim=64, ffn_size=2048)
    random_model(shape, 0).save_pretrained(str(tmp_path / "model"))
    for found in run_ranks(memory, 2, tmp_path / "model", tmp_path, timeout_seconds=200):
        for state, saving, loading in found.values():
            assert state > 150 * MEGABYTE, "the share must be far above the slack"
            assert saving < state / 2 + SLACK
            assert loading < state / 3 + SLACK
