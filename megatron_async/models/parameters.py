"""Maps each parameter on a rank to its shard rule, and to the numbers of its layer and expert in
the whole model.

Invariants
- Every parameter has exactly one rule. A parameter without a rule causes an error; it is never
  skipped.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_async.models.architecture import Architecture
from megatron_async.models.families import rules_of
from megatron_async.models.shards import LayerPosition, Rule

_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(
    r"(?<=\.local_experts\.)(\d+)(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)(\d+)$"
)


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """A parameter of this rank with its position in the whole model.

    Attributes:
        name: Its name in the part of the model that this rank has.
        parameter: This rank's shard of the parameter.
        rule: Its shard rule: from which Hugging Face tensors it is made, and how ranks divide it.
        layer: Number of its layer in the whole model; 0 if it is in no layer.
        expert: Number of its expert in the whole model; 0 if it belongs to no expert.
        size: Number of ranks over which tensor parallelism divides the parameter.
        rank: Number of this rank among these ranks.
    """

    name: str
    parameter: Tensor
    rule: Rule
    layer: int
    expert: int
    size: int
    rank: int

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors from which the parameter is made."""
        return self.rule.tensor_names(self.layer, self.expert)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model that is inside Megatron's wrappers for data parallelism and precision."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def local_parameters(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Iterator[LocalParameter]:
    """Generate every parameter that this rank has, with its shard rule and the numbers of its layer
    and expert in the whole model.

    Raises:
        KeyError: If a parameter has no rule.
    """
    by_name = {name: rule for rule in rules_of(architecture) for name in rule.parameters}
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first_layer = stage * (architecture.num_layers // stages)
    experts = architecture.experts.num if architecture.experts else 0
    per_rank = experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * per_rank
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in unwrap(chunk).named_parameters():
            template, layer, expert = _template(name)
            rule = by_name.get(template)
            if rule is None:
                raise KeyError(f"no rule of family {architecture.family} names parameter {name}")
            yield LocalParameter(
                name=name,
                parameter=parameter,
                rule=rule,
                layer=first_layer + layer if rule.place is LayerPosition.LAYER else 0,
                expert=first_expert + expert if rule.expert else 0,
                size=1 if rule.expert else size,
                rank=0 if rule.expert else rank,
            )


def _template(name: str) -> tuple[str, int, int]:
    """Return a parameter's name in the form that shard rules have, and the numbers of its layer and
    expert on this rank.

    In that form, the numbers in the name are replaced by `{layer}` and `{expert}`.
    """
    layer = _LAYER.search(name)
    expert = _EXPERT.search(name)
    template = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))
    return template, int(layer[0]) if layer else 0, int(expert[0]) if expert else 0
