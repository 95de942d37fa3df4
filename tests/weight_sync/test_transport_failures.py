"""A broken engine must not hang the trainer: each failure ends in one error within its limit.

An engine that is late or slow but well gets its weights.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync import lost_engines
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, EngineCalls, call
from megatron_async.weight_sync.lost_engines import raise_lost
from megatron_async.weight_sync.transports import base as transport
from megatron_async.weight_sync.transports import distributed
from megatron_async.weight_sync.transports.base import seconds_to_give_up
from megatron_async.weight_sync.transports.distributed import DistributedSender, _Link
from tests.weight_sync.fake_engine import FakeEngine, serving

VERSION = PolicyVersion(0, 1)
Start = Callable[[str], EngineAddress]


@pytest.fixture(scope="module")
def healthy_engines() -> Iterator[list[EngineAddress]]:
    """Two engines that work, for all tests."""
    with ExitStack() as stack:
        yield [_start(stack, "works", f"works{i}") for i in range(2)]


@pytest.fixture
def start(healthy_engines: list[EngineAddress]) -> Iterator[Start]:
    """An engine of a mode; one that works comes back empty from whatever an earlier test did."""
    with ExitStack() as stack:
        idle = list(healthy_engines)
        for engine in idle:
            call(engine, "POST", "reset", {}, 5.0)
        yield lambda mode: idle.pop(0) if mode == "works" else _start(stack, mode, mode)


def _start(stack: ExitStack, mode: str, name: str) -> EngineAddress:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.weight_sync.fake_engine", mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return EngineAddress(name, f"http://127.0.0.1:{int(process.stdout.readline())}")


def _sender(timeout_seconds: float = 20.0) -> DistributedSender:
    settings = WeightsConfig(timeout_seconds=timeout_seconds)
    return DistributedSender(settings, EngineConfig(), torch.device("cpu"))


def _buckets() -> list[list[tuple[str, torch.Tensor]]]:
    return [
        [("x.weight", torch.full((256, 64), 3.0))],
        [("y.weight", torch.full((128,), 5.0, dtype=torch.bfloat16))],
    ]


class Confused(FakeEngine):
    """Answers the question for its parameters with what a test wants."""

    reply: object = None

    def do_weights_checker(self, body: dict[str, Any]) -> Any:
        return super().do_weights_checker(body) if self.reply is None else (200, self.reply)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"ranks": [{"checksums": 5}]},
        {"ranks": []},
        {"ranks": [{"checksums": {"x.weight": "1"}}]},
    ],
    ids=str,
)
def test_an_engine_that_reports_other_parameters_than_the_rest_is_named(reply: object) -> None:
    """The others are sent to; which parameters there are is known from then on."""
    engines = [Confused("works") for _ in range(3)]
    sender = _sender()
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(engine, f"engine{i}")) for i, engine in enumerate(engines)
        ]
        engines[1].reply = reply
        with pytest.raises(EngineCallError, match="engine1 reported") as error:
            sender.connect(addresses)
        assert error.value.engine_ids == ("engine1",)
        with pytest.raises(EngineCallError, match="engine1 reported"):
            sender.connect(addresses[1:2])
        sender.connect([addresses[0], addresses[2]])
        sender.send(_buckets(), VERSION)
        sender.close()
    assert [bool(engine.calls) for engine in engines] == [True, False, True]


def test_each_group_has_a_name_that_no_other_trainer_has_used() -> None:
    """Process ids and counts come again, on another host or in the next container."""
    engine, names = FakeEngine("works"), []
    sender = _sender()
    with serving(engine, "engine") as address:
        for _ in range(2):
            sender.connect([address])
            names += engine.groups
            sender.disconnect()
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"megatron-async-[0-9a-f]{32}", name) for name in names)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_between_updates_buffers_are_kept_on_a_host_only(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """`meta` stands for a GPU, whose memory is for training then; zeros travel in its place."""
    start_broadcast = _Link.start
    places = []

    def start(link: _Link, tensor: torch.Tensor) -> None:
        places.append(tensor.data_ptr())
        start_broadcast(link, tensor if device == "cpu" else torch.zeros_like(tensor, device="cpu"))

    monkeypatch.setattr(_Link, "start", start)
    settings = WeightsConfig(timeout_seconds=20.0)
    sender = DistributedSender(settings, EngineConfig(), torch.device(device))
    bucket = [item for single in _buckets() for item in single]
    with serving(FakeEngine("works"), "engine") as address:
        sender.connect([address])
        for _ in range(3):
            sender.send([bucket], VERSION)
        left = [
            item
            for item in gc.get_objects()
            if type(item) is torch.Tensor and item.device.type == device == "meta" and item.nbytes
        ]
        assert not left
        sender.close()
    assert device == "meta" or places[2] == places[0] != places[1]


@pytest.mark.parametrize("mode", ["dies", "refuses"])
def test_an_engine_that_fails_in_the_broadcast_is_named_at_once(start: Start, mode: str) -> None:
    engines = [start("works"), start(mode)]
    sender = _sender()
    sender.connect(engines)
    started = time.monotonic()
    with pytest.raises(EngineCallError) as caught:
        sender.send(_buckets(), VERSION)
    assert time.monotonic() - started < 10
    assert caught.value.engine_ids == (engines[1].engine_id,)
    # The engine that is left can be served again, in a new group.
    sender.connect(engines[:1])
    report = sender.send(_buckets(), VERSION)
    assert (report.buckets, report.tensors, report.bytes) == (2, 2, 256 * 64 * 4 + 128 * 2)
    sender.close()


RELEASED = threading.Event()


class Engine(FakeEngine):
    """Answers an announced bucket by its mode.

    `receives`: as if it had the bucket. `cannot receive`: as SGLang reports a failed receive.
    `refuses`: with another error. `hangs`: never, but it is healthy. `lost`: no call is answered.
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


