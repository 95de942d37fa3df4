"""Exports the model: converts Megatron's shards back to Hugging Face tensors and yields them in
buckets, which are lists of tensors of limited size.

Invariants
- The parameters are exported one after the other, in an order that every rank derives from the
  table of shard rules. In addition to its own shards, a rank has at most one bucket and one whole
  parameter in memory.
- Each pipeline stage has a leader: tensor-parallel rank 0 of the first data-parallel replica. It
  gathers the parameters of its stage, from the tensor-parallel or the expert-parallel ranks
  (`stage_tensors`). To send weights to engines, each leader makes buckets of its own stage
  (`stage_buckets`). To write files, rank 0 gets the tensors of all stages (`sender_tensors`). With
  `everywhere`, every rank gets all tensors.
- These iterators are collective: every rank must exhaust them, even if it receives nothing.
- An output head that shares its weights with the embedding is a copy of it on the last stage, and
  is not exported.
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
    """One step in which a pipeline stage exports its parameters: one parameter of one layer.

    A parameter that every expert has is exported in several steps. Each of them covers the
    parameter of one expert on each expert-parallel rank.

    Attributes:
        rule: Rule of the parameter.
        layer: Number of its layer in the whole model.
        experts: Numbers, in the whole model, of the experts whose parameter this step covers, one
            for each expert-parallel rank; (0,) if the parameter does not belong to an expert.
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

    Collective: every rank of the stage must iterate to the end. Only the stage's leader (its first
    rank) gets tensors, which are whole; the others only send their shards.

    Args:
        chunks: The parts of the model that this rank has.
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
    """Generate the tensors of this rank's pipeline stage in buckets, which are lists of tensors of
    limited size.

    Collective: every rank must iterate to the end. Without `everywhere`, only the stage's leader
    (its first rank) gets buckets.

    Args:
        chunks: The parts of the model that this rank has.
        architecture: The architecture of the model.
        bucket_bytes: Largest size of a bucket in bytes; a larger tensor has its own bucket.
        convert: Function that changes the tensors before they are put into buckets, for instance
            quantizes them; None if they are not changed.
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
    """Generate the name and values of each tensor of the whole model on rank 0, stage after stage.

    Collective: every rank must iterate to the end, but only rank 0 gets tensors.

    Args:
        chunks: The parts of the model that this rank has.
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
    """Group consecutive tensors into lists (buckets) of at most `bucket_bytes` bytes. A larger
    tensor is the only one of its bucket."""
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
