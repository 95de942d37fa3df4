"""Parts of a batch on its device: the same tokens that NumPy picks, every column with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.algorithms.device_batch import DeviceBatch
from tests.algorithms.batches import device_batch


def with_column(seed: int = 0) -> DeviceBatch:
    """Its column holds each token's place in the stream, as [T, 2]."""
    batch = device_batch(seed)
    place_T = torch.arange(batch.num_tokens, dtype=torch.int16)
    return replace(batch, columns={"places": torch.stack([place_T, -place_T], 1)})


def places(batch: DeviceBatch) -> list[int]:
    return [int(place) for place in batch.columns["places"][:, 0]]


def spans(batch: DeviceBatch) -> list[range]:
    """Where each sequence lies."""
    return [range(low, high) for low, high in pairwise(batch.cu_seqlens_S1.tolist())]


@given(st.lists(st.integers(0, 8), max_size=9, unique=True))
@settings(max_examples=50, deadline=None)
def test_selected_sequences_come_whole_and_in_the_order_asked_for(chosen: list[int]) -> None:
    batch = with_column()
    part = batch.select(torch.tensor(chosen, dtype=torch.int64))
    wanted = [spans(batch)[i] for i in chosen]
    tokens = [t for span in wanted for t in span]
    assert places(part) == tokens and part.num_tokens == len(tokens)
    assert [len(span) for span in spans(part)] == [len(span) for span in wanted]
    assert part.cu_seqlens_S1.dtype is batch.cu_seqlens_S1.dtype
    assert part.token_ids_T.tolist() == batch.token_ids_T[tokens].tolist()
    assert part.rewards_S.tolist() == batch.rewards_S[chosen].tolist()
    assert part.advantages_T is None and part.temperature == batch.temperature
    assert batch.tokens_of(torch.tensor(chosen, dtype=torch.int64)).tolist() == tokens


def test_trained_tokens_alone_keep_their_sequences_apart() -> None:
    batch = with_column()
    part = batch.trained()
    trained = [[t for t in span if batch.loss_mask_T[t]] for span in spans(batch)]
    assert places(part) == [t for row in trained for t in row]
    assert [len(span) for span in spans(part)] == [len(row) for row in trained]
    assert trained[1] == [] and part.loss_mask_T.all()
    assert part.rewards_S.tolist() == batch.rewards_S.tolist()
    lengths_S, trained_S = batch.sizes()
    assert lengths_S.tolist() == [len(span) for span in spans(batch)]
    assert trained_S.tolist() == batch.trained_S.tolist() == [len(row) for row in trained]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_minibatches_hold_whole_groups_as_evenly_as_they_can(sizes: list[int], count: int) -> None:
    """Groups are taken in the order of their ids, wherever in the batch they lie."""
    ids = [100 - group for group, size in enumerate(sizes) for _ in range(size)]
    total = len(ids)
    batch = with_column().select(torch.arange(total) % 9)
    group_ids_S = torch.tensor(ids)
    parts = replace(batch, group_ids_S=group_ids_S).minibatches(count)
    found = [sorted(set(part.group_ids_S.tolist())) for part in parts]
    assert [group for part in found for group in part] == sorted(set(ids))
    assert sum(len(part.group_ids_S) for part in parts) == total
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert len(parts) == min(count, len(sizes))


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_of_nothing_has_no_minibatch(count: int) -> None:
    assert with_column().select(torch.arange(0)).minibatches(count) == []
