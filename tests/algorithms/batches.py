"""Provides small batches with prompts, ragged groups, a sequence without trained tokens and several
lags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.trajectory.batch import TokenBatch


def device_batch(seed: int = 0, groups: int = 3, group_size: int = 3) -> DeviceBatch:
    """Return a float64 batch of `groups` x `group_size` sequences; the second sequence has no
    trained token."""
    generator = np.random.default_rng(seed)
    count = groups * group_size
    prompt_S = generator.integers(1, 4, count)
    response_S = generator.integers(1, 7, count)
    lengths_S = prompt_S + response_S
    cu_S1 = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
    offset_T = np.arange(cu_S1[-1]) - np.repeat(cu_S1[:-1], lengths_S)
    mask_T = (offset_T >= np.repeat(prompt_S, lengths_S)).astype(np.float64)
    mask_T[cu_S1[1] : cu_S1[2]] = 0.0
    rollout_T = -3.0 * generator.random(len(mask_T)) * mask_T
    lag_T = (generator.integers(0, 4, len(mask_T)) * mask_T).astype(np.int32)
    arrays: dict[str, Any] = {
        "step": 7,
        "token_ids_T": generator.integers(0, 50, len(mask_T)).astype(np.int32),
        "loss_mask_T": mask_T,
        "rollout_logprobs_T": rollout_T,
        "version_T": (7 - lag_T).astype(np.int32),
        "lag_T": lag_T,
        "cu_seqlens_S1": cu_S1,
        "rewards_S": generator.integers(0, 3, count) / 2.0,
        "group_ids_S": np.repeat(np.arange(groups) * 10 + 100, group_size).astype(np.int64),
        "trajectory_ids_S": np.arange(count, dtype=np.int64),
        "prompt_lengths_S": prompt_S.astype(np.int32),
        "truncated_S": np.zeros(count, dtype=np.bool_),
        "resumed_S": generator.random(count) < 0.4,
    }
    return replace(
        DeviceBatch.of(TokenBatch(**arrays)),
        old_logprobs_T=torch.tensor(near(rollout_T, mask_T, generator)),
        ref_logprobs_T=torch.tensor(near(rollout_T, mask_T, generator)),
    )


def near(logprobs_T: np.ndarray, mask_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return log-probs of another policy, which for some tokens are far from `logprobs_T`."""
    scale_T = generator.choice([0.05, 0.5, 2.0], len(mask_T))
    return (logprobs_T + scale_T * generator.standard_normal(len(mask_T))) * mask_T


def current_logprobs(batch: DeviceBatch, seed: int = 5) -> torch.Tensor:
    """Return log-probs under the policy that is trained."""
    rollout_T, mask_T = batch.rollout_logprobs_T.numpy(), batch.loss_mask_T.numpy()
    return torch.tensor(near(rollout_T, mask_T, np.random.default_rng(seed)))


def oracle_rows(batch: DeviceBatch, logprobs_T: torch.Tensor) -> list[list[dict[str, float]]]:
    """Return a prepared batch as rows for the oracle."""
    rows = []
    ones_T = torch.ones_like(batch.loss_mask_T)
    weights_T = ones_T if batch.is_weights_T is None else batch.is_weights_T
    for low, high in zip(batch.cu_seqlens_S1[:-1], batch.cu_seqlens_S1[1:], strict=True):
        rows.append(
            [
                {
                    "p": float(logprobs_T[t]),
                    "rollout": float(batch.rollout_logprobs_T[t]),
                    "old": float(batch.old_logprobs_T[t]),  # type: ignore[index]
                    "ref": float(batch.ref_logprobs_T[t]),  # type: ignore[index]
                    "entropy": 0.0,
                    "advantage": float(batch.advantages_T[t]),  # type: ignore[index]
                    "v": float(weights_T[t]),
                    "lag": float(batch.lag_T[t]),
                }
                for t in range(low, high)
                if batch.loss_mask_T[t]
            ]
        )
    return rows
