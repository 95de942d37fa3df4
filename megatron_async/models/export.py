"""Exports the model: turns Megatron shards back into Hugging Face tensors, as a stream of buckets.

Invariants
- The model is walked once, in one order that every rank derives from the table of rules. In
  addition to its own shards, a rank has at most one bucket and one whole parameter in memory.
- A stage's leader (tensor rank 0 of the first data-parallel replica) gathers its stage: tensor
  shards over the tensor group, experts over the expert group. `stage_tensors` is that walk. Each
  leader sends its own layers to engines (`stage_buckets`). For a file that rank 0 writes,
  `sender_tensors` forwards every stage to rank 0. With `everywhere`, every rank gets all tensors.
- These iterators are collective: every rank must exhaust them, even if it receives nothing.
- The tied head of the last stage is a copy and is not exported.
- Yielded tensors may share memory with parameters; use them before the next optimizer step.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_async.models.architecture import Architecture
from megatron_async.models.families import stage_rules
from megatron_async.models.parameters import local_parameters
from megatron_async.models.shards import Rule, ShardLayout, merge

NamedTensor = tuple[str, Tensor]
SENDER = 0


@dataclass(frozen=True)
class WalkStep:
    """One step of the walk over the parameters of a pipeline stage: one parameter of one layer.

    A parameter that every expert has is exported in several steps. Each of them covers the
    parameter of one expert on each expert-parallel rank.

    Attributes:
        rule: Rule of the parameter.
        layer: Global number of its layer.
        experts: Global numbers of the experts whose parameter this step covers, one for each
            expert-parallel rank; (0,) if the parameter does not belong to an expert.
    """

    rule: Rule
    layer: int
    experts: Sequence[int] = (0,)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Generate the name and shape of each Hugging Face tensor of this step, in order."""
        for expert in self.experts:
            yield from zip(
                self.rule.tensor_names(self.layer, expert), self.rule.shapes, strict=True
            )


def stage_walk(architecture: Architecture, stage: int) -> Iterator[WalkStep]:
    """Generate the steps in which `stage` exports its parameters, in the same order on every
    rank."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = range(architecture.experts.num if architecture.experts else 0)
    per_rank = len(experts) // parallel_state.get_expert_model_parallel_world_size()
    for rule, layer in stage_rules(architecture, stage, stages):
        if rule.expert:
            for local_expert in range(per_rank):
                yield WalkStep(rule, layer, experts[local_expert::per_rank])
        else:
            yield WalkStep(rule, layer)


def stage_leader(stage: int) -> int:
    """Return the global rank of the leader of pipeline stage `stage`, which gathers and sends the
    stage's layers: the stage's first rank in Megatron's rank order."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return stage * (dist.get_world_size() // stages)


