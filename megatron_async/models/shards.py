"""Shard rules: how one Megatron parameter is made of Hugging Face tensors, and back.

Invariants
- `merge(layout, [split(..., rank) for rank in ranks])` is the identity, bit for bit.
- A split reads only the rows or columns that its rank holds.
- The rules alone need no torch: the command line reads them before anything starts.
- Megatron's layouts: fused QKV holds, for each key/value head, its query heads, the key head and
  the value head, so that a tensor rank's share is a run of whole groups; fused gate/up holds, on
  each tensor rank, that rank's gate rows and then its up rows; the vocabulary is padded with
  zero rows to a multiple of the tensor size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ReadSlice = Callable[[str, int, int, int], "Tensor"]
"""`read(name, dim, start, stop)`: that slice of a Hugging Face tensor."""


class ShardLayout(Enum):
    """Sharding of a parameter by Megatron under tensor parallelism."""

    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCAB = "vocab"
    QKV = "qkv"
    GATE_UP = "gate_up"


class LayerPosition(Enum):
    """Pipeline stage that holds a parameter."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter, its names with local and with Transformer Engine layers.

    `parameters` and `tensors` hold `{layer}` (and `{expert}`) where numbered. `shapes` are those
    of the Hugging Face tensors. `groups` is the number of key/value heads of a QKV layout.
    `exported` is False for a copy (the tied head of the last stage).
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
        """Return whether it is a weight of a layer with two dimensions, which Muon updates."""
        return self.place is LayerPosition.LAYER and len(self.shapes[0]) == 2

    def tensor_names(self, layer: int, expert: int) -> tuple[str, ...]:
        """The Hugging Face names of layer `layer` (and expert `expert`), both global numbers."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.tensors)


def split(rule: Rule, names: Sequence[str], read: ReadSlice, size: int, rank: int) -> "Tensor":
    """Tensor rank `rank`'s shard of the parameter, read slice by slice."""
    if rule.layout is ShardLayout.REPLICATED:
        return read(names[0], 0, 0, rule.shapes[0][0])
    if rule.layout is ShardLayout.COLUMNS:
        width = rule.shapes[0][1] // size
        return read(names[0], 1, rank * width, (rank + 1) * width)
    if rule.layout is ShardLayout.VOCAB:
        return _split_vocab(rule, names[0], read, size, rank)
    parts = []
    for name, shape in zip(names, rule.shapes, strict=True):
        rows = shape[0] // size
        parts.append(read(name, 0, rank * rows, (rank + 1) * rows))
    if rule.layout is ShardLayout.QKV:
        groups = rule.groups // size
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return _concatenate(parts, 1).flatten(0, 1)
    return _concatenate(parts, 0)


def _split_vocab(rule: Rule, name: str, read: ReadSlice, size: int, rank: int) -> "Tensor":
    vocab = rule.shapes[0][0]
    rows = -(-vocab // size)
    start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
    shard = read(name, 0, start, stop)
    missing = rows - (stop - start)
    if not missing:
        return shard
    return _concatenate([shard, shard.new_zeros(missing, *shard.shape[1:])], 0)


def merge(rule: Rule, shards: Sequence["Tensor"]) -> "tuple[Tensor, ...]":
    """The Hugging Face tensors from the shards of all tensor ranks, in rank order."""
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
        return tuple(part.flatten(0, 1) for part in grouped.split(rows, dim=1))
    return (whole,)


def _concatenate(shards: Sequence["Tensor"], dim: int) -> "Tensor":
    if len(shards) == 1:
        return shards[0]
    import torch

    return torch.cat(list(shards), dim=dim)
