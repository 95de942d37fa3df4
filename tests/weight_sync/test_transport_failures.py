"""Tests that a broken engine does not block the trainer: each failure ends in one error within its
time limit. An engine that is only late or slow gets its weights."""

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
    """Two engines in mode `works`, shared by all tests."""
    with ExitStack() as stack:
        yield [_start(stack, "works", f"works{i}") for i in range(2)]


@pytest.fixture
def start(healthy_engines: list[EngineAddress]) -> Iterator[Start]:
    """A function that returns an engine of a mode; for `works`, a shared engine after a reset."""
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


class WrongParameters(FakeEngine):
    """A fake engine that reports `reply` as its parameters, if `reply` is set."""

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
def test_connect_names_engine_that_reports_other_parameters_than_the_rest(reply: object) -> None:
    """The other engines still get weights, and a later connection is compared with their
    parameters."""
    engines = [WrongParameters("works") for _ in range(3)]
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


def test_connect_uses_a_new_unique_group_name_each_time() -> None:
    """A name with a process ID or a counter could be repeated on another host or in the next
    container."""
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
def test_sender_keeps_its_buffers_between_updates_only_on_the_host(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The device `meta` stands for a GPU, whose memory is needed for training between updates;
    zeros on the host are broadcast instead of its tensors."""
    start_broadcast = _Link.start
    pointers = []

    def start(link: _Link, tensor: torch.Tensor) -> None:
        pointers.append(tensor.data_ptr())
        start_broadcast(link, tensor if device == "cpu" else torch.zeros_like(tensor, device="cpu"))

    monkeypatch.setattr(_Link, "start", start)
    settings = WeightsConfig(timeout_seconds=20.0)
    sender = DistributedSender(settings, EngineConfig(), torch.device(device))
    bucket = [item for single in _buckets() for item in single]
    with serving(FakeEngine("works"), "engine") as address:
        sender.connect([address])
        for _ in range(3):
            sender.send([bucket], VERSION)
        remaining = [
            item
            for item in gc.get_objects()
            if type(item) is torch.Tensor and item.device.type == device == "meta" and item.nbytes
        ]
        assert not remaining
        sender.close()
    assert device == "meta" or pointers[2] == pointers[0] != pointers[1]


@pytest.mark.parametrize("mode", ["dies", "refuses"])
def test_send_names_engine_that_fails_during_the_broadcast_at_once(start: Start, mode: str) -> None:
    engines = [start("works"), start(mode)]
    sender = _sender()
    sender.connect(engines)
    started = time.monotonic()
    with pytest.raises(EngineCallError) as caught:
        sender.send(_buckets(), VERSION)
    assert time.monotonic() - started < 10
    assert caught.value.engine_ids == (engines[1].engine_id,)
    # The remaining engine gets the weights in a new group.
    sender.connect(engines[:1])
    report = sender.send(_buckets(), VERSION)
    assert (report.buckets, report.tensors, report.bytes) == (2, 2, 256 * 64 * 4 + 128 * 2)
    sender.close()


RELEASED = threading.Event()


class ReplyingEngine(FakeEngine):
    """A fake engine that receives no weights, and replies to an announced bucket as its mode says.

    The modes are `receives` (as if it had received the bucket), `cannot receive` (as SGLang reports
    a failed receive), `refuses` (with another error), `hangs` (does not reply, but passes health
    checks) and `lost` (replies to no call).
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
        (
            ReplyingEngine("receives"),
            1.0,
            r"did not enter the first broadcast within weights\.timeout_sec",
        ),
        (ReplyingEngine("refuses"), 20.0, r"engine engine .*returned status 400"),
    ],
    ids=["engine receives", "engine has replied", "engine refuses"],
)
def test_send_raises_within_its_limit_when_the_first_broadcast_blocks(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, limit_seconds: float, message: str
) -> None:
    """NCCL's call for the first broadcast may never return."""
    release = threading.Event()
    monkeypatch.setattr(_Link, "start", lambda link, tensor: release.wait(60))
    sender = _sender(limit_seconds)
    with serving(engine, "engine") as address:
        sender.connect([address])
        started = time.monotonic()
        try:
            with pytest.raises(ComponentFailure, match=message):
                sender.send(_buckets(), VERSION)
        finally:
            release.set()
        assert time.monotonic() - started < 1.0 + 1.0 + 3.0