@torch.no_grad()
def stage_tensors(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, everywhere: bool = False
) -> Generator[NamedTensor, None, None]:
    """Generate the name and values of each Hugging Face tensor of this rank's pipeline stage, one
    step at a time.

    The stage's leader, its first rank, gets whole tensors. Other ranks of the stage get nothing,
    but must iterate to send their shards. Collective.

    Args:
        chunks: This rank's model chunks.
        architecture: The architecture of the model.
        everywhere: Whether every rank of the stage gets whole tensors.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    leader = stage_leader(stage)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_model_parallel_group()
    shard_of = {
        (placed.rule, placed.layer, placed.expert): placed.parameter.detach()
        for placed in local_parameters(chunks, architecture)
    }
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for step in stage_walk(architecture, stage):
        rule = step.rule
        group = expert_group if rule.expert else tensor_group
        if not everywhere and leader not in dist.get_process_group_ranks(group):
            continue
        shard = shard_of[rule, step.layer, step.experts[expert_rank if rule.expert else 0]]
        if rule.layout is ShardLayout.REPLICATED:
            shards = [shard] if everywhere or dist.get_rank() == leader else []
        else:
            shards = _gather(shard, None if everywhere else leader, group)
        if shards:
            wholes = [[whole] for whole in shards] if rule.expert else [shards]
            tensors = [tensor for whole in wholes for tensor in merge(rule, whole)]
            for (name, _), tensor in zip(step.tensors(), tensors, strict=True):
                yield name, tensor


def _gather(shard: Tensor, leader: int | None, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather the shards of a parameter from all ranks of `group`; return them in rank order.

    Args:
        leader: The rank that gets the shards; other ranks get an empty list. None means every rank.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return [shard]
    shard = shard.contiguous()
    if leader is None:
        all_shards = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(all_shards, shard, group=group)
        return all_shards
    is_leader = dist.get_rank() == leader
    shards = [torch.empty_like(shard) for _ in range(size)] if is_leader else None
    dist.gather(shard, shards, dst=leader, group=group)
    return shards or []


def stage_buckets(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int,
    convert: Callable[[Iterator[NamedTensor]], Iterator[NamedTensor]] | None = None,
    *,
    everywhere: bool = False,
) -> Iterator[list[NamedTensor]]:
    """Generate the tensors of this rank's pipeline stage in buckets, on the stage's leader (its
    first rank). Collective.

    Every other rank must iterate too; it gets nothing, except with `everywhere`.

    Args:
        chunks: This rank's model chunks.
        architecture: The architecture of the model.
        bucket_bytes: Size limit of a bucket.
        convert: Changes the tensors before they are put into buckets (precision, quantization).
        everywhere: Whether every rank gets the whole model, stage after stage, in the same buckets.
    """
    if everywhere:
        tensors = _everywhere(chunks, architecture)
    else:
        tensors = stage_tensors(chunks, architecture)
    return buckets(tensors if convert is None else convert(tensors), bucket_bytes)


@torch.no_grad()
def _everywhere(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Generator[NamedTensor, None, None]:
    """Generate the name and values of each tensor of the whole model on every rank, stage after
    stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    parameter = next(chunks[0].parameters())
    for stage, source in enumerate(dist.get_process_group_ranks(group)):
        if source == dist.get_rank():
            tensors = stage_tensors(chunks, architecture, everywhere=True)
        else:
            tensors = (
                (name, torch.empty(shape, dtype=parameter.dtype, device=parameter.device))
                for step in stage_walk(architecture, stage)
                for name, shape in step.tensors()
            )
        for name, tensor in tensors:
            whole = tensor.contiguous()
            if dist.get_world_size(group) > 1:
                dist.broadcast(whole, src=source, group=group)
            yield name, whole


def sender_tensors(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, dtype: torch.dtype | None = None
) -> Iterator[NamedTensor]:
    """Generate the name and values of each tensor of the whole model on global rank 0. Collective.

    Stages follow one after the other. Every other rank must iterate too, and gets nothing.

    Args:
        chunks: This rank's model chunks.
        architecture: The architecture of the model.
        dtype: Precision to which tensors are cast before they are sent; None for the precision of
            the parameters.
    """
    parameter = next(chunks[0].parameters())
    dtype = dtype or parameter.dtype
    rank = dist.get_rank()
    for name, tensor in stage_tensors(chunks, architecture):
        if rank == SENDER:
            yield name, tensor.to(dtype)
        else:
            dist.send(tensor.to(dtype).contiguous(), dst=SENDER)
    if rank != SENDER:
        return
    for stage in range(1, parallel_state.get_pipeline_model_parallel_world_size()):
        for step in stage_walk(architecture, stage):
            for name, shape in step.tensors():
                received = torch.empty(shape, dtype=dtype, device=parameter.device)
                dist.recv(received, src=stage_leader(stage))
                yield name, received


def buckets(tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group consecutive tensors into buckets of at most `bucket_bytes`; a larger tensor is alone in
    one."""
    bucket: list[NamedTensor] = []
    bucket_size = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and bucket_size + size > bucket_bytes:
            yield bucket
            bucket, bucket_size = [], 0
        bucket.append((name, tensor))
        bucket_size += size
    if bucket:
        yield bucket
