"""One bucket is received while the one before it is loaded (`weight_sync/prefetch.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.models.export import buckets
from megatron_async.models.shape import ModelShape
from megatron_async.simulate.memory import COMMUNICATOR_BYTES, update_bytes
from megatron_async.weight_sync.prefetch import BucketPrefetcher


@dataclass
class Link:
    """A sender's broadcasts in order; bytes arrive when they are waited for, or by `arrive`."""

    buckets: list[Tensor]
    posted: list[tuple[int, Tensor]] = field(default_factory=list)
    arrived: int = 0
    broken: bool = False

    def start(self, into_N: Tensor) -> Work:
        self.posted.append((len(self.posted), into_N))
        return Work(self, len(self.posted))

    def arrive(self, count: int) -> None:
        for number, into_N in self.posted[self.arrived : count]:
            into_N.copy_(self.buckets[number])
        self.arrived = max(self.arrived, count)


@dataclass
class Work:
    link: Link
    count: int

    def wait(self) -> None:
        if self.link.broken:
            raise RuntimeError("connection closed by peer")
        self.link.arrive(self.count)


def take(ahead: BucketPrefetcher, link: Link, number: int, group: str = "g") -> Tensor:
    sizes = [bucket.nbytes for bucket in [*link.buckets, torch.empty(0, dtype=torch.uint8)]]
    return ahead.take(group, sizes[number], sizes[number + 1], link.start, "cpu")


def buckets_of(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size,), i % 251 + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_buffers_take_what_is_counted_on_an_engines_gpu(stages: int) -> None:
    """Embedding and head are buckets of their own, larger than the others, as in a model of 70B."""
    shape = ModelShape(16, 2, 2, 2, 8, 32, 64, tied=False)
    head, size = 2 * shape.head_parameters, 512
    layers = [("layer", torch.empty(128, dtype=torch.bfloat16)) for _ in range(20)]
    whole = ("head", torch.empty(head // 2, dtype=torch.bfloat16))
    sent = [[whole, *layers, whole]] if stages == 1 else [[whole, *layers], [*layers, whole]]
    most = 0
    for tensors in sent:
        sizes = [sum(tensor.nbytes for _, tensor in part) for part in buckets(tensors, size)]
        ahead, link = BucketPrefetcher(), Link(buckets_of(sizes))
        for number in range(len(sizes)):
            take(ahead, link, number)
            if (arrival := ahead._arriving.get("g")) is not None:
                most = max(most, arrival.buffer.nbytes + arrival.other.nbytes)
    groups = stages * COMMUNICATOR_BYTES
    assert head > size and most == update_bytes(shape, size, stages) - groups


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_buckets_come_whole_and_in_order_whatever_arrives_early(sizes: list[int]) -> None:
    ahead, link = BucketPrefetcher(), Link(buckets_of(sizes))
    for number, bucket in enumerate(link.buckets):
        got = take(ahead, link, number)
        assert len(link.posted) == min(number + 2, len(sizes))
        link.arrive(len(link.posted))  # the next one, while this one is being loaded
        assert torch.equal(got, bucket)


def test_a_bucket_that_is_not_as_large_as_announced_is_an_error() -> None:
    ahead, link = BucketPrefetcher(), Link(buckets_of([4, 4]))
    take(ahead, link, 0)
    with pytest.raises(
        ValueError, match="a bucket of 4 bytes was announced for g, but it has 5 bytes"
    ):
        ahead.take("g", 5, 0, link.start, "cpu")


def test_what_a_dead_sender_left_is_forgotten_when_an_update_begins() -> None:
    ahead, link = BucketPrefetcher(), Link(buckets_of([4, 4]))
    take(ahead, link, 0)
    assert ahead.forget("g") and not ahead.forget("g")
    take(ahead, Link(buckets_of([4, 4])), 0, "another")
    assert ahead.clear() == {"another"}
    assert not ahead.forget("another") and not ahead.clear()
