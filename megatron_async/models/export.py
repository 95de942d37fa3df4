"""Megatron shards back to Hugging Face tensors, as a stream of buckets.

Invariants
- The model is walked once, in one order that every rank derives from the table of rules; nobody
  holds more than one bucket and one whole parameter beside its own shards.
- A stage's leader (tensor rank 0 of the first replica) gathers its own stage: tensor shards over
  the tensor group, experts over the expert group. `stage_tensors` is that walk. To engines each
  leader sends its own layers (`stage_buckets`); for a file that rank 0 writes, `sender_tensors`
  forwards every stage to it; `everywhere` gives all of them to every rank.
- Collective: every rank must exhaust the iterator, whatever it yields there.
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
from megatron_async.models.parameters import placed_parameters
from megatron_async.models.shards import Rule, ShardLayout, merge

NamedTensor = tuple[str, Tensor]
SENDER = 0


@dataclass(frozen=True)
class WalkStep:
    """A parameter in a stage's walk; for experts, one of each expert rank at once."""

    rule: Rule
    layer: int
    experts: Sequence[int] = (0,)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the Hugging Face tensors that this step yields, in order."""
        for expert in self.experts:
            yield from zip(
                self.rule.tensor_names(self.layer, expert), self.rule.shapes, strict=True
            )


def stage_walk(architecture: Architecture, stage: int) -> Iterator[WalkStep]:
    """Walk the parameters that `stage` exports, in order; the same on every rank."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = range(architecture.experts.num if architecture.experts else 0)
    per_rank = len(experts) // parallel_state.get_expert_model_parallel_world_size()
    for rule, layer in stage_rules(architecture, stage, stages):
        if rule.expert:
            for parameter_id in range(per_rank):
                yield WalkStep(rule, layer, experts[parameter_id::per_rank])
        else:
            yield WalkStep(rule, layer)


def stage_leader(stage: int) -> int:
    """Global rank of a stage's leader: the first of the stage in Megatron's rank order."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return stage * (dist.get_world_size() // stages)


@torch.no_grad()
def stage_tensors(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, everywhere: bool = False
) -> Generator[NamedTensor, None, None]:
    """The Hugging Face tensors of this rank's stage, one walk step at a time.

    Whole tensors on the stage's leader, nothing on the ranks that give it their shards and on those
    of other replicas. `everywhere`: whole tensors on every rank.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    leader = stage_leader(stage)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_model_parallel_group()
    shard_of = {
        (placed.rule, placed.layer, placed.expert): placed.parameter.detach()
        for placed in placed_parameters(chunks, architecture)
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
    """All shards of the group, in rank order: on the leader, [] elsewhere; on all without one."""
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
    """Yield this stage's own layers in buckets on its leader.

    Every other rank must iterate too, and gets nothing. `everywhere`: the whole model in the same
    buckets on every rank, stage after stage. `convert` changes tensors on the way (precision,
    quantization).
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
    """The whole model tensor by tensor on global rank 0, stage after stage; nothing elsewhere.

    Every other rank must iterate too. `dtype` casts on the way; None keeps the parameters'
    precision.
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
    """Runs of tensors of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    bucket: list[NamedTensor] = []
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket
