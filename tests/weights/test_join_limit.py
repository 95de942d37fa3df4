"""An engine that takes the call to join the update group but never comes is named, in time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.weights import distributed
from megatron_async.weights.distributed import DistributedSender
from megatron_async.weights.http import EngineCallError
from tests.weights.fake_engine import FakeEngine, serving


class Absent(FakeEngine):
    """Neither joins nor answers until it is let go."""

    def __init__(self) -> None:
        super().__init__("works")
        self.let_go = threading.Event()

    def do_init_weights_update_group(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert self.let_go.wait(30)
        return 400, {}


def test_an_engine_that_never_joins_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "_JOIN_SECONDS", 1.5)
    sender = DistributedSender(WeightsConfig(), EngineConfig(), torch.device("cpu"))
    engine = Absent()
    with serving(engine, "absent") as address:
        began = time.monotonic()
        try:
            with pytest.raises(EngineCallError, match=r"init_weights_update_group .*within 1\.5 s"):
                sender.connect([address])
        finally:
            engine.let_go.set()
        assert time.monotonic() - began < 1.5 + 1.0 + 2.0
