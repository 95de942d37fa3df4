"""Provides shard rules. A rule says from which Hugging Face tensors a Megatron parameter is made,
and how tensor-parallel ranks divide it into shards; `split` makes a shard, and `merge` converts all
shards back.

Invariants
- `merge(rule, [split(rule, ..., rank) for rank in ranks])` returns the original Hugging Face
  tensors, bit for bit.
- `split` reads only the rows or columns that the rank needs.
- The rules do not need torch: the command line reads them before anything starts.
- The order of rows is Megatron's. A fused QKV parameter has one group of rows for each key/value
  head: its query heads, the key head and the value head. So a tensor-parallel rank's shard is a
  number of consecutive groups. A shard of a fused gate/up parameter has the rank's gate rows and
  then its up rows. The vocabulary is padded with zero rows to a multiple of the number of
  tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ReadSlice = Callable[[str, int, int, int], "Tensor"]
"""`read(name, dim, start, stop)` returns the slice [start, stop) along axis `dim` of tensor
`name`."""


class ShardLayout(Enum):
    """How Megatron's tensor parallelism divides a parameter."""

    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCAB = "vocab"
    QKV = "qkv"
    GATE_UP = "gate_up"


class LayerPosition(Enum):
    """Where in the pipeline a parameter is: in the first stage, in each layer, or in the last
    stage."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class Rule:
    """Says from which Hugging Face tensors one Megatron parameter is made, and how tensor-parallel
    ranks divide it.

    Attributes:
        parameters: Megatron's name of the parameter in local layers and, if that differs, in
            Transformer Engine layers, with `{layer}` and `{expert}` in place of numbers.
        tensors: Names of the Hugging Face tensors, with `{layer}` and `{expert}` in place of
            numbers.
        shapes: Shapes of the Hugging Face tensors.
        layout: How tensor-parallel ranks divide the parameter.
        place: Where in the pipeline the parameter is.
        groups: For a fused QKV parameter, the number of key/value heads; otherwise 0.
        expert: Whether each expert has such a parameter.
        exported: Whether the parameter is written when weights are exported or saved. It is False
            for an output head that shares its weights with the embedding.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: ShardLayout
    place: LayerPosition = LayerPosition.LAYER
    groups: int = 0
    expert: bool = False
    exported: bool = True

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a two-dimensional weight of a layer, which the Muon optimizer
        updates."""
        return self.place is LayerPosition.LAYER and len(self.shapes[0]) == 2

    def tensor_names(self, layer: int, expert: int) -> tuple[str, ...]:
        """Return the Hugging Face names of the rule's tensors for a layer and an expert, whose
        numbers are those in the whole model."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.tensors)


def split(rule: Rule, names: Sequence[str], read: ReadSlice, size: int, rank: int) -> "Tensor":
    """Return a tensor-parallel rank's shard of a parameter, made from slices of its Hugging Face
    tensors.

    Args:
        rule: Rule of the parameter.
        names: Names of its Hugging Face tensors.
        read: Function that reads a slice of a tensor.
        size: Number of tensor-parallel ranks.
        rank: Number of the tensor-parallel rank.
    """
    if rule.layout is ShardLayout.REPLICATED:
        return read(names[0], 0, 0, rule.shapes[0][0])
    if rule.layout is ShardLayout.COLUMNS:
        width = rule.shapes[0][1] // size
        return read(names[0], 1, rank * width, (rank + 1) * width)
    if rule.layout is ShardLayout.VOCAB:
        return _split_vocab(rule, names[0], read, size, rank)
    slices = []
    for name, shape in zip(names, rule.shapes, strict=True):
        rows = shape[0] // size
        slices.append(read(name, 0, rank * rows, (rank + 1) * rows))
    if rule.layout is ShardLayout.QKV:
        groups = rule.groups // size
        slices = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in slices]
        return _concatenate(slices, 1).flatten(0, 1)
    return _concatenate(slices, 0)


def _split_vocab(rule: Rule, name: str, read: ReadSlice, size: int, rank: int) -> "Tensor":
    """Return the rows of the word embedding or output head that tensor-parallel rank `rank` has. If
    it has fewer rows than other ranks, zero rows are appended."""
    vocab = rule.shapes[0][0]
    rows = -(-vocab // size)
    start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
    shard = read(name, 0, start, stop)
    missing = rows - (stop - start)
    if not missing:
        return shard
    return _concatenate([shard, shard.new_zeros(missing, *shard.shape[1:])], 0)


def merge(rule: Rule, shards: Sequence["Tensor"]) -> "tuple[Tensor, ...]":
    """Return the Hugging Face tensors of a parameter, made from the shards of all tensor-parallel
    ranks in rank order."""
    if rule.layout is ShardLayout.REPLICATED:
        return (shards[0],)
    if rule.layout is ShardLayout.COLUMNS:
        return (_concatenate(shards, 1),)
    if rule.layout is ShardLayout.GATE_UP:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _concatenate(gates, 0), _concatenate(ups, 0)
    whole = _concatenate(shards, 0)
    if rule.layout is ShardLayout.VOCAB:
        return (whole[: rule.shapes[0][0]],)
    if rule.layout is ShardLayout.QKV:
        grouped = whole.reshape(rule.groups, -1, *whole.shape[1:])
        rows = [shape[0] // rule.groups for shape in rule.shapes]
        return tuple(tensor.flatten(0, 1) for tensor in grouped.split(rows, dim=1))
    return (whole,)


def _concatenate(shards: Sequence["Tensor"], dim: int) -> "Tensor":
    """Return the concatenation of `shards` along axis `dim`; a single shard is not copied."""
    if len(shards) == 1:
        return shards[0]
    import torch

    return torch.cat(list(shards), dim=dim)
