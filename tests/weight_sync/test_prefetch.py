"""Tests `BucketPrefetcher`, which receives a bucket while an engine loads the bucket before it."""

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
    """A sender's broadcasts in order; a bucket's bytes arrive when its receive is waited for, or
    when `arrive` is called."""

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


def take(prefetcher: BucketPrefetcher, link: Link, number: int, group: str = "g") -> Tensor:
    sizes = [bucket.nbytes for bucket in [*link.buckets, torch.empty(0, dtype=torch.uint8)]]
    return prefetcher.take(group, sizes[number], sizes[number + 1], link.start, "cpu")


def buckets_of(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size,), i % 251 + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("stages", [1, 2])
def test_prefetch_buffers_use_the_bytes_that_update_bytes_estimates(stages: int) -> None:
    """Embedding and head are each sent as a separate bucket, larger than all other buckets, as in a
    model with 70 billion parameters."""
    shape = ModelShape(16, 2, 2, 2, 8, 32, 64, tied=False)
    head, size = 2 * shape.head_parameters, 512
    layers = [("layer", torch.empty(128, dtype=torch.bfloat16)) for _ in range(20)]
    large = ("head", torch.empty(head // 2, dtype=torch.bfloat16))
    sent = [[large, *layers, large]] if stages == 1 else [[large, *layers], [*layers, large]]
    largest = 0
    for tensors in sent:
        sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets(tensors, size)]
        prefetcher, link = BucketPrefetcher(), Link(buckets_of(sizes))
        for number in range(len(sizes)):
            take(prefetcher, link, number)
            if (arrival := prefetcher._arriving.get("g")) is not None:
                largest = max(largest, arrival.buffer.nbytes + arrival.other.nbytes)
    groups = stages * COMMUNICATOR_BYTES
    assert head > size and largest == update_bytes(shape, size, stages) - groups


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_prefetcher_returns_complete_buckets_in_order_when_the_next_arrives_early(
    sizes: list[int],
) -> None:
    prefetcher, link = BucketPrefetcher(), Link(buckets_of(sizes))
    for number, bucket in enumerate(link.buckets):
        got = take(prefetcher, link, number)
        assert len(link.posted) == min(number + 2, len(sizes))
        link.arrive(len(link.posted))  # The next bucket arrives while this one is loaded.
        assert torch.equal(got, bucket)


def test_prefetcher_raises_when_a_bucket_has_another_size_than_announced() -> None:
    prefetcher, link = BucketPrefetcher(), Link(buckets_of([4, 4]))
    take(prefetcher, link, 0)
    with pytest.raises(
        ValueError, match="a bucket of 4 bytes was announced for g, but it has 5 bytes"
    ):
        prefetcher.take("g", 5, 0, link.start, "cpu")


def test_prefetcher_forgets_receives_of_a_dead_sender_when_an_update_starts() -> None:
    prefetcher, link = BucketPrefetcher(), Link(buckets_of([4, 4]))
    take(prefetcher, link, 0)
    assert prefetcher.forget("g") and not prefetcher.forget("g")
    take(prefetcher, Link(buckets_of([4, 4])), 0, "another")
    assert prefetcher.clear() == {"another"}
    assert not prefetcher.forget("another") and not prefetcher.clear()
