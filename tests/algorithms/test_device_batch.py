"""Tests selections of a batch on its device: they contain the same tokens, with all their columns,
as selections in plain Python."""

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
    """Return a batch with a column [T, 2] that contains each token's index in the stream."""
    batch = device_batch(seed)
    index_T = torch.arange(batch.num_tokens, dtype=torch.int16)
    return replace(batch, columns={"indices": torch.stack([index_T, -index_T], 1)})


def token_indices(batch: DeviceBatch) -> list[int]:
    return [int(index) for index in batch.columns["indices"][:, 0]]


def spans(batch: DeviceBatch) -> list[range]:
    """Return the range of each sequence's tokens in the stream."""
    return [range(low, high) for low, high in pairwise(batch.cu_seqlens_S1.tolist())]


@given(st.lists(st.integers(0, 8), max_size=9, unique=True))
@settings(max_examples=50, deadline=None)
def test_select_returns_complete_sequences_in_the_requested_order(chosen: list[int]) -> None:
    batch = with_column()
    selected = batch.select(torch.tensor(chosen, dtype=torch.int64))
    wanted = [spans(batch)[i] for i in chosen]
    tokens = [t for span in wanted for t in span]
    assert token_indices(selected) == tokens and selected.num_tokens == len(tokens)
    assert [len(span) for span in spans(selected)] == [len(span) for span in wanted]
    assert selected.cu_seqlens_S1.dtype is batch.cu_seqlens_S1.dtype
    assert selected.token_ids_T.tolist() == batch.token_ids_T[tokens].tolist()
    assert selected.rewards_S.tolist() == batch.rewards_S[chosen].tolist()
    assert selected.advantages_T is None and selected.temperature == batch.temperature
    assert batch.tokens_of(torch.tensor(chosen, dtype=torch.int64)).tolist() == tokens


def test_trained_returns_only_trained_tokens_with_sequence_boundaries() -> None:
    batch = with_column()
    selected = batch.trained()
    trained = [[t for t in span if batch.loss_mask_T[t]] for span in spans(batch)]
    assert token_indices(selected) == [t for row in trained for t in row]
    assert [len(span) for span in spans(selected)] == [len(row) for row in trained]
    assert trained[1] == [] and selected.loss_mask_T.all()
    assert selected.rewards_S.tolist() == batch.rewards_S.tolist()
    lengths_S, trained_S = batch.sizes()
    assert lengths_S.tolist() == [len(span) for span in spans(batch)]
    assert trained_S.tolist() == batch.trained_S.tolist() == [len(row) for row in trained]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_minibatches_contain_whole_groups_as_evenly_as_possible(
    sizes: list[int], count: int
) -> None:
    """Groups are divided in the order of their IDs, regardless of their positions in the batch."""
    ids = [100 - group for group, size in enumerate(sizes) for _ in range(size)]
    total = len(ids)
    batch = with_column().select(torch.arange(total) % 9)
    group_ids_S = torch.tensor(ids)
    minibatches = replace(batch, group_ids_S=group_ids_S).minibatches(count)
    found = [sorted(set(minibatch.group_ids_S.tolist())) for minibatch in minibatches]
    assert [group for groups in found for group in groups] == sorted(set(ids))
    assert sum(len(minibatch.group_ids_S) for minibatch in minibatches) == total
    assert sum(minibatch.num_tokens for minibatch in minibatches) == batch.num_tokens
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert len(minibatches) == min(count, len(sizes))


@pytest.mark.parametrize("count", [1, 3])
def test_minibatches_returns_an_empty_list_when_the_batch_is_empty(count: int) -> None:
    assert with_column().select(torch.arange(0)).minibatches(count) == []
