"""Tests that a trainer process which is stopped during an update, for longer than the update's time
limit, completes the update when it continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.transports.distributed import DistributedSender
from tests.weight_sync.fake_engine import FakeEngine, serving

LIMIT_SECONDS = 3.0


@pytest.mark.slow
def test_update_continues_after_trainer_was_stopped_longer_than_its_time_limit() -> None:
    """The trainer gets SIGSTOP before the first bucket; the engine is not at fault, and gets the
    weights.

    The trainer is not stopped during a broadcast, because gloo's broadcasts have a time limit that
    includes the time in which the process is stopped.
    """
    engine = FakeEngine("works")
    begin_update = engine.do_begin_weight_update
    stopped: list[float] = []

    def stop_trainer_then_begin(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not stopped:
            started = time.monotonic()
            os.kill(trainer.pid, signal.SIGSTOP)
            time.sleep(2 * LIMIT_SECONDS)
            os.kill(trainer.pid, signal.SIGCONT)
            stopped.append(time.monotonic() - started)
        return begin_update(body)

    engine.do_begin_weight_update = stop_trainer_then_begin  # type: ignore[method-assign]
    with serving(engine, "engine") as address:
        command = [sys.executable, "-m", "tests.weight_sync.test_stopped_trainer", address.url]
        trainer = subprocess.Popen(
            [*command, str(LIMIT_SECONDS)], stderr=subprocess.PIPE, text=True
        )
        _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors
    assert stopped and stopped[0] > LIMIT_SECONDS
    assert engine.version == "0.1" and len(engine.received) == 2


def send_one_version(url: str, seconds: float) -> None:
    """Publish one version to the engine at `url`; this function runs in the trainer process."""
    settings = WeightsConfig(timeout_seconds=seconds)
    sender = DistributedSender(settings, EngineConfig(), torch.device("cpu"))
    sender.connect([EngineAddress("engine", url)])
    buckets = [[("x.weight", torch.ones(256, 64))], [("y.weight", torch.ones(128))]]
    sender.send(buckets, PolicyVersion(0, 1))
    sender.close()


if __name__ == "__main__":
    send_one_version(sys.argv[1], float(sys.argv[2]))