@pytest.mark.parametrize(
    ("engine", "limit_seconds", "message"),
    [
        (
            FakeEngine("works"),
            1.0,
            r"did not enter the first broadcast within weights\.timeout_sec",
        ),
        (Engine("receives"), 1.0, r"did not enter the first broadcast within weights\.timeout_sec"),
        (Engine("refuses"), 20.0, r"engine engine .*returned status 400"),
    ],
    ids=["waits for nothing", "has answered", "refuses"],
)
def test_a_first_broadcast_that_blocks_has_the_same_limit(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, limit_seconds: float, message: str
) -> None:
    """NCCL's may never return."""
    let_go = threading.Event()
    monkeypatch.setattr(_Link, "start", lambda link, tensor: let_go.wait(60))
    sender = _sender(limit_seconds)
    with serving(engine, "engine") as address:
        sender.connect([address])
        started = time.monotonic()
        try:
            with pytest.raises(ComponentFailure, match=message):
                sender.send(_buckets(), VERSION)
        finally:
            let_go.set()
        assert time.monotonic() - started < 1.0 + 1.0 + 3.0


def test_a_link_that_is_too_slow_for_the_limit_is_no_fault_of_the_engines(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Link, "start", lambda link, tensor: None)
    monkeypatch.setattr(_Link, "done", False)
    sender = _sender(timeout_seconds=1.0)
    sender.connect([start("works"), start("works")])
    with pytest.raises(ComponentFailure, match=r"did not end within weights\.timeout") as caught:
        sender.send(_buckets(), VERSION)
    assert not isinstance(caught.value, EngineCallError), "nobody is left out"


