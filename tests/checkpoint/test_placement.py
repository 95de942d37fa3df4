"""Tests that parameter names do not depend on the layout and that boxes cover parameters once."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.checkpoint.placement import ParameterId, boxes, shards_of, stage_parameter_ids
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import read_architecture
from megatron_async.models.shards import split
from tests.hf_models import CASES, EXPERT_CASES, NARROW_CASES, build_hf_model

FAMILIES = [case for case in (*CASES, *EXPERT_CASES) if case not in NARROW_CASES]


@cache
def architecture(case: str) -> Architecture:
    folder = Path(mkdtemp(prefix="placement-"))
    build_hf_model(case).config.save_pretrained(folder)
    return read_architecture(folder)


def numbered(parameter_id: ParameterId) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a whole parameter whose elements all differ, and the tensors from which it is made."""
    source, count = {}, 0
    for name, shape in zip(parameter_id.tensor_names, parameter_id.rule.shapes, strict=True):
        size = torch.Size(shape).numel()
        source[name] = torch.arange(count, count + size).reshape(shape)
        count += size
    return shard_of(parameter_id, source, 1, 0), source


def shard_of(parameter_id: ParameterId, source: dict[str, Tensor], size: int, rank: int) -> Tensor:
    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        return source[name].narrow(dim, start, stop - start)

    return split(
        parameter_id.rule, parameter_id.tensor_names, read, shards_of(parameter_id.rule, size), rank
    )


@pytest.mark.parametrize("case", FAMILIES)
@given(data=st.data())
def test_boxes_of_any_cut_cover_every_parameter_exactly_once(
    case: str, data: st.DataObject
) -> None:
    """Cuts the shards of the tensor ranks; no box contains padding of the vocabulary."""
    a = architecture(case)
    parameter_id = data.draw(st.sampled_from(list(stage_parameter_ids(a, 0, 1))))
    size = data.draw(st.sampled_from([1, 2, 4]))
    whole, source = numbered(parameter_id)
    assert whole.shape == parameter_id.shape
    found = torch.full(parameter_id.shape, -1)
    for rank in range(shards_of(parameter_id.rule, size)):
        flat_N = shard_of(parameter_id, source, size, rank).reshape(-1)
        cuts = data.draw(st.lists(st.integers(0, len(flat_N)), max_size=4))
        for begin, end in pairwise([0, *sorted(cuts), len(flat_N)]):
            for box in boxes(parameter_id, size, rank, begin, end):
                assert begin <= box.begin < box.end <= end
                where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.shape, strict=True))
                assert (found[where] == -1).all()
                found[where] = flat_N[box.begin : box.end].view(box.shape)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("case", FAMILIES)
def test_parameter_names_are_unique_and_equal_over_all_stages(case: str) -> None:
    a = architecture(case)
    names = [parameter_id.name for parameter_id in stage_parameter_ids(a, 0, 1)]
    assert len(set(names)) == len(names)
    assert [
        parameter_id.name for stage in range(2) for parameter_id in stage_parameter_ids(a, stage, 2)
    ] == names
