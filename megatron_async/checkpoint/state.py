"""What of the trainer is saved, as Megatron's sharded state dict, and how it is put back.

Invariants
- Weights and optimizer state are described per parameter in the model's own shape ("fully
  reshardable"), so a checkpoint loads at any tensor, pipeline and data-parallel layout.
- Random states belong to a rank; they are restored only at the layout that saved them.
- Nothing here touches the disk but `load_state`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_async.checkpoint.manifest import Layout
from megatron_async.trajectory.types import PolicyVersion

_EXTRA_STATE = "_extra_state"

ShardedState = dict[str, Any]
_NumpyState = tuple[str, npt.NDArray[np.uint32], int, int, float]

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class Checkpointable(Protocol):
    """What a trainer offers to be saved.

    `progress` is a small JSON object with at least `distributed_optimizer` (bool).
    """

    wrapped: DistributedDataParallel
    optimizer: ChainedOptimizer

    @property
    def version(self) -> PolicyVersion: ...

    def progress(self) -> Mapping[str, Any]: ...

    def restore_progress(self, progress: Mapping[str, Any]) -> None: ...


def current_layout() -> Layout:
    """The layout of Megatron's parallel state."""
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )


def sharded_weights(model: Any) -> ShardedState:
    """The description of a model chunk's parameters; tensors are the live ones.

    Without the `_extra_state` of Transformer Engine's layers: it belongs to fp8 training, which
    there is none of, and it is a pickle that loading would run.
    """
    described: ShardedState = model.sharded_state_dict(metadata=dict(_METADATA))
    return {name: part for name, part in described.items() if _EXTRA_STATE not in name}


def load_weights(model: Any, loaded: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Into `model`, what `sharded_weights` described; returns the names missing and unexpected."""
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    return [name for name in missing if _EXTRA_STATE not in name], list(unexpected)


def sharded_state(trainer: Checkpointable, *, loading: bool, with_random: bool) -> ShardedState:
    """Collective. The description of this rank's share; tensors are the live ones."""
    model_state = sharded_weights(trainer.wrapped.module)
    state: ShardedState = {
        "model": model_state,
        "optimizer": trainer.optimizer.sharded_state_dict(
            model_state, is_loading=loading, metadata=dict(_METADATA)
        ),
    }
    if with_random:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["random"] = ShardedObject("random", random_state(), (size,), (rank,))
    return state


def load_state(trainer: Checkpointable, path: Path, *, with_random: bool) -> None:
    """Collective. Put the weights, the optimizer state and, if asked, the random states back."""
    state = sharded_state(trainer, loading=True, with_random=with_random)
    loaded = dist_checkpointing.load(state, str(path))
    missing, unexpected = load_weights(trainer.wrapped.module, loaded["model"])
    if missing or unexpected:
        raise RuntimeError(f"weights missing {missing[:3]}, unexpected {unexpected[:3]}")
    parts = trainer.optimizer.chained_optimizers
    states = loaded["optimizer"]
    for number, part in enumerate(parts):
        _load_optimizer(part, states if len(parts) == 1 else states[number])
    if with_random:
        restore_random_state(loaded["random"])


def _load_optimizer(part: Any, state: dict[str, Any]) -> None:
    """One Megatron optimizer's state.

    What Megatron 0.16.1 gets wrong when the optimizer inside is torch's AdamW is put right here.
    The others leave a step count of 0 out. The distributed one expects a `step` per parameter that
    its own format leaves out, and gives all parameters one shared step tensor (which AdamW would
    then count up once for each).
    """
    if part.is_stub_optimizer or not isinstance(part.optimizer, torch.optim.AdamW):
        part.load_state_dict(state)
        return
    if not isinstance(part, DistributedOptimizer):
        inner = state.get("optimizer", state)
        inner["state"].setdefault("common_step", torch.tensor(0.0))
        part.load_state_dict(state)
        return
    moments = state.pop("param_state")
    part.load_state_dict(state)
    counts = {key: values.pop("step") for key, values in part.optimizer.state.items()}
    part.load_parameter_state_from_fully_reshardable(moments)
    for key, values in part.optimizer.state.items():
        values["step"] = counts[key].clone()


def random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and Megatron's random states, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = cast(_NumpyState, np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Inverse of `random_state`, on a machine of the same kind."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
