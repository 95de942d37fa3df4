"""One trainer rank of any layout in its own process: no other ranks, no memory, only shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async.config import RunConfig
from megatron_async.config.model import ParallelConfig
from megatron_async.trainer.device import device_adapter
from megatron_async.trainer.parallel import destroy_parallel
from megatron_async.trainer.policy_model import build_policy


@dataclass(frozen=True)
class StageCounts:
    """Parameters of one rank: held whole by all tensor ranks, split over them, and in experts."""

    replicated: int
    split: int
    experts: int


class _OnMeta(TorchFunctionMode):
    """Tensors that are asked for on a named device are made on meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = "meta"
        return func(*args, **named)


@contextmanager
def alone_as(rank: int, parallel: ParallelConfig) -> Iterator[None]:
    """Megatron's parallel state of `rank`, over groups whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        destroy_parallel()


def counts_of_all_stages(config: RunConfig, model_path: Path) -> list[StageCounts]:
    """In a process that has no process group yet (`run_ranks`)."""
    return [stage_counts(config, model_path, s) for s in range(config.parallel.pipeline)]


def stage_counts(config: RunConfig, model_path: Path, stage: int) -> StageCounts:
    """Of the first rank of a pipeline stage, for the model of `model_path` (a config.json)."""
    parallel = config.parallel
    model_config = config.model.model_copy(update={"path": str(model_path)})
    counts = {"replicated": 0, "split": 0, "experts": 0}
    first_rank = stage * parallel.ranks // parallel.pipeline
    with device_adapter(), alone_as(first_rank, parallel), torch.device("meta"), _OnMeta():
        [chunk] = build_policy(model_config, parallel, trainer=config.trainer, seed=0)
    for parameter in chunk.parameters():
        assert parameter.is_meta
        if not getattr(parameter, "allreduce", True):
            counts["experts"] += parameter.numel()
        elif getattr(parameter, "tensor_model_parallel", False):
            counts["split"] += parameter.numel()
        else:
            counts["replicated"] += parameter.numel()
    return StageCounts(**counts)
