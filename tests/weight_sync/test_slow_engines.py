"""Weights to engines that are late or slow but well, and to engines that never answer.

NCCL is stood in for by gloo whose first broadcast of a group blocks until all engines enter it.
Delays are far below the limits: an engine that is late but in time is not at fault. An engine that
never joins the group, or freezes in it, is named in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineCallError
from megatron_async.weight_sync.transports import base as transport
from megatron_async.weight_sync.transports import distributed
from megatron_async.weight_sync.transports.base import seconds_to_give_up
from megatron_async.weight_sync.transports.distributed import DistributedSender, _Link
from tests.weight_sync.fake_engine import FakeEngine, serving

VERSION = PolicyVersion(0, 1)
DELAY_SECONDS = 0.4
BUCKETS = [
    [("x.weight", torch.full((256, 64), 3.0))],
    [("y.weight", torch.full((128,), 5.0, dtype=torch.bfloat16))],
]
Answer = tuple[int, dict[str, Any]]


class Engine(FakeEngine):
    """Shows when it enters a broadcast."""

    def __init__(self) -> None:
        super().__init__("works")
        self.entered = threading.Event()

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        self.entered.set()
        return super().do_update_weights_from_distributed(body)


class LateJoiner(Engine):
    """Enters the group when the others have waited for it."""

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_init_weights_update_group(body)


class SlowReceiver(Engine):
    """Takes its time over every call of an update."""

    def do_begin_weight_update(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_begin_weight_update(body)

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_update_weights_from_distributed(body)

    def do_end_weight_update(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_end_weight_update(body)


class Holds(Engine):
    """Does not answer the calls in `held` until it is let go."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.held = held
        self.let_go = threading.Event()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path.strip("/") not in self.held:
            return super().answer(path, body)
        assert self.let_go.wait(60)
        return 400, {}


Hold = Callable[[Sequence[Engine]], list[float]]


@pytest.fixture
def hold_until_entered(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Makes the first broadcast of each group wait for these engines; seconds that it waited."""

    def hold(engines: Sequence[Engine]) -> list[float]:
        start, met, held = _Link.start, set(), []

        def as_nccl(link: _Link, tensor: torch.Tensor) -> None:
            if link.name not in met:
                met.add(link.name)
                began = time.monotonic()
                for engine in engines:
                    engine.entered.wait(60)
                held.append(time.monotonic() - began)
            start(link, tensor)

        monkeypatch.setattr(_Link, "start", as_nccl)
        return held

    return hold


def sender(timeout_seconds: float) -> DistributedSender:
    settings = WeightsConfig(timeout_seconds=timeout_seconds)
    return DistributedSender(settings, EngineConfig(), torch.device("cpu"))


def require_loaded(engine: FakeEngine) -> None:
    for name, tensor in (item for bucket in BUCKETS for item in bucket):
        torch.testing.assert_close(engine.loaded[name], tensor)


@pytest.mark.slow
def test_a_late_joiner_and_a_slow_receiver_get_every_update(hold_until_entered: Hold) -> None:
    engines = [Engine(), LateJoiner(), SlowReceiver()]
    held = hold_until_entered(engines)
    weights = sender(60.0)
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(e, f"e{i}")) for i, e in enumerate(engines)]
        for number in (1, 2):
            weights.connect(addresses)
            report = weights.send(BUCKETS, PolicyVersion(0, number))
            assert report.buckets == 2
            for engine in engines:
                require_loaded(engine)
                assert engine.version == f"0.{number}" and not engine.session
                engine.loaded.clear()
        weights.close()
    assert len(held) == 1, "one group for both updates"
    assert held[0] > DELAY_SECONDS / 2, "the slow one was waited for"


@pytest.mark.slow
def test_only_the_engine_that_hangs_is_given_up_beside_a_slow_one(hold_until_entered: Hold) -> None:
    slow, hangs = SlowReceiver(), Holds("update_weights_from_distributed")
    hold_until_entered([slow, hangs])
    weights = sender(4.0)
    with serving(slow, "slow") as first, serving(hangs, "hangs") as second:
        weights.connect([first, second])
        began = time.monotonic()
        try:
            with pytest.raises(EngineCallError) as caught:
                weights.send(BUCKETS, VERSION)
        finally:
            hangs.let_go.set()
            hangs.entered.set()
        assert caught.value.engine_ids == ("hangs",)
        # The limit, and what closing waits for (CLEANUP_SECONDS, twice).
        assert time.monotonic() - began < 4.0 + 2 * 20.0 + 5.0
        weights.connect([first])
        weights.send(BUCKETS, VERSION)
        require_loaded(slow)
        weights.close()


def test_the_other_ranks_wait_longer_than_a_sender_whose_every_wait_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are to hear what it waited for."""
    for module in (transport, distributed):
        monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.5)
    monkeypatch.setattr(transport, "JOIN_SECONDS", 0.0)
    monkeypatch.setattr(transport, "HEALTH_SECONDS", 0.5)
    weights = sender(1.0)
    update = ("update_weights_from_distributed", "end_weight_update")
    engine = Holds(*update, "destroy_weights_update_group")
    with serving(engine, "frozen") as address:
        began = time.monotonic()
        try:
            weights.connect([address])
            with pytest.raises(EngineCallError, match="frozen"):
                weights.send([[pair for bucket in BUCKETS for pair in bucket]], VERSION)
        finally:
            engine.let_go.set()
        took = time.monotonic() - began
    assert 1.0 + 0.5 + 0.5 < took < seconds_to_give_up(weights.settings)


def test_an_engine_that_never_joins_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "JOIN_SECONDS", 1.5)
    engine = Holds("init_weights_update_group")
    with serving(engine, "absent") as address:
        began = time.monotonic()
        try:
            with pytest.raises(EngineCallError, match=r"init_weights_update_group .*within 1\.5 s"):
                sender(60.0).connect([address])
        finally:
            engine.let_go.set()
        assert time.monotonic() - began < 1.5 + 1.0 + 2.0
