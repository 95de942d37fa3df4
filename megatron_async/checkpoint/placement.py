"""Places of parameters in a checkpoint: name, whole shape, and the boxes of a shard.

A checkpoint holds whole tensors, one for each layer (and expert), cut into boxes. Names and shapes
do not depend on the layout: the vocabulary has no padding, experts have global numbers, a tied head
is the embedding.

Invariants
- The boxes of all tensor ranks' shards together cover a parameter exactly once, and so do those of
  any cut of a flattened shard into runs.
- A box is one run of its shard's elements, so that every piece is a view.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron_async.checkpoint.manifest import ADAM, MOMENTUM, WEIGHTS, Manifest
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import rules_of, stage_rules
from megatron_async.models.shards import Rule, ShardLayout


@dataclass(frozen=True)
class ParameterId:
    """A parameter of the whole model: a rule with its global layer and expert number."""

    rule: Rule
    layer: int
    expert: int

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors it is made of."""
        return self.rule.tensor_names(self.layer, self.expert)

    @property
    def name(self) -> str:
        """Name in a checkpoint: that of Megatron's local layers, with global numbers."""
        name = self.rule.parameters[0].format(layer=self.layer, expert=self.expert)
        return name.replace(".local_experts.", ".")

    @property
    def weights(self) -> str:
        """Name of the tensor with its values."""
        return f"{WEIGHTS}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        shapes = self.rule.shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def stage_parameter_ids(a: Architecture, stage: int, stages: int) -> Iterator[ParameterId]:
    """The parameters of one pipeline stage in the model's order, each once."""
    for rule, layer in stage_rules(a, stage, stages):
        experts = a.experts.num if rule.expert and a.experts else 1
        yield from (ParameterId(rule, layer, expert) for expert in range(experts))


def tensor_shapes(a: Architecture, optimizer: str | None) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a checkpoint; without an optimizer, of the weights alone."""
    found = {}
    for parameter_id in stage_parameter_ids(a, 0, 1):
        moments = (MOMENTUM,) if optimizer == "muon" and parameter_id.rule.is_matrix else ADAM
        for state in (WEIGHTS, *(moments if optimizer else ())):
            found[f"{state}/{parameter_id.name}"] = parameter_id.shape
    return found


def incompatibility(manifest: Manifest, a: Architecture, optimizer: str | None) -> str:
    """Return why a model cannot load all of a checkpoint (or its weights); empty: it can."""
    wanted = tensor_shapes(a, optimizer)
    saved = {name: t.shape for name, t in manifest.tensors.items() if optimizer or name in wanted}
    for name in sorted(wanted.keys() | saved, reverse=True):  # the weights first
        if saved.get(name) != wanted.get(name):
            shapes = (saved.get(name, "none"), wanted.get(name, "none"))
            return f"tensor {name} has shape {shapes[0]}, and the model asks for {shapes[1]}"
    return ""


def exported(a: Architecture, rule: Rule) -> Rule:
    """The rule whose parameter this one's is: another one for a tied head, else itself."""
    if rule.exported:
        return rule
    return next(other for other in rules_of(a) if other.exported and other.tensors == rule.tensors)


def shards_of(rule: Rule, tensor_size: int) -> int:
    """Number of tensor ranks that hold different parts of a parameter."""
    return 1 if rule.expert or rule.layout is ShardLayout.REPLICATED else tensor_size


@dataclass(frozen=True)
class Box:
    """A run of a shard's elements, from number `begin` on, and its place in the whole tensor."""

    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + prod(self.shape)


def boxes(
    parameter_id: ParameterId, size: int, rank: int, begin: int = 0, end: int | None = None
) -> list[Box]:
    """The elements [begin, end) of shard `rank` of `size`, flattened; padding is in no box."""
    found = []
    for rows, offsets, width in _bands(parameter_id, size, rank):
        first = max(begin, rows.start * width)
        last = rows.stop * width if end is None else min(end, rows.stop * width)
        for start, shape in _rectangles(first, last, width):
            row, column = divmod(start, width)
            place = (offsets[0] + row - rows.start, offsets[1] + column)
            axes = len(parameter_id.shape)
            found.append(Box(start, place[:axes], shape[:axes]))
    return found


def _bands(
    parameter_id: ParameterId, size: int, rank: int
) -> Iterator[tuple[range, tuple[int, int], int]]:
    """Runs of a shard's rows, where each begins in the whole tensor, and their width."""
    rows, width = (*parameter_id.shape, 1)[:2]
    size = shards_of(parameter_id.rule, size)
    rank = rank if size > 1 else 0
    layout = parameter_id.rule.layout
    if layout is ShardLayout.COLUMNS:
        width //= size
        yield range(rows), (0, rank * width), width
    elif layout is ShardLayout.GATE_UP and size > 1:
        half = rows // 2 // size
        yield range(half), (rank * half, 0), width
        yield range(half, 2 * half), ((size + rank) * half, 0), width
    else:
        share = -(-rows // size)  # only a vocabulary has a remainder
        first = min(rank * share, rows)
        yield range(min(share, rows - first)), (first, 0), width


def _rectangles(begin: int, end: int, width: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """A run of elements as at most three rectangles of rows: where each begins, and its shape."""
    while begin < end:
        column = begin % width
        whole = (end - begin) // width
        if column or not whole:
            shape = (1, min(width - column, end - begin))
        else:
            shape = (whole, width)
        yield begin, shape
        begin += prod(shape)
