"""Tests requests to stop, by signal or by file on any rank, after which the loop saves the trained
steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_async.train_loop.stop import STOP_FILE_VARIABLE, StopAsked, StopRequest
from tests.distributed import run_ranks


def test_stop_request_is_raised_by_file_and_by_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(tmp_path / "stop"))
    previous = signal.getsignal(signal.SIGUSR2)
    try:
        by_file, by_signal = StopRequest.from_environment(), StopRequest.from_environment()
        assert not by_file.asked()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert by_signal.asked()
        assert not by_file.asked()
        (tmp_path / "stop").touch()
        assert by_file.asked()
    finally:
        signal.signal(signal.SIGUSR2, previous)


class Loop:
    """`TrainLoop` over counting stand-ins, whose steps take no time."""

    def __init__(self, stop: StopRequest, *, every_steps: int, stop_after: int | None) -> None:
        from megatron_async.train_loop.loop import TrainLoop

        self.saved: list[int] = []
        trainer = SimpleNamespace(step=0, vocab_size=32)

        def next_batch() -> object:
            if stop_after is not None and trainer.step == stop_after:
                raise StopAsked
            return object()

        def evaluate(number: int) -> object:
            if stop_after == number:
                raise StopAsked
            return ()

        link = SimpleNamespace(next_batch=next_batch, position=dict, evaluate=evaluate)
        checkpoints = SimpleNamespace(
            save=lambda trainer, extra: self.saved.append(trainer.step),
            wait=lambda: None,
            take_finalized=list,
        )
        config: Any = SimpleNamespace(
            steps=10,
            checkpoint=SimpleNamespace(every_steps=every_steps),
        )
        self.loop: Any = TrainLoop(
            config=config,
            trainer=trainer,
            publisher=None,
            checkpoints=checkpoints,
            link=link,
            metrics=None,
            stop=stop,
        )  # type: ignore[arg-type]
        self._trainer = trainer

    def run(self) -> bool:
        def step(loop: Any, batch: object) -> None:
            self._trainer.step += 1
            if self._trainer.step == loop.config.steps:
                loop._evaluate(self._trainer.step)
            loop._save_if_due()

        from megatron_async.train_loop.loop import TrainLoop

        with (
            mock.patch.object(TrainLoop, "_publish", lambda *_, **__: None),
            mock.patch.object(TrainLoop, "_step", step),
        ):
            return self.loop.run()


def run_loops(folder: Path) -> dict[str, tuple[bool, list[int]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {}
    loop = Loop(StopRequest(), every_steps=4, stop_after=None)
    found["no request"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=6)
    found["while waiting for a batch"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=4)
    found["directly after a save"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=10)
    found["in the last evaluation"] = (loop.run(), loop.saved)
    # Only rank 1 gets the request.
    flag = folder / f"rank{dist.get_rank()}"
    if dist.get_rank() == 1:
        flag.touch()
    loop = Loop(StopRequest(flag), every_steps=4, stop_after=None)
    found["on one rank, before a step"] = (loop.run(), loop.saved)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_train_loop_stops_all_ranks_between_steps_with_a_checkpoint(tmp_path: Path) -> None:
    started = time.monotonic()
    results = run_ranks(run_loops, 2, tmp_path, timeout_seconds=60)
    assert results[0] == results[1]
    assert results[0] == {
        "no request": (True, [4, 8, 10]),
        "while waiting for a batch": (False, [4, 6]),
        "directly after a save": (False, [4]),
        "in the last evaluation": (False, [4, 8, 10]),
        "on one rank, before a step": (False, []),
    }
    assert time.monotonic() - started < 60
