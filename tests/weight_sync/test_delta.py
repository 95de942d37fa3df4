"""Tests the transport `delta`, which sends differences: an engine loads exactly the rounded
weights, or keeps the weights that it had."""

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
from tests.weight_sync.fake_engine import PARAMETERS, FakeEngine, serving

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(37, 61, generator=generator) * 0.02 for name in PARAMETERS}


def step(before: Weights, seed: int, size: float) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + size * torch.randn(tensor.shape, generator=generator)
        for name, tensor in before.items()
    }


def bits(tensors: Weights) -> dict[str, bytes]:
    """Return the bytes that engines must have loaded: each tensor rounded to bfloat16."""
    return {
        name: tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


class World:
    """A sender and two fake engines, each with its own weight receiver."""

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
        """Restart engine `index`: its loaded weights and the files of its receiver are lost."""
        root = self.folder / f"engine{index}"
        shutil.rmtree(root, ignore_errors=True)
        self.engines[index].receiver = WeightReceiver(root)
        self.engines[index].loaded = {}

    def send(self, tensors: Weights, number: int, indices: list[int]) -> int:
        """Send a version to the engines with these indices, one tensor per bucket; return the
        number of bytes sent."""
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
        st.sampled_from(["delta", "full", "stored"]),
        st.integers(0, 1 << 20),
        st.integers(1, 255),
    ),
)


def damage_once(w: World, where: str, position: int, mask: int) -> None:
    """Change one byte of a file just before a receiver next reads files.

    The file is part of a published delta, part of a published full version, or a file that the
    reading receiver has stored. A file of the other receiver is never damaged, because that
    receiver may have verified the file already and be about to load it.
    """
    roots: dict[str, Callable[[int], list[Path]]] = {
        "delta": lambda _: sorted(w.published.glob("*.delta/*")),
        "full": lambda _: sorted(p for p in w.published.glob("*/*") if ".delta" not in str(p)),
        "stored": lambda index: sorted(w.folder.glob(f"engine{index}/*/*.safetensors")),
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
def test_delta_update_loads_exact_rounded_weights_or_changes_nothing(
    operations: list[tuple], full_every: int
) -> None:
    """The operations are updates of any size, updates that an engine misses, restarts of an engine,
    and damage to any byte."""
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
            loaded_before = [dict(engine.loaded) for engine in w.engines]
            try:
                w.send(current, number, indices)
            except EngineCallError as error:
                assert any(word in str(error) for word in ("damaged", "manifest", "lack"))
                for engine, before in zip(w.engines, loaded_before, strict=True):
                    assert engine.loaded.keys() == before.keys()
                    assert all(torch.equal(engine.loaded[name], before[name]) for name in before)
                w.send(current, number, indices)  # This update writes the damaged file again.
            for index in indices:
                loaded = w.engines[index].loaded
                assert all(tensor.dtype is torch.bfloat16 for tensor in loaded.values())
                assert bits(loaded) == bits(current)
                assert w.engines[index].version == f"0.{number}"


def test_delta_sender_sends_full_version_only_to_engine_that_missed_a_version() -> None:
    with world() as w:
        current = weights(0)
        whole = w.send(current, 0, [0, 1])
        current = step(current, 1, 1e-6)
        small = w.send(current, 1, [0])
        assert small < 0.3 * whole
        # Engine 1 missed version 1, so it needs all of version 2; engine 0 needs only the delta.
        assert w.send(step(current, 2, 1e-6), 2, [0, 1]) > 0.9 * whole
        current = step(current, 3, 1e-6)
        assert w.send(current, 3, [0, 1]) < 0.3 * whole
        assert w.send(current, 3, [0, 1]) == 0, "both engines have loaded version 3 already"
        w.restart(1)
        assert w.send(current, 3, [1]) > 0
        assert len(list((w.folder / "engine0").iterdir())) == 1, (
            "an engine stores only the newest version"
        )


@pytest.mark.parametrize("transport", [DiskSender, DeltaSender])
def test_settle_removes_versions_of_earlier_processes(
    transport: type[DiskSender],
) -> None:
    """After each settled update, the two newest versions of the current lineage remain, however
    often the run is resumed; before that, no version is removed."""
    with world() as w:
        w.published.mkdir()
        for lineage in range(3):
            w.sender.close()
            w.sender = transport(w.sender.settings, EngineConfig(), w.published)  # type: ignore[assignment]
            (w.published / ".0.9.partial").mkdir()
            for number in range(3):
                earlier = {p.name for p in w.published.iterdir() if p.name[:2] != f"{lineage}."}
                w.sender.connect(w.addresses)
                buckets = [[pair] for pair in step(weights(0), number, 1e-6).items()]
                w.sender.send(buckets, PolicyVersion(lineage, number))
                assert earlier <= {path.name for path in w.published.iterdir()}
                w.sender.settle()
                expected = {f"{lineage}.{n}" for n in range(max(0, number - 1), number + 1)}
                names = {path.name for path in w.published.iterdir()}
                assert {name for name in names if not name.endswith(".delta")} == expected
                assert {name.removesuffix(".delta") for name in names} == expected


def test_delta_sender_sends_a_full_version_every_full_every_versions() -> None:
    with world(full_every=3) as w:
        current, sent = weights(0), []
        for number in range(7):
            current = step(current, number, 1e-6)
            sent.append(w.send(current, number, [0, 1]))
        largest = max(sent)
        assert [size > 0.9 * largest for size in sent] == [n % 3 == 0 for n in range(7)]


def test_rounded_leaves_scales_and_integers_unchanged() -> None:
    from megatron_async.weight_sync.transports.delta import rounded

    scale = torch.full((2, 2), 1 / 3)
    bucket = [("x.weight_scale_inv", scale), ("y.bias", torch.ones(3)), ("z", torch.arange(3))]
    kinds = [tensor.dtype for _, tensor in rounded(bucket)]
    assert kinds == [torch.float32, torch.bfloat16, torch.int64]


def test_weight_receiver_raises_when_the_published_version_is_missing(tmp_path: Path) -> None:
    receiver = WeightReceiver(tmp_path / "stored")
    with pytest.raises(FullVersionNeeded, match="no readable manifest"):
        receiver.receive(tmp_path / "published", "0.1", full=False)
    with pytest.raises(ComponentFailure, match="no readable manifest"):
        receiver.receive(tmp_path / "published", "0.1", full=True)
