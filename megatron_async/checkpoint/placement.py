"""Maps the shards of parameters on ranks to boxes (rectangular slices) of the whole tensors that a
checkpoint stores.

For each layer (and expert), a checkpoint stores each parameter as a whole tensor, cut into boxes.
Names and shapes of the tensors do not depend on the number of ranks: the vocabulary has no padding,
experts are numbered over all ranks, and an output head that shares its weights with the embedding
is stored once, as the embedding.

Invariants
- The boxes of all different shards of a parameter together cover it exactly once. (A parameter that
  every tensor-parallel rank has completely has only one shard.) If a flattened shard is divided
  into spans in any way, the boxes of all spans together cover the shard, without its padding,
  exactly once.
- A box is one contiguous span of its shard's elements, so that it can be saved and loaded as a view
  of the rank's memory.
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
    """Identifies one parameter of the whole model by its sharding rule, the number of its layer and
    the number of its expert, both counted over all ranks.

    Attributes:
        expert: Number of the expert; 0 if the parameter does not belong to an expert.
    """

    rule: Rule
    layer: int
    expert: int

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors from which the parameter is made."""
        return self.rule.tensor_names(self.layer, self.expert)

    @property
    def name(self) -> str:
        """Name of the parameter in a checkpoint: Megatron's name, with the numbers of layer and
        expert counted over all ranks."""
        name = self.rule.parameters[0].format(layer=self.layer, expert=self.expert)
        return name.replace(".local_experts.", ".")

    @property
    def weights(self) -> str:
        """Name of the tensor in a checkpoint that has the parameter's values."""
        return f"{WEIGHTS}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        shapes = self.rule.shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def stage_parameter_ids(a: Architecture, stage: int, stages: int) -> Iterator[ParameterId]:
    """Generate the ids of the parameters of one pipeline stage in the model's order. Each id occurs
    once.

    Args:
        a: The architecture of the model.
        stage: Number of the pipeline stage.
        stages: Number of pipeline stages.
    """
    for rule, layer in stage_rules(a, stage, stages):
        experts = a.experts.num if rule.expert and a.experts else 1
        yield from (ParameterId(rule, layer, expert) for expert in range(experts))


def tensor_shapes(a: Architecture, optimizer: str | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint of this model, by the tensor's name.

    Args:
        a: The architecture of the model.
        optimizer: Optimizer whose state the checkpoint contains, adam or muon; None if it contains
            only weights.
    """
    found = {}
    for parameter_id in stage_parameter_ids(a, 0, 1):
        moments = (MOMENTUM,) if optimizer == "muon" and parameter_id.rule.is_matrix else ADAM
        for state in (WEIGHTS, *(moments if optimizer else ())):
            found[f"{state}/{parameter_id.name}"] = parameter_id.shape
    return found


def incompatibility(manifest: Manifest, a: Architecture, optimizer: str | None) -> str:
    """Return the reason why a model cannot load a checkpoint, as a message; an empty string if it
    can.

    Args:
        manifest: The manifest of the checkpoint.
        a: The architecture of the model.
        optimizer: Optimizer whose state is loaded, adam or muon; None if only weights are loaded.
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
    """Return the rule under which a parameter is stored. For an output head that shares its weights
    with the embedding, it is the embedding's rule, otherwise `rule`."""
    if rule.exported:
        return rule
    return next(other for other in rules_of(a) if other.exported and other.tensors == rule.tensors)


def shards_of(rule: Rule, tensor_size: int) -> int:
    """Return into how many different shards a parameter is divided over `tensor_size`
    tensor-parallel ranks.

    The result is 1 if every rank has the whole parameter.
    """
    return 1 if rule.expert or rule.layout is ShardLayout.REPLICATED else tensor_size


@dataclass(frozen=True)
class Box:
    """A contiguous span of a flattened shard's elements that is a rectangle of the whole tensor.

    Attributes:
        begin: Number of the first element in the flattened shard.
        offsets: Index of the first element in the whole tensor, one number for each axis.
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
    """Divide the elements [begin, end) of a parameter's flattened shard into boxes, which are
    rectangles of the whole tensor. Padding is in no box.

    Args:
        parameter_id: The parameter.
        size: Number of tensor-parallel ranks.
        rank: The tensor-parallel rank that has the shard.
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
    """Generate the bands of a tensor-parallel rank's shard. A band consists of rows of the shard
    that are consecutive rows of the whole tensor.

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
        # Rows are divided evenly. Only the number of rows of a vocabulary may not be divisible by
        # `size`; then the last shards have fewer rows, followed by padding.
        share = -(-rows // size)
        first = min(rank * share, rows)
        yield range(min(share, rows - first)), (first, 0), width


def _rectangles(begin: int, end: int, width: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Divide the elements [begin, end) of a matrix, counted row by row, into at most three
    rectangles: the rest of the first row, whole rows, and the beginning of the last row.

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
