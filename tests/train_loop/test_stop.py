"""A request to stop: by signal or by file, on any rank; the loop then keeps what was trained."""

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


def test_the_file_and_the_signal_both_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A `TrainLoop` over stand-ins that count; steps are instantaneous."""

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
        def step(loop: Any, batch: object, waited: float) -> None:
            self._trainer.step += 1
            if self._trainer.step == loop.config.steps:
                loop._evaluate(self._trainer.step)
            loop._save_if_due()

        from megatron_async.train_loop.loop import TrainLoop

        with (
            mock.patch.object(TrainLoop, "_publish", lambda loop: None),
            mock.patch.object(TrainLoop, "_step", step),
        ):
            return self.loop.run()


def stops(folder: Path) -> dict[str, tuple[bool, list[int]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {}
    loop = Loop(StopRequest(), every_steps=4, stop_after=None)
    found["never asked"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=6)
    found["while waiting"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=4)
    found["just saved"] = (loop.run(), loop.saved)
    loop = Loop(StopRequest(), every_steps=4, stop_after=10)
    found["in the last evaluation"] = (loop.run(), loop.saved)
    # Only rank 1 hears of it.
    flag = folder / f"rank{dist.get_rank()}"
    if dist.get_rank() == 1:
        flag.touch()
    loop = Loop(StopRequest(flag), every_steps=4, stop_after=None)
    found["one rank, at once"] = (loop.run(), loop.saved)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_the_loop_stops_between_steps_on_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    began = time.monotonic()
    results = run_ranks(stops, 2, tmp_path, timeout_seconds=60)
    assert results[0] == results[1]
    assert results[0] == {
        "never asked": (True, [4, 8, 10]),
        "while waiting": (False, [4, 6]),
        "just saved": (False, [4]),
        "in the last evaluation": (False, [4, 8, 10]),
        "one rank, at once": (False, []),
    }
    assert time.monotonic() - began < 60
