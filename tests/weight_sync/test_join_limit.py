"""An engine that never joins the update group, or freezes in it, is named, in time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineCallError
from megatron_async.weight_sync.transports import base as transport
from megatron_async.weight_sync.transports import distributed
from megatron_async.weight_sync.transports.base import seconds_to_give_up
from megatron_async.weight_sync.transports.distributed import DistributedSender
from tests.weight_sync.fake_engine import KNOWN, FakeEngine, serving


class Absent(FakeEngine):
    """Neither joins nor answers until it is let go."""

    def __init__(self) -> None:
        super().__init__("works")
        self.let_go = threading.Event()

    def do_init_weights_update_group(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert self.let_go.wait(30)
        return 400, {}


class Freezes(FakeEngine):
    """Joins, and then answers nothing more until it is let go."""

    def __init__(self) -> None:
        super().__init__("works")
        self.let_go = threading.Event()

    def do_update_weights_from_distributed(
        self, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        assert self.let_go.wait(30)
        return 400, {}

    do_destroy_weights_update_group = do_update_weights_from_distributed
    do_end_weight_update = do_update_weights_from_distributed


def test_the_other_ranks_wait_longer_than_a_sender_whose_every_wait_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are to hear what it waited for."""
    for module in (transport, distributed):
        monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.5)
    monkeypatch.setattr(transport, "JOIN_SECONDS", 0.0)
    monkeypatch.setattr(transport, "HEALTH_SECONDS", 0.5)
    settings = WeightsConfig(timeout_seconds=1.0)
    sender = DistributedSender(settings, EngineConfig(), torch.device("cpu"))
    engine = Freezes()
    with serving(engine, "frozen") as address:
        began = time.monotonic()
        try:
            sender.connect([address])
            with pytest.raises(EngineCallError, match="frozen"):
                sender.send([[(name, torch.zeros(4)) for name in KNOWN]], PolicyVersion(0, 1))
        finally:
            engine.let_go.set()
        took = time.monotonic() - began
    assert 1.0 + 0.5 + 0.5 < took < seconds_to_give_up(settings)


def test_an_engine_that_never_joins_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "JOIN_SECONDS", 1.5)
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
