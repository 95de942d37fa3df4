"""Weights as differences: engines hold exactly the rounded weights, or what they held before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, EngineCallError
from megatron_async.weight_sync.receiver import FullVersionNeeded, WeightReceiver
from megatron_async.weight_sync.transports import delta
from megatron_async.weight_sync.transports.delta import DeltaSender
from megatron_async.weight_sync.transports.disk import DiskSender
from tests.weight_sync.fake_engine import KNOWN, FakeEngine, serving

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(37, 61, generator=generator) * 0.02 for name in KNOWN}


def step(before: Weights, seed: int, size: float) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + size * torch.randn(tensor.shape, generator=generator)
        for name, tensor in before.items()
    }


def bits(tensors: Weights) -> dict[str, bytes]:
    """What engines must hold: rounded to bfloat16, bit for bit."""
    return {
        name: tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


class World:
    """A sender and two engines, each with a receiver beside it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.published = folder / "published"
        self.engines = [FakeEngine("works") for _ in range(2)]
        self.addresses: list[EngineAddress] = []
        for index, engine in enumerate(self.engines):
            self.restart(index)
            self.addresses.append(stack.enter_context(serving(engine, f"engine{index}")))
        self.sender = DeltaSender(
            WeightsConfig(transport="delta", timeout_seconds=20.0),
            EngineConfig(),
            self.published,
        )
        stack.callback(self.sender.close)

    def restart(self, index: int) -> None:
        """The engine has lost what it held."""
        root = self.folder / f"engine{index}"
        shutil.rmtree(root, ignore_errors=True)
        self.engines[index].receiver = WeightReceiver(root)
        self.engines[index].loaded = {}

    def send(self, tensors: Weights, number: int, indices: list[int]) -> int:
        """Bytes that the engines were sent; one tensor a bucket."""
        self.sender.connect([self.addresses[index] for index in indices])
        buckets = [[(name, tensor)] for name, tensor in tensors.items()]
        return self.sender.send(buckets, PolicyVersion(0, number)).sent_bytes


@contextmanager
def world(full_every: int = 100) -> Iterator[World]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(delta, "FULL_EVERY", full_every)
        yield World(Path(folder), stack)


def flip(path: Path, position: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= mask
    path.write_bytes(data)


ENGINES = st.sampled_from([[0], [1], [0, 1]])
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), ENGINES, st.sampled_from([0.0, 1e-6, 1.0])),
    st.tuples(st.just("again"), ENGINES),
    st.tuples(st.just("restart"), st.integers(0, 1)),
    st.tuples(
        st.just("damage"),
        st.sampled_from(["delta", "whole", "held"]),
        st.integers(0, 1 << 20),
        st.integers(1, 255),
    ),
)


