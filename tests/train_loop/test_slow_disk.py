"""Tests that a stop on a slow disk takes no longer than `launch` reserves with Slurm: a pending
save, then the final save."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megatron_async.checkpoint.files import PieceFile
from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.launcher.estimates import Checkpoints
from megatron_async.models.shape import shape_of
from megatron_async.train_loop.loop import TrainLoop
from megatron_async.train_loop.stop import StopRequest
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session, write_model

WRITE_SECONDS, STEP_SECONDS = 2.0, 0.5
EVERY = 2


def limit_writes(monkeypatch: pytest.MonkeyPatch, bytes_per_second: float) -> None:
    """Limit the write rate of checkpoint files."""
    add = PieceFile.add

    def add_slowly(file: PieceFile, key: str, piece: Tensor) -> None:
        add(file, key, piece)
        time.sleep(piece.nbytes / bytes_per_second)

    monkeypatch.setattr(PieceFile, "add", add_slowly)


def test_train_loop_stop_ends_within_the_estimated_stop_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives when the step after the start of a save begins, so that the save has
    written nothing."""
    model = write_model(tmp_path / "model")
    size = Checkpoints.of(settings(model), shape_of(settings(model))).size
    checkpoint = {"every_steps": EVERY, "write_gb_per_s": size / WRITE_SECONDS / 1e9}
    config = settings(model, {"steps": 8, "checkpoint": checkpoint})
    stop, stop_times = StopRequest(), []
    directory = tmp_path / "checkpoints"
    monkeypatch.setattr(TrainLoop, "_publish", lambda *_, **__: None)
    monkeypatch.setattr(TrainLoop, "_write", lambda *_: None)

    with single_process(), trainer_session(config) as trainer:

        def next_batch() -> Any:
            if trainer.step == EVERY:
                stop_times.append(time.monotonic())
                stop._signalled = True
                time.sleep(STEP_SECONDS)
            return ragged_batch(trainer.step)

        link: Any = SimpleNamespace(
            next_batch=next_batch, position=dict, checkpoint_finalized=lambda *_: None
        )
        limit_writes(monkeypatch, size / WRITE_SECONDS)
        saves = CheckpointManager(directory, config.checkpoint)
        loop: Any = TrainLoop(
            config=config,
            trainer=trainer,
            publisher=None,  # type: ignore[arg-type]
            checkpoints=saves,
            link=link,
            metrics=None,
            stop=stop,
        )
        assert loop.run() is False
        elapsed = time.monotonic() - stop_times[0]

    assert [found.step for found in list_checkpoints(directory)] == [EVERY + 1, EVERY]
    on_disk = sum(file.stat().st_size for file in directory.rglob("*.safetensors"))
    assert on_disk == pytest.approx(2 * size, rel=0.1), (
        "the estimated size must equal the written size"
    )
    expected = max(WRITE_SECONDS, STEP_SECONDS) + WRITE_SECONDS
    assert 0.9 * expected < elapsed < expected + 2.0