def test_send_blames_no_engine_when_the_broadcast_is_too_slow(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Link, "start", lambda link, tensor: None)
    monkeypatch.setattr(_Link, "done", False)
    sender = _sender(timeout_seconds=1.0)
    sender.connect([start("works"), start("works")])
    with pytest.raises(ComponentFailure, match=r"did not end within weights\.timeout") as caught:
        sender.send(_buckets(), VERSION)
    assert not isinstance(caught.value, EngineCallError), "no engine may be excluded"


def test_connect_names_engine_that_is_unreachable(start: Start) -> None:
    sender = _sender()
    missing = EngineAddress("missing", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(EngineCallError, match="missing") as caught:
        sender.connect([start("works"), missing])
    assert caught.value.engine_ids == ("missing",)
    assert time.monotonic() - started < 10


def test_send_raises_when_a_parameter_is_missing(start: Start) -> None:
    sender = _sender()
    sender.connect([start("works")])
    with pytest.raises(ComponentFailure, match=r"lacks 'y\.weight'"):
        sender.send(_buckets()[:1], VERSION)
    sender.close()


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set limits of a fraction of a second; after the test, release the engines that wait."""
    RELEASED.clear()
    monkeypatch.setattr(lost_engines, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(lost_engines, "_HEALTH_SECONDS", 0.3)
    yield
    RELEASED.set()


@pytest.mark.usefixtures("short_limits")
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
def test_raise_lost_names_only_the_engine_that_caused_the_failure(
    modes: list[str], at_fault: list[str]
) -> None:
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(ReplyingEngine(mode), f"engine{index}"))
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
# gloo stands for NCCL: `delay_first_broadcast` makes the first broadcast of each group block until
# all engines have entered it. Delays are far below the limits, so a late engine is not at fault.

DELAY_SECONDS = 0.4
Answer = tuple[int, dict[str, Any]]


class EntryRecorder(FakeEngine):
    """A fake engine that sets `entered` when it enters a broadcast."""

    def __init__(self) -> None:
        super().__init__("works")
        self.entered = threading.Event()

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        self.entered.set()
        return super().do_update_weights_from_distributed(body)


class LateJoiner(EntryRecorder):
    """An engine that joins the group late, while the other ranks wait for it."""

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_init_weights_update_group(body)


class SlowReceiver(EntryRecorder):
    """An engine that is slow in every call of an update."""

    def do_begin_weight_update(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_begin_weight_update(body)

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_update_weights_from_distributed(body)

    def do_end_weight_update(self, body: dict[str, Any]) -> Answer:
        time.sleep(DELAY_SECONDS)
        return super().do_end_weight_update(body)


class Unresponsive(EntryRecorder):
    """An engine that does not reply to the calls in `blocked` until `release` is set."""

    def __init__(self, *blocked: str) -> None:
        super().__init__()
        self.blocked = blocked
        self.release = threading.Event()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path.strip("/") not in self.blocked:
            return super().answer(path, body)
        assert self.release.wait(60)
        return 400, {}


DelayBroadcast = Callable[[Sequence[EntryRecorder]], list[float]]


@pytest.fixture
def delay_first_broadcast(monkeypatch: pytest.MonkeyPatch) -> DelayBroadcast:
    """A function that makes the first broadcast of each group wait until the given engines have
    entered it; returns a list that receives the seconds of each wait."""

    def delay(engines: Sequence[EntryRecorder]) -> list[float]:
        start, delayed, waits = _Link.start, set(), []

        def start_late(link: _Link, tensor: torch.Tensor) -> None:
            if link.name not in delayed:
                delayed.add(link.name)
                started = time.monotonic()
                for engine in engines:
                    assert engine.entered.wait(60), "the engine received no announcement"
                waits.append(time.monotonic() - started)
            start(link, tensor)

        monkeypatch.setattr(_Link, "start", start_late)
        return waits

    return delay


def assert_loaded(engine: FakeEngine) -> None:
    for name, tensor in (item for bucket in _buckets() for item in bucket):
        torch.testing.assert_close(engine.loaded[name], tensor)


@pytest.mark.slow
def test_engines_that_join_late_or_receive_slowly_get_every_update(
    delay_first_broadcast: DelayBroadcast,
) -> None:
    engines = [EntryRecorder(), LateJoiner(), SlowReceiver()]
    waits = delay_first_broadcast(engines)
    weights = _sender(60.0)
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(e, f"e{i}")) for i, e in enumerate(engines)]
        for number in (1, 2):
            weights.connect(addresses)
            report = weights.send(_buckets(), PolicyVersion(0, number))
            assert report.buckets == 2
            for engine in engines:
                assert_loaded(engine)
                assert engine.version == f"0.{number}" and not engine.session
                engine.loaded.clear()
        weights.close()
    assert len(waits) == 1, "both updates must use one group"
    assert waits[0] > DELAY_SECONDS / 2, "the sender must wait for the slow engine"


@pytest.mark.slow
def test_send_names_only_the_hanging_engine_and_not_the_slow_one(
    delay_first_broadcast: DelayBroadcast,
) -> None:
    slow, hangs = SlowReceiver(), Unresponsive("update_weights_from_distributed")
    delay_first_broadcast([slow, hangs])
    weights = _sender(4.0)
    with serving(slow, "slow") as first, serving(hangs, "hangs") as second:
        weights.connect([first, second])
        started = time.monotonic()
        try:
            with pytest.raises(EngineCallError) as caught:
                weights.send(_buckets(), VERSION)
        finally:
            hangs.release.set()
            hangs.entered.set()
        assert caught.value.engine_ids == ("hangs",)
        # The limit, plus twice CLEANUP_SECONDS, for which closing waits.
        assert time.monotonic() - started < 4.0 + 2 * 20.0 + 5.0
        weights.connect([first])
        weights.send(_buckets(), VERSION)
        assert_loaded(slow)
        weights.close()


def test_seconds_to_give_up_exceeds_a_sender_whose_every_wait_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other trainer ranks must still be waiting when the sender learns the result of its
    update."""
    for module in (transport, distributed):
        monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.5)
    monkeypatch.setattr(transport, "JOIN_SECONDS", 0.0)
    monkeypatch.setattr(transport, "HEALTH_SECONDS", 0.5)
    weights = _sender(1.0)
    update = ("update_weights_from_distributed", "end_weight_update")
    engine = Unresponsive(*update, "destroy_weights_update_group")
    with serving(engine, "frozen") as address:
        started = time.monotonic()
        try:
            weights.connect([address])
            with pytest.raises(EngineCallError, match="frozen"):
                weights.send([[pair for bucket in _buckets() for pair in bucket]], VERSION)
        finally:
            engine.release.set()
        took = time.monotonic() - started
    assert 1.0 + 0.5 + 0.5 < took < seconds_to_give_up(weights.settings)


def test_connect_waits_no_longer_than_join_seconds_for_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "JOIN_SECONDS", 1.5)
    engine = Unresponsive("init_weights_update_group")
    with serving(engine, "absent") as address:
        started = time.monotonic()
        try:
            with pytest.raises(EngineCallError, match=r"init_weights_update_group .*within 1\.5 s"):
                _sender(60.0).connect([address])
        finally:
            engine.release.set()
        assert time.monotonic() - started < 1.5 + 1.0 + 2.0
