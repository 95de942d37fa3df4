"""Megatron shards back to Hugging Face tensors, as a stream of buckets.

Invariants
- The model is walked once, in one order that every rank derives from the table of rules; nobody
  holds more than one bucket and one whole parameter beside its own shards.
- A stage's leader (tensor rank 0 of the first replica) gathers its own stage: tensor shards over
  the tensor group, experts over the expert group. `stage_tensors` is that walk. To engines each
  leader sends its own layers (`stage_buckets`); for a file that rank 0 writes, `export_buckets`
  forwards every stage to it; `everywhere` gives all of them to every rank.
- Collective: every rank must exhaust the iterator, whatever it yields there.
- The tied head of the last stage is a copy and is not exported.
- Yielded tensors may share memory with parameters; use them before the next optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_async.models.architecture import Architecture
from megatron_async.models.families import rules_of
from megatron_async.models.parameters import first_layer_of_stage, placed_parameters
from megatron_async.models.shards import Place, Rule, ShardLayout, merge

NamedTensor = tuple[str, Tensor]
SENDER = 0


@dataclass(frozen=True)
class WalkStep:
    """A parameter in a stage's walk; for experts, the same slot of every expert rank at once."""

    rule: Rule
    layer: int = 0
    slot: int = 0

    def tensors(self, architecture: Architecture) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the Hugging Face tensors that this step yields, in order."""
        if not self.rule.expert:
            names = self.rule.tensor_names(self.layer, 0)
            return list(zip(names, self.rule.shapes, strict=True))
        result: list[tuple[str, tuple[int, ...]]] = []
        per_rank = _experts_per_rank(architecture)
        for rank in range(parallel_state.get_expert_model_parallel_world_size()):
            names = self.rule.tensor_names(self.layer, rank * per_rank + self.slot)
            result.extend(zip(names, self.rule.shapes, strict=True))
        return result


def stage_walk(architecture: Architecture, stage: int) -> Iterator[WalkStep]:
    """Walk the parameters that `stage` exports, in order; the same on every rank."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    rules = [rule for rule in rules_of(architecture) if rule.exported]
    if stage == 0:
        yield from (WalkStep(rule) for rule in rules if rule.place is Place.FIRST)
    first = first_layer_of_stage(architecture, stage)
    for layer in range(first, first + architecture.num_layers // stages):
        for rule in rules:
            if rule.place is Place.LAYER:
                slots = _experts_per_rank(architecture) if rule.expert else 1
                yield from (WalkStep(rule, layer, slot) for slot in range(slots))
    if stage == stages - 1:
        yield from (WalkStep(rule) for rule in rules if rule.place is Place.LAST)


def stage_leader(stage: int) -> int:
    """Global rank of a stage's leader: the first of the stage in Megatron's rank order."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return stage * (dist.get_world_size() // stages)


@torch.no_grad()
def stage_tensors(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, everywhere: bool = False
) -> Iterator[list[NamedTensor]]:
    """The Hugging Face tensors of this rank's stage, one walk step at a time.

    Whole tensors on the stage's leader, empty lists on the ranks that give it their shards;
    ranks of other replicas yield nothing. `everywhere`: whole tensors on every rank.
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
    first_expert = expert_rank * _experts_per_rank(architecture)
    for step in stage_walk(architecture, stage):
        rule = step.rule
        group = expert_group if rule.expert else tensor_group
        if not everywhere and leader not in dist.get_process_group_ranks(group):
            continue
        shard = shard_of[rule, step.layer, first_expert + step.slot if rule.expert else 0]
        if rule.layout is ShardLayout.REPLICATED:
            shards = [shard] if everywhere or dist.get_rank() == leader else []
        else:
            shards = _gather(shard, None if everywhere else leader, group)
        if not shards:
            yield []
            continue
        pieces = (
            [merge(rule, [whole]) for whole in shards] if rule.expert else [merge(rule, shards)]
        )
        tensors = [tensor for piece in pieces for tensor in piece]
        names = [name for name, _ in step.tensors(architecture)]
        yield list(zip(names, tensors, strict=True))


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


def _experts_per_rank(architecture: Architecture) -> int:
    if architecture.experts is None:
        return 0
    return architecture.experts.num // parallel_state.get_expert_model_parallel_world_size()


def stage_buckets(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int,
    convert: Callable[[Iterator[NamedTensor]], Iterator[NamedTensor]] | None = None,
    *,
    everywhere: bool = False,
) -> Iterator[list[NamedTensor]]:
    """This stage's own layers in buckets on its leader; every other rank must iterate too, and

    gets nothing. `everywhere`: the whole model in the same buckets on every rank, stage after
    stage. `convert` changes tensors on the way (precision, quantisation).
    """
    tensors = (item for step in stage_tensors(chunks, architecture) for item in step)
    if everywhere:
        tensors = _everywhere(chunks, architecture)
    return buckets(tensors if convert is None else convert(tensors), bucket_bytes)


@torch.no_grad()
def _everywhere(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Generator[NamedTensor, None, None]:
    group = parallel_state.get_pipeline_model_parallel_group()
    parameter = next(chunks[0].parameters())
    for stage, source in enumerate(dist.get_process_group_ranks(group)):
        if source == dist.get_rank():
            tensors = (
                item
                for step in stage_tensors(chunks, architecture, everywhere=True)
                for item in step
            )
        else:
            tensors = (
                (name, torch.empty(shape, dtype=parameter.dtype, device=parameter.device))
                for step in stage_walk(architecture, stage)
                for name, shape in step.tensors(architecture)
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

    `dtype` casts on the way; None keeps the parameters' precision.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    parameter = next(chunks[0].parameters())
    dtype = dtype or parameter.dtype
    rank = dist.get_rank()
    for tensors in stage_tensors(chunks, architecture):
        for name, tensor in tensors:
            if rank == SENDER:
                yield name, tensor.to(dtype)
            else:
                dist.send(tensor.to(dtype).contiguous(), dst=SENDER)
    if rank != SENDER:
        return
    for stage in range(1, stages):
        for step in stage_walk(architecture, stage):
            for name, shape in step.tensors(architecture):
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


def export_buckets(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Iterator[list[NamedTensor]]:
    """The whole model in buckets on global rank 0; every other rank must iterate too, and gets

    nothing. Names and layouts are those of the Hugging Face checkpoint.
    """
    return buckets(sender_tensors(chunks, architecture, dtype), bucket_bytes)
