"""A trainer that is stopped in the middle of an update finds its limits passed when it goes on."""

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
def test_an_update_goes_on_after_a_stop_that_was_longer_than_its_limit() -> None:
    """SIGSTOP before the first bucket: the engine has done nothing wrong, and is kept.

    (While a bucket travels it would not do: a broadcast of gloo has a limit of its own by the
    clock.)
    """
    engine = FakeEngine("works")
    begin = engine.do_begin_weight_update
    stopped: list[float] = []

    def stop_then_begin(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not stopped:
            began = time.monotonic()
            os.kill(trainer.pid, signal.SIGSTOP)
            time.sleep(2 * LIMIT_SECONDS)
            os.kill(trainer.pid, signal.SIGCONT)
            stopped.append(time.monotonic() - began)
        return begin(body)

    engine.do_begin_weight_update = stop_then_begin  # type: ignore[method-assign]
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
    """The trainer: it publishes to the engine at `url`."""
    settings = WeightsConfig(timeout_seconds=seconds)
    sender = DistributedSender(settings, EngineConfig(), torch.device("cpu"))
    sender.connect([EngineAddress("engine", url)])
    buckets = [[("x.weight", torch.ones(256, 64))], [("y.weight", torch.ones(128))]]
    sender.send(buckets, PolicyVersion(0, 1))
    sender.close()


if __name__ == "__main__":
    send_one_version(sys.argv[1], float(sys.argv[2]))
