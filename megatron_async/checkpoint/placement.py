"""Where each parameter lies in a distributed checkpoint: its key, global shape and pieces.

A distributed checkpoint holds global tensors, cut into pieces. Layers are stacked along a leading
axis and experts along the next one, so that a tensor's name does not depend on the pipeline or
expert layout; every piece belongs to one layer (and one expert).

Invariants
- The keys and shapes are those that Megatron's `sharded_state_dict` of the trainer's models gives
  (tested against real saves of every family): what is written here loads there, and back.
- Pieces of all tensor ranks together cover a parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_async.weights.architecture import Architecture
from megatron_async.weights.families import rules_of
from megatron_async.weights.shards import Layout, Place, Rule


@dataclass(frozen=True)
class Slot:
    """One parameter of the whole model: a rule with its global layer and expert number."""

    rule: Rule
    layer: int = 0
    expert: int = 0

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors it is made of."""
        return self.rule.tensor_names(self.layer, self.expert)


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a global tensor: where it begins, and its values (leading axes of size 1)."""

    offsets: tuple[int, ...]
    tensor: Tensor


def stage_slots(a: Architecture, stage: int, stages: int) -> Iterator[Slot]:
    """The parameters of one pipeline stage in the model's order, each once.

    The tied head of the last stage is the embedding's copy and has no slot of its own.
    """
    rules = [rule for rule in rules_of(a) if rule.exported]
    if stage == 0:
        yield from (Slot(rule) for rule in rules if rule.place is Place.FIRST)
    per_stage = a.num_layers // stages
    for layer in range(stage * per_stage, (stage + 1) * per_stage):
        for rule in rules:
            if rule.place is Place.LAYER:
                experts = a.experts.num if rule.expert and a.experts else 1
                yield from (Slot(rule, layer, expert) for expert in range(experts))
    if stage == stages - 1:
        yield from (Slot(rule) for rule in rules if rule.place is Place.LAST)


def checkpoint_key(rule: Rule) -> str:
    """Name of the global tensor. Norms have their Transformer Engine name, as the trainer saves."""
    name = rule.parameters[0] if rule.expert else rule.parameters[-1]
    return name.replace(".{layer}.", ".").replace(".local_experts.{expert}.", ".experts.")


def leading_shape(a: Architecture, rule: Rule) -> tuple[int, ...]:
    """Sizes of the stacking axes: layers, then experts."""
    if rule.place is not Place.LAYER:
        return ()
    if rule.expert and a.experts is not None:
        return (a.num_layers, a.experts.num)
    return (a.num_layers,)


def leading_offset(slot: Slot) -> tuple[int, ...]:
    """Position on the stacking axes."""
    if slot.rule.place is not Place.LAYER:
        return ()
    return (slot.layer, slot.expert) if slot.rule.expert else (slot.layer,)


def parameter_shape(a: Architecture, rule: Rule, tensor_size: int) -> tuple[int, ...]:
    """Shape of one layer's whole parameter; the vocabulary is padded for `tensor_size` ranks."""
    rest = rule.shapes[0][1:]
    if rule.layout is Layout.VOCAB:
        return (a.padded_vocab_size(tensor_size), *rest)
    return (sum(shape[0] for shape in rule.shapes), *rest)


def shards_of(slot: Slot, tensor_size: int) -> int:
    """Number of tensor ranks that hold different parts of it."""
    whole = slot.rule.expert or slot.rule.layout is Layout.REPLICATED
    return 1 if whole else tensor_size


def pieces(slot: Slot, shard: Tensor, rank: int, size: int) -> Sequence[Piece]:
    """The pieces of tensor rank `rank`'s shard. Gate and up rows are two runs, hence two pieces."""
    lead = leading_offset(slot)
    ones = (1,) * len(lead)

    def piece(part: Tensor, start: Sequence[int]) -> Piece:
        return Piece((*lead, *start), part.reshape(*ones, *part.shape))

    rows, zeros = shard.shape[0], (0,) * (shard.dim() - 1)
    layout = slot.rule.layout
    if layout is Layout.GATE_UP:
        gate, up = shard.chunk(2)
        half = rows // 2
        return (
            piece(gate, (rank * half, *zeros)),
            piece(up, ((size + rank) * half, *zeros)),
        )
    if layout is Layout.COLUMNS:
        return (piece(shard, (0, rank * shard.shape[1])),)
    return (piece(shard, (rank * rows, *zeros)),)
