"""Engines that a lost engine keeps from receiving stay in the update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_async.weight_sync import lost_engines
from megatron_async.weight_sync.http import EngineCallError, EngineCalls
from megatron_async.weight_sync.lost_engines import raise_lost
from tests.weight_sync.fake_engine import FakeEngine, serving

RELEASED = threading.Event()


class Engine(FakeEngine):
    """Answers an announced bucket by its mode.

    `receives`: it has the bucket. `cannot receive`: as SGLang reports a failed receive. `refuses`:
    with another error. `hangs`: never, but it is healthy. `lost`: no call is answered.
    """

    def do_health(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.mode == "lost":
            RELEASED.wait(30)
        return super().do_health(body)

    def do_update_weights_from_distributed(
        self, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if self.mode == "cannot receive":
            return 400, {"message": "Failed to receive weights: NCCL error: remote process exited"}
        if self.mode == "refuses":
            return 400, {"message": "out of memory"}
        if self.mode in ("hangs", "lost"):
            RELEASED.wait(30)
        return 200, {}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits of a fraction of a second; engines that wait are released after the test."""
    RELEASED.clear()
    monkeypatch.setattr(lost_engines, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(lost_engines, "_HEALTH_SECONDS", 0.3)
    yield
    RELEASED.set()


@pytest.mark.parametrize(
    ("modes", "at_fault"),
    [
        (["cannot receive", "lost", "cannot receive"], ["engine1"]),
        (["cannot receive", "hangs"], ["engine1"]),
        (["cannot receive", "refuses"], ["engine1"]),
        (["receives", "lost"], ["engine1"]),
        (["cannot receive", "receives"], ["engine0"]),
        (["receives", "receives"], []),
    ],
)
def test_only_the_engine_that_caused_a_failed_broadcast_is_found(
    modes: list[str], at_fault: list[str]
) -> None:
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(Engine(mode), f"engine{index}"))
            for index, mode in enumerate(modes)
        ]
        stack.callback(RELEASED.set)
        calls = EngineCalls(addresses)
        announced = calls.start("update_weights_from_distributed", lambda _: {}, 20.0)
        found: tuple[str, ...] = ()
        try:
            raise_lost(announced, calls)
        except EngineCallError as error:
            found = error.engine_ids
        calls.close()
    assert list(found) == at_fault
