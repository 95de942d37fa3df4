"""Sets up torch.distributed and Megatron's parallel state from `ParallelConfig`, and closes them.

Invariants
- Every collective has the time limit `trainer.collective_timeout_seconds`. If one rank may be busy
  for longer while the others wait for it (`max_stall_seconds`), the limit is longer.
- Ranks are ordered as in Megatron (`tp-cp-ep-dp-pp`): tensor ranks are adjacent, pipeline stages
  farthest apart.
- Experts are not split over tensor ranks (expert tensor parallel size 1). Expert parallelism
  spreads whole experts over the tensor and data ranks of a stage.
- All ranks of one pipeline stage have the same seeds. Only in Megatron's RNG tracker, the state of
  tensor parallelism differs by tensor rank, and the state of expert parallelism by expert rank, as
  Megatron requires.
"""

import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_async.config.model import ParallelConfig, TrainerConfig
from megatron_async.engines.nodes import RENDEZVOUS_VARIABLE
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trainer.device import device_adapter, has_cuda, local_device

# Additional time for a busy rank whose own time limit (`max_stall_seconds`) has passed: it
# disconnects from the engine for which it has waited, and joins the other ranks in the collective.
_MARGIN_SECONDS = 60.0
_PORT_SECONDS = 60.0


@dataclass(frozen=True)
class RankLayout:
    """Position of this process in the parallel layout, and its device."""

    rank: int
    tensor_rank: int
    data_rank: int
    data_size: int
    is_last_stage: bool
    device: torch.device


def collective_limit(trainer: TrainerConfig, max_stall_seconds: float) -> timedelta:
    """Return the time limit of collectives, in which ranks may have to wait for one rank that is
    busy.

    The limit is longer than `max_stall_seconds`, after which the busy rank gives up. So it does
    this before the other ranks time out, and can report what it has waited for, which the other
    ranks do not know.
    """
    return timedelta(
        seconds=max(trainer.collective_timeout_seconds, max_stall_seconds + _MARGIN_SECONDS)
    )


def start_process_group(
    parallel: ParallelConfig, trainer: TrainerConfig, max_stall_seconds: float = 0.0
) -> torch.device:
    """Join the process group described by torchrun's environment variables; return this rank's
    device.

    If these variables are not set and `parallel.ranks` is 1, the process is the only member of its
    group.

    Raises:
        UserError: The number of processes is not `parallel.ranks`.
        ComponentFailure: The other ranks did not join within the time limit, or the port stayed in
            use.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != parallel.ranks:
        raise UserError(
            f"parallel.ranks is {parallel.ranks}, but {world_size} trainer process(es) were started"
        )
    device = local_device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    timeout = collective_limit(trainer, max_stall_seconds)
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    try:
        if folder := os.environ.get(RENDEZVOUS_VARIABLE):
            # Each attempt of torchrun has its own file, because the file of the previous one has
            # the addresses of dead ranks.
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            rank, store = int(os.environ["RANK"]), dist.FileStore(f"{folder}/{attempt}")
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        elif "MASTER_ADDR" in os.environ:
            _join_process_group(backend, timeout)
        else:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "timeout" not in str(error):
            raise
        raise ComponentFailure(
            f"the {world_size} trainer ranks did not all join within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error
    return device


def _join_process_group(backend: str, timeout: timedelta) -> None:
    """Join the process group at the address that torchrun chose, retrying while the port is in use.

    The port was free when torchrun chose it, which was before this process imported torch. Since
    then, the system may have given it to a connection of another process. Such connections are
    usually short, so this function tries again.
    """
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            dist.init_process_group(backend, timeout=timeout)
            return
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            if time.monotonic() >= deadline:
                where = "port {MASTER_PORT} of {MASTER_ADDR}".format_map(os.environ)
                raise ComponentFailure(
                    f"{where}, the rendezvous of the trainer ranks, was in use by another process "
                    f"for {_PORT_SECONDS:g} s. Start the run again; it will use another port."
                ) from error
        time.sleep(0.5)


def init_parallel(
    parallel: ParallelConfig, trainer: TrainerConfig, seed: int, max_stall_seconds: float = 0.0
) -> RankLayout:
    """Create the process group and Megatron's parallel groups, and seed all random generators;
    return this rank's position in the layout.

    Call this inside `device_adapter()`. Earlier model-parallel state of this process is replaced.
    """
    device = start_process_group(parallel, trainer, max_stall_seconds)
    limit = collective_limit(trainer, max_stall_seconds)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(limit.total_seconds() / 60)),
    )
    seed_everything(seed)
    return rank_layout(device)


def rank_layout(device: torch.device) -> RankLayout:
    """Read this rank's position from Megatron's parallel state."""
    return RankLayout(
        rank=dist.get_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        device=device,
    )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's RNG tracker. As in Megatron-LM, each pipeline stage
    gets a different seed."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def destroy_parallel() -> None:
    """Destroy Megatron's parallel state and the process group, if they exist."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def parallel_session(
    parallel: ParallelConfig, trainer: TrainerConfig, seed: int, max_stall_seconds: float = 0.0
) -> Iterator[RankLayout]:
    """Enter the device adapter and set up parallelism for the duration of the block; yield this
    rank's position in the layout.

    Args:
        parallel: Sizes of the parallel dimensions.
        trainer: Settings with the time limit of collectives.
        seed: Seed of all generators.
        max_stall_seconds: How long one rank may be busy while the others wait for it in a
            collective, for example while it sends weights to an engine.
    """
    with ExitStack() as stack:
        stack.enter_context(device_adapter())
        stack.callback(destroy_parallel)
        yield init_parallel(parallel, trainer, seed, max_stall_seconds)
