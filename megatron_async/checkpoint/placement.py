"""Maps the shards of parameters to boxes of the whole tensors that a checkpoint stores.

A checkpoint stores whole tensors, one for each layer (and expert), cut into boxes. Names and shapes
do not depend on the layout: the vocabulary has no padding, experts have global numbers, and a tied
output head is the embedding.

Invariants
- The boxes of all tensor ranks' shards together cover a parameter exactly once, and so do those of
  any division of a flattened shard into spans.
- A box is one contiguous span of its shard's elements, so that every slice is a view.
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
    """Identifies one parameter of the whole model: its sharding rule with its global layer and
    expert."""

    rule: Rule
    layer: int
    expert: int

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors from which the parameter is made."""
        return self.rule.tensor_names(self.layer, self.expert)

    @property
    def name(self) -> str:
        """Name of the parameter in a checkpoint: Megatron's name with global layer and expert
        numbers."""
        name = self.rule.parameters[0].format(layer=self.layer, expert=self.expert)
        return name.replace(".local_experts.", ".")

    @property
    def weights(self) -> str:
        """Name of the checkpoint's tensor with the parameter's values."""
        return f"{WEIGHTS}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        shapes = self.rule.shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def stage_parameter_ids(a: Architecture, stage: int, stages: int) -> Iterator[ParameterId]:
    """Generate the ids of the parameters of one pipeline stage, each once, in the model's order.

    Args:
        a: The architecture of the model.
        stage: Number of the pipeline stage.
        stages: Number of pipeline stages.
    """
    for rule, layer in stage_rules(a, stage, stages):
        experts = a.experts.num if rule.expert and a.experts else 1
        yield from (ParameterId(rule, layer, expert) for expert in range(experts))


def tensor_shapes(a: Architecture, optimizer: str | None) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of a checkpoint of this model.

    Args:
        a: The architecture of the model.
        optimizer: Whose state the checkpoint contains, adam or muon; None means only weights.
    """
    found = {}
    for parameter_id in stage_parameter_ids(a, 0, 1):
        moments = (MOMENTUM,) if optimizer == "muon" and parameter_id.rule.is_matrix else ADAM
        for state in (WEIGHTS, *(moments if optimizer else ())):
            found[f"{state}/{parameter_id.name}"] = parameter_id.shape
    return found


def incompatibility(manifest: Manifest, a: Architecture, optimizer: str | None) -> str:
    """Return why a model cannot load a checkpoint; empty if it can.

    Args:
        manifest: The manifest of the checkpoint.
        a: The architecture of the model.
        optimizer: Whose state is loaded, adam or muon; None means that only weights are loaded.
    """
    required = tensor_shapes(a, optimizer)
    saved = {name: t.shape for name, t in manifest.tensors.items() if optimizer or name in required}
    # In reverse order, `weights/...` comes before Adam's moments (`exp_avg/...`), so that a
    # difference is reported for a weight, whose name users know.
    for name in sorted(required.keys() | saved, reverse=True):
        if saved.get(name) != required.get(name):
            shapes = (saved.get(name, "none"), required.get(name, "none"))
            return f"tensor {name} has shape {shapes[0]}; the model requires {shapes[1]}"
    return ""


def exported(a: Architecture, rule: Rule) -> Rule:
    """Return the rule under which a parameter is stored: the embedding's for a tied head, else
    `rule`."""
    if rule.exported:
        return rule
    return next(other for other in rules_of(a) if other.exported and other.tensors == rule.tensors)


def shards_of(rule: Rule, tensor_size: int) -> int:
    """Return how many different shards a parameter has over `tensor_size` tensor ranks.

    The result is 1 if every rank has the whole parameter.
    """
    return 1 if rule.expert or rule.layout is ShardLayout.REPLICATED else tensor_size


@dataclass(frozen=True)
class Box:
    """A contiguous span of a shard's elements that is a rectangle of the whole tensor.

    Attributes:
        begin: Number of the first element in the flattened shard.
        offsets: Index of the first element in the whole tensor.
        shape: Shape of the rectangle.
    """

    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Number of the element after the box's last one in the flattened shard."""
        return self.begin + prod(self.shape)


def boxes(
    parameter_id: ParameterId, size: int, rank: int, begin: int = 0, end: int | None = None
) -> list[Box]:
    """Return the boxes of elements [begin, end) of a parameter's flattened shard; padding is in no
    box.

    Args:
        parameter_id: The parameter.
        size: Number of tensor ranks.
        rank: The tensor rank whose shard it is.
        begin: Number of the first element in the shard.
        end: Number of the element after the last one; None means the end of the shard.
    """
    found = []
    for rows, offsets, width in _bands(parameter_id, size, rank):
        first = max(begin, rows.start * width)
        last = rows.stop * width if end is None else min(end, rows.stop * width)
        for start, shape in _rectangles(first, last, width):
            row, column = divmod(start, width)
            origin = (offsets[0] + row - rows.start, offsets[1] + column)
            axes = len(parameter_id.shape)
            found.append(Box(start, origin[:axes], shape[:axes]))
    return found


def _bands(
    parameter_id: ParameterId, size: int, rank: int
) -> Iterator[tuple[range, tuple[int, int], int]]:
    """Generate the bands of a tensor rank's shard: rows that are consecutive in the whole tensor.

    Yields:
        The row numbers in the shard, the index of the band's first element in the whole tensor, and
        the width of the shard's rows.
    """
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
        # Only the rows of a vocabulary may not be divisible by `size`; its last shards are padded.
        share = -(-rows // size)
        first = min(rank * share, rows)
        yield range(min(share, rows - first)), (first, 0), width


def _rectangles(begin: int, end: int, width: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Divide the elements [begin, end) of a matrix into at most three rectangles of rows.

    Args:
        width: Number of elements of a row.

    Yields:
        The number of each rectangle's first element, and its shape.
    """
    while begin < end:
        column = begin % width
        whole = (end - begin) // width
        if column or not whole:
            shape = (1, min(width - column, end - begin))
        else:
            shape = (whole, width)
        yield begin, shape
        begin += prod(shape)
