"""Provides shard rules: how a Megatron parameter is made from Hugging Face tensors, and back.

Invariants
- `merge(layout, [split(..., rank) for rank in ranks])` is the identity, bit for bit.
- A split reads only the rows or columns of its rank.
- The rules do not need torch: the command line reads them before anything starts.
- Megatron's layouts: fused QKV has, for each key/value head, its query heads, the key head and the
  value head, so that a tensor rank's share is a number of consecutive groups. Fused gate/up has, on
  each tensor rank, that rank's gate rows and then its up rows. The vocabulary is padded with zero
  rows to a multiple of the tensor size.
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
    """How one Megatron parameter is made from Hugging Face tensors and divided over tensor ranks.

    Attributes:
        parameters: Names of the parameter in local and in Transformer Engine layers, with `{layer}`
            and `{expert}` in place of numbers.
        tensors: Names of the Hugging Face tensors, likewise.
        shapes: Shapes of the Hugging Face tensors.
        layout: How tensor ranks divide the parameter.
        place: Where in the pipeline the parameter is.
        groups: Number of key/value heads of a QKV layout.
        expert: Whether each expert has such a parameter.
        exported: Whether the parameter is exported; False for a copy (the tied head of the last
            stage).
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
        """Return the Hugging Face names of the rule's tensors in `layer` and `expert`, both global
        numbers."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.tensors)


def split(rule: Rule, names: Sequence[str], read: ReadSlice, size: int, rank: int) -> "Tensor":
    """Return the shard of tensor rank `rank` of a parameter, read slice by slice.

    Args:
        rule: Rule of the parameter.
        names: Names of its Hugging Face tensors.
        read: Reads a slice of a tensor.
        size: Number of tensor ranks.
        rank: Number of the tensor rank.
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
    """Return the rows of the word embedding or output head that tensor rank `rank` has; zero rows
    pad them so that every rank has equally many."""
    vocab = rule.shapes[0][0]
    rows = -(-vocab // size)
    start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
    shard = read(name, 0, start, stop)
    missing = rows - (stop - start)
    if not missing:
        return shard
    return _concatenate([shard, shard.new_zeros(missing, *shard.shape[1:])], 0)


def merge(rule: Rule, shards: Sequence["Tensor"]) -> "tuple[Tensor, ...]":
    """Return the Hugging Face tensors of a parameter, made from the shards of all tensor ranks in
    order."""
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