def test_an_engine_that_is_not_there_is_named_when_connecting(start: Start) -> None:
    sender = _sender()
    gone = EngineAddress("gone", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(EngineCallError, match="gone") as caught:
        sender.connect([start("works"), gone])
    assert caught.value.engine_ids == ("gone",)
    assert time.monotonic() - started < 10


def test_a_parameter_that_was_left_out_is_noticed(start: Start) -> None:
    sender = _sender()
    sender.connect([start("works")])
    with pytest.raises(ComponentFailure, match=r"lacks 'y\.weight'"):
        sender.send(_buckets()[:1], VERSION)
    sender.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits of a fraction of a second; engines that wait are released after the test."""
    RELEASED.clear()
    monkeypatch.setattr(lost_engines, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(lost_engines, "_HEALTH_SECONDS", 0.3)
    yield
    RELEASED.set()


@pytest.mark.usefixtures("short")
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


# ------------------------------------------------------------ engines that are late, slow or frozen
#
# NCCL is stood in for by gloo whose first broadcast of a group blocks until all engines enter it.
# Delays are far below the limits: an engine that is late but in time is not at fault.

DELAY_SECONDS = 0.4
Answer = tuple[int, dict[str, Any]]


class Entering(FakeEngine):
    """Shows when it enters a broadcast."""

    def __init__(self) -> None:
        super().__init__("works")
        self.entered = threading.Event()

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        self.entered.set()
        return super().do_update_weights_from_distributed(body)


class LateJoiner(Entering):
    """Enters the group when the others have waited for it."""

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_init_weights_update_group(body)


class SlowReceiver(Entering):
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


class Holds(Entering):
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


Hold = Callable[[Sequence[Entering]], list[float]]


@pytest.fixture
def hold_until_entered(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Makes the first broadcast of each group wait for these engines; seconds that it waited."""

    def hold(engines: Sequence[Entering]) -> list[float]:
        start, met, held = _Link.start, set(), []

        def as_nccl(link: _Link, tensor: torch.Tensor) -> None:
            if link.name not in met:
                met.add(link.name)
                began = time.monotonic()
                for engine in engines:
                    assert engine.entered.wait(60), "it has had no announcement"
                held.append(time.monotonic() - began)
            start(link, tensor)

        monkeypatch.setattr(_Link, "start", as_nccl)
        return held

    return hold


def require_loaded(engine: FakeEngine) -> None:
    for name, tensor in (item for bucket in _buckets() for item in bucket):
        torch.testing.assert_close(engine.loaded[name], tensor)


@pytest.mark.slow
def test_a_late_joiner_and_a_slow_receiver_get_every_update(hold_until_entered: Hold) -> None:
    engines = [Entering(), LateJoiner(), SlowReceiver()]
    held = hold_until_entered(engines)
    weights = _sender(60.0)
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(e, f"e{i}")) for i, e in enumerate(engines)]
        for number in (1, 2):
            weights.connect(addresses)
            report = weights.send(_buckets(), PolicyVersion(0, number))
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
    weights = _sender(4.0)
    with serving(slow, "slow") as first, serving(hangs, "hangs") as second:
        weights.connect([first, second])
        began = time.monotonic()
        try:
            with pytest.raises(EngineCallError) as caught:
                weights.send(_buckets(), VERSION)
        finally:
            hangs.let_go.set()
            hangs.entered.set()
        assert caught.value.engine_ids == ("hangs",)
        # The limit, and twice CLEANUP_SECONDS, for which closing waits.
        assert time.monotonic() - began < 4.0 + 2 * 20.0 + 5.0
        weights.connect([first])
        weights.send(_buckets(), VERSION)
        require_loaded(slow)
        weights.close()


def test_the_other_ranks_wait_longer_than_a_sender_whose_every_wait_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks must still be waiting when the sender learns how its update ended."""
    for module in (transport, distributed):
        monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.5)
    monkeypatch.setattr(transport, "JOIN_SECONDS", 0.0)
    monkeypatch.setattr(transport, "HEALTH_SECONDS", 0.5)
    weights = _sender(1.0)
    update = ("update_weights_from_distributed", "end_weight_update")
    engine = Holds(*update, "destroy_weights_update_group")
    with serving(engine, "frozen") as address:
        began = time.monotonic()
        try:
            weights.connect([address])
            with pytest.raises(EngineCallError, match="frozen"):
                weights.send([[pair for bucket in _buckets() for pair in bucket]], VERSION)
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
                _sender(60.0).connect([address])
        finally:
            engine.let_go.set()
        assert time.monotonic() - began < 1.5 + 1.0 + 2.0
