"""Provides small models, settings and ragged batches for the tests of the trainer and of
checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.models.export import sender_tensors
from megatron_async.models.tiny_model import TinyModel, random_model
from megatron_async.trainer.device import device_adapter
from megatron_async.trainer.parallel import destroy_parallel, init_parallel
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.batch import TokenBatch

SMALL = TinyModel(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=96)

# With an epsilon far above any gradient, Adam's first update is lr * gradient / eps. Therefore a
# step shows the gradient that reached the optimizer, after reduction, sharding and gathering.
LINEAR_ADAM = {"lr": 1e6, "eps": 1e4, "clip_grad": 0.0, "betas": [0.9, 0.99]}
GRADIENT_SCALE = LINEAR_ADAM["lr"] / LINEAR_ADAM["eps"]  # type: ignore[operator]


def write_model(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen3 model of 0.1 million parameters with tied embeddings, in Hugging Face format,
    and return its directory."""
    random_model(SMALL, seed).save_pretrained(str(directory))
    return directory


def settings(model_dir: Path, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the config of a run on `model_dir` that splits `ragged_batch` into two or more
    microbatches."""
    base = {
        "model": {"path": str(model_dir)},
        "trainer": {"microbatch_tokens": 128, "collective_timeout_seconds": 60},
        "sampling": {"max_new_tokens": 64},
        "schedule": {"group_size": 4, "groups_per_batch": 6},
    }
    return build_config(merge(base, changes or {}))


def ragged_batch(step: int = 0, groups: int = 6, group_size: int = 4) -> TokenBatch:
    """Return a batch of sequences of 2 to 70 tokens, in which some sequences have masked tokens in
    the middle and one sequence has no trained token."""
    rng = np.random.default_rng(100 + step)
    count = groups * group_size
    lengths_S = np.minimum(2 + rng.geometric(0.06, count), 70)
    lengths_S[0], lengths_S[1] = 2, 70
    cu_S1 = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
    total = int(cu_S1[-1])
    prompt_S = np.minimum(rng.integers(1, 6, count), lengths_S - 1)
    position_T = np.arange(total) - np.repeat(cu_S1[:-1], lengths_S)
    mask_T = (position_T >= np.repeat(prompt_S, lengths_S)) & (rng.random(total) > 0.1)
    mask_T &= np.repeat(np.arange(count) != 3, lengths_S)
    lag_T = np.repeat(rng.integers(0, 3, count), lengths_S).astype(np.int32) * mask_T
    return TokenBatch(
        step=step,
        token_ids_T=rng.integers(0, 90, total).astype(np.int32),
        loss_mask_T=mask_T.astype(np.float32),
        rollout_logprobs_T=np.where(mask_T, rng.normal(-5.0, 0.3, total), 0).astype(np.float32),
        version_T=np.where(mask_T, step - lag_T, -1).astype(np.int32),
        lag_T=lag_T.astype(np.int32),
        cu_seqlens_S1=cu_S1,
        rewards_S=rng.integers(0, 2, count).astype(np.float32),
        group_ids_S=np.repeat(np.arange(groups), group_size).astype(np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=prompt_S.astype(np.int32),
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=rng.random(count) < 0.3,
    )


@contextmanager
def trainer_session(
    config: RunConfig, *, lineage: int = 0, purpose: Any = "rl"
) -> Iterator[PolicyTrainer]:
    """Provide a trainer of this rank in its own parallel state; the process group is kept for the
    next session."""
    with device_adapter():
        init_parallel(config.parallel, config.trainer, config.seed)
        yield PolicyTrainer(config, lineage=lineage, purpose=purpose)


@contextmanager
def single_process() -> Iterator[None]:
    """End the process group that a trainer in the test process has started, after the block."""
    try:
        yield
    finally:
        destroy_parallel()


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Return copies of the Hugging Face tensors of the complete model on rank 0, and an empty
    mapping on other ranks."""
    return {
        name: tensor.clone()
        for name, tensor in sender_tensors(trainer.model, trainer.model[0].architecture)
    }


def relative_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return ||ours - theirs|| / ||theirs|| for each tensor."""
    assert ours.keys() == theirs.keys()
    return {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs
    }