def damage_once(w: World, where: str, position: int, mask: int) -> None:
    """Before a receiver next reads anything, one byte changes: of what it holds, or is sent.

    Not of what the other one holds: that may have been read, and be about to be loaded.
    """
    roots: dict[str, Callable[[int], list[Path]]] = {
        "delta": lambda _: sorted(w.published.glob("*.delta/*")),
        "whole": lambda _: sorted(p for p in w.published.glob("*/*") if ".delta" not in str(p)),
        "held": lambda index: sorted(w.folder.glob(f"engine{index}/*/*.safetensors")),
    }

    def damage(index: int) -> None:
        for engine in w.engines:
            engine.before_receive = lambda: None
        files = roots[where](index)
        if files:
            flip(files[position % len(files)], position // len(files), mask)

    for number, engine in enumerate(w.engines):
        engine.before_receive = partial(damage, number)


@settings(max_examples=40)
@given(st.lists(OPERATIONS, min_size=1, max_size=8), st.sampled_from([1, 3, 100]))
def test_whatever_happens_engines_hold_the_rounded_weights_or_what_they_held(
    operations: list[tuple], full_every: int
) -> None:
    """Updates of any size, versions that an engine missed, lost engines, damage of any byte."""
    with world(full_every) as w:
        current, number = weights(0), 0
        w.send(current, number, [0, 1])
        for seed, operation in enumerate(operations):
            match operation:
                case ("restart", index):
                    w.restart(index)
                    continue
                case ("damage", where, position, mask):
                    damage_once(w, where, position, mask)
                    continue
                case ("update", indices, size):
                    number += 1
                    current = step(current, seed, size)
                case ("again", indices):
                    pass
            held = [dict(engine.loaded) for engine in w.engines]
            try:
                w.send(current, number, indices)
            except EngineCallError as error:
                assert any(word in str(error) for word in ("damaged", "manifest", "lack"))
                for engine, before in zip(w.engines, held, strict=True):
                    assert engine.loaded.keys() == before.keys()
                    assert all(torch.equal(engine.loaded[name], before[name]) for name in before)
                w.send(current, number, indices)  # the damage is gone: it is written anew
            for index in indices:
                loaded = w.engines[index].loaded
                assert all(tensor.dtype is torch.bfloat16 for tensor in loaded.values())
                assert bits(loaded) == bits(current)
                assert w.engines[index].version == f"0.{number}"


def test_an_update_sends_differences_and_a_late_engine_asks_for_the_whole() -> None:
    with world() as w:
        current = weights(0)
        whole = w.send(current, 0, [0, 1])
        current = step(current, 1, 1e-6)
        small = w.send(current, 1, [0])
        assert small < 0.3 * whole
        # Engine 1 has missed a version: it reads version 2 whole, engine 0 its differences.
        assert w.send(step(current, 2, 1e-6), 2, [0, 1]) > 0.9 * whole
        current = step(current, 3, 1e-6)
        assert w.send(current, 3, [0, 1]) < 0.3 * whole
        assert w.send(current, 3, [0, 1]) == 0, "they hold it already"
        w.restart(1)
        assert w.send(current, 3, [1]) > 0
        assert len(list((w.folder / "engine0").iterdir())) == 1, "an engine keeps the newest alone"


@pytest.mark.parametrize("transport", [DiskSender, DeltaSender])
def test_settle_removes_versions_of_earlier_processes(
    transport: type[DiskSender],
) -> None:
    """Two models stay however often the run is resumed; nothing goes before that."""
    with world() as w:
        w.published.mkdir()
        for life in range(3):
            w.sender.close()
            w.sender = transport(w.sender.settings, EngineConfig(), w.published)  # type: ignore[assignment]
            (w.published / ".0.9.partial").mkdir()
            for number in range(3):
                others = {p.name for p in w.published.iterdir() if p.name[:2] != f"{life}."}
                w.sender.connect(w.addresses)
                buckets = [[pair] for pair in step(weights(0), number, 1e-6).items()]
                w.sender.send(buckets, PolicyVersion(life, number))
                assert others <= {path.name for path in w.published.iterdir()}
                w.sender.settle()
                stay = {f"{life}.{n}" for n in range(max(0, number - 1), number + 1)}
                left = {path.name for path in w.published.iterdir()}
                assert {name for name in left if not name.endswith(".delta")} == stay
                assert {name.removesuffix(".delta") for name in left} == stay


def test_every_so_many_versions_one_is_read_whole() -> None:
    with world(full_every=3) as w:
        current, sent = weights(0), []
        for number in range(7):
            current = step(current, number, 1e-6)
            sent.append(w.send(current, number, [0, 1]))
        largest = max(sent)
        assert [size > 0.9 * largest for size in sent] == [n % 3 == 0 for n in range(7)]


def test_scales_of_quantized_weights_are_not_rounded() -> None:
    from megatron_async.weight_sync.transports.delta import rounded

    scale = torch.full((2, 2), 1 / 3)
    bucket = [("x.weight_scale_inv", scale), ("y.bias", torch.ones(3)), ("z", torch.arange(3))]
    kinds = [tensor.dtype for _, tensor in rounded(bucket)]
    assert kinds == [torch.float32, torch.bfloat16, torch.int64]


def test_a_receiver_reports_what_it_misses(tmp_path: Path) -> None:
    receiver = WeightReceiver(tmp_path / "held")
    with pytest.raises(FullVersionNeeded, match="no readable manifest"):
        receiver.receive(tmp_path / "published", "0.1", full=False)
    with pytest.raises(ComponentFailure, match="no readable manifest"):
        receiver.receive(tmp_path / "published", "0.1", full=True)
