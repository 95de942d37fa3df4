"""Checks of the trainer on one rank with local layers: parity, updates and memory.

Parity compares bfloat16 with float32, for the same trainer and the same weights:

| | mean difference of log-probs | cosine of gradients |
|---|---|---|
| rounding errors, on the CPU | below 0.01 | above 0.999 |
| bound of the check | 0.03 | 0.99 |
| wrong mask, head group, window or rope | above 0.1 | below 0.9 |
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.check import CheckFailed, Figures, Stage
from benchmarks.gpu_check.models import (
    GQA,
    QWEN2_1B,
    WINDOW,
    ragged_batch,
    toy,
    trainer_on,
    write_model,
)

if TYPE_CHECKING:
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.trajectory.batch import TokenBatch

MEAN_LOGPROB_BOUND = 0.03
COSINE_BOUND = 0.99
# Recomputation repeats the same operations. Only the order of additions in reductions may differ.
RECOMPUTE_COSINE_BOUND = 0.9999
_RAGGED = (1500, 2, 37, 700, 700, 3, 129, 64, 2048, 5, 1024, 333)
_UPDATES = 20


def _lengths(stage: Stage) -> Sequence[int]:
    return [max(2, n // 16) for n in _RAGGED] if stage.trial_run else _RAGGED


def _config(stage: Stage, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return toy(config) if stage.trial_run else config


def gradients_of(trainer: PolicyTrainer, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the main gradients of the mean cross-entropy of `batch`, in float32 in host memory."""
    from megatron_async.algorithms.algorithm import build_sft_algorithm
    from megatron_async.algorithms.device_batch import DeviceBatch
    from megatron_async.trainer.forward import PolicyRunner
    from megatron_async.trainer.optimizer import zero_gradients

    runner = PolicyRunner(
        trainer.wrapped,
        trainer.layout,
        token_budget=4096,
        hidden_size=trainer.model[0].architecture.hidden_size,
    )
    zero_gradients(trainer.wrapped, trainer.optimizer)
    sft = build_sft_algorithm()
    prepared, _ = sft.prepare(DeviceBatch.of(batch, trainer.layout.device))
    _, denominators = sft.prepare_minibatch(prepared)
    found = runner.gradients(prepared, sft, denominators, entropy=False)
    if found.reason is not None:
        raise CheckFailed(f"the loss is not finite: {found.reason}")
    return {
        name: parameter.main_grad.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in trainer.wrapped.module.named_parameters()
    }


def lowest_cosine(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the lowest cosine between gradients of one parameter, and the parameter's name.

    The cosine is 0 if a gradient is zero.
    """
    found = []
    for name, expected in theirs.items():
        a, b = ours[name].double().flatten(), expected.double().flatten()
        scale = float(a.norm() * b.norm())
        found.append((float(a @ b) / scale if scale > 0 else 0.0, name))
    return min(found)


def _require_close(
    what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bound: float
) -> float:
    """Return the lowest cosine of gradients; raise CheckFailed if it is below `bound`."""
    cosine, name = lowest_cosine(ours, theirs)
    if not cosine >= bound:
        raise CheckFailed(
            f"{what}: the cosine of the gradients of {name} is {cosine:.5f}, below {bound}"
        )
    return cosine


def _parity(stage: Stage, config: Mapping[str, Any]) -> Figures:
    """Compare log-probs and gradients of a model in bfloat16 and float32; return differences."""
    config = _config(stage, config)
    model = write_model(stage.scratch / "model", config, stage.device, std=0.05)
    batch = ragged_batch(_lengths(stage), config["vocab_size"])
    trained_T = batch.loss_mask_T != 0
    with trainer_on(model, model={"dtype": "float32"}) as trainer:
        wide_T = trainer.compute_logprobs(batch)
        wide = gradients_of(trainer, batch)
    with trainer_on(model, model={"dtype": "bfloat16"}) as trainer:
        narrow_T = trainer.compute_logprobs(batch)
        narrow = gradients_of(trainer, batch)
        again = gradients_of(trainer, batch)
        dummy = _dummy_gradient(trainer)
    with trainer_on(model, model={"dtype": "bfloat16"}, trainer={"recompute": "all"}) as trainer:
        recomputed = gradients_of(trainer, batch)
    difference_T = np.abs(narrow_T - wide_T)[trained_T]
    if not float(difference_T.mean()) <= MEAN_LOGPROB_BOUND:
        raise CheckFailed(
            f"log-probs in bfloat16 and float32 differ by {difference_T.mean():.4f} on average; "
            f"the limit is {MEAN_LOGPROB_BOUND}"
        )
    if dummy != 0.0:
        raise CheckFailed(f"an empty microbatch left a gradient of {dummy}")
    return {
        "mean_logprob_difference": float(difference_T.mean()),
        "largest_logprob_difference": float(difference_T.max()),
        "gradient_cosine": _require_close("bfloat16 to float32", narrow, wide, COSINE_BOUND),
        "repeat_cosine": lowest_cosine(again, narrow)[0],
        "recompute_cosine": _require_close(
            "recompute on to off", recomputed, narrow, RECOMPUTE_COSINE_BOUND
        ),
    }


def _dummy_gradient(trainer: PolicyTrainer) -> float:
    """Return the largest gradient after a microbatch without sequences; NaN if one is NaN."""
    from megatron_async.algorithms.device_batch import DeviceBatch
    from megatron_async.trainer.forward import build_microbatch
    from megatron_async.trainer.optimizer import zero_gradients

    batch = DeviceBatch.of(ragged_batch([2] * 4, 64), trainer.layout.device)
    micro = build_microbatch(batch, torch.arange(0, device=trainer.layout.device))
    zero_gradients(trainer.wrapped, trainer.optimizer)
    output = trainer.wrapped(micro.packed, temperature=1.0, return_entropy=False)
    (output.logprobs_R.sum() * 0.0).backward()
    largest = [
        float(parameter.main_grad.abs().max()) for parameter in trainer.wrapped.module.parameters()
    ]
    zero_gradients(trainer.wrapped, trainer.optimizer)
    return max(largest) if not any(math.isnan(value) for value in largest) else math.nan


def grouped_heads(stage: Stage) -> Figures:
    """Check parity on sequences of different lengths, with grouped heads.

    The check also compares recomputation with stored activations, and runs an empty microbatch.
    """
    return _parity(stage, GQA)


def window(stage: Stage) -> Figures:
    """Check parity as `grouped_heads` does, with sliding-window layers (Gemma 3)."""
    return _parity(stage, WINDOW)


def updates(stage: Stage) -> Figures:
    """Train a random model of 1.5B; measure throughput, MFU, and memory next to its estimate."""
    from megatron_async.config.model import ParallelConfig
    from megatron_async.models.architecture import read_config_json
    from megatron_async.models.shape import shape_from_config
    from megatron_async.simulate.memory import activation_bytes, trainer_state_bytes

    config = _config(stage, QWEN2_1B)
    model = write_model(stage.scratch / "model", config, stage.device, std=0.02)
    shape = shape_from_config(read_config_json(model), model / "config.json")
    rng = np.random.default_rng(3)
    count, mean, longest, budget = (8, 20, 64, 128) if stage.trial_run else (64, 1200, 4096, 8192)
    lengths = [int(n) for n in np.clip(rng.geometric(1 / mean, count), 4, longest)]
    batch = ragged_batch(lengths, config["vocab_size"])
    changes: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "trainer": {"microbatch_tokens": budget},
        "optimizer": {"lr": 1e-4},
        "steps": _UPDATES,
    }
    with trainer_on(model, **changes) as trainer:
        batch = replace(batch, rollout_logprobs_T=trainer.compute_logprobs(batch))
        before = _mean_gain(trainer, batch)
        # The first update is not timed, because it compiles.
        first = trainer.train_batch(batch)
        began = time.monotonic()
        reports = [trainer.train_batch(batch) for _ in range(_UPDATES - 1)]
        if stage.device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / len(reports)
        after = _mean_gain(trainer, batch)
        layout = ParallelConfig()
        planned = trainer_state_bytes(shape, layout, sharded=True) + activation_bytes(
            shape, layout, microbatch_tokens=budget, logit_tokens=1024, recompute="none"
        )
    skipped = sum(report.skipped_updates for report in (first, *reports))
    if skipped or not after > before:
        raise CheckFailed(
            f"{skipped} updates were skipped; the log-prob of rewarded sequences relative to the "
            f"others changed from {before:.4f} to {after:.4f} on the trained batch"
        )
    figures: dict[str, Any] = {
        "tokens": batch.num_tokens,
        "seconds_per_update": seconds,
        "tokens_per_second": batch.num_tokens / seconds,
        "planned_gib": planned / 2**30,
    }
    if stage.device == "cuda":
        figures["measured_gib"] = torch.cuda.max_memory_allocated() / 2**30
        figures |= _utilization(batch, shape, seconds)
    return figures


def _mean_gain(trainer: PolicyTrainer, batch: TokenBatch) -> float:
    """Return the mean log-prob of tokens in rewarded sequences minus that in other sequences."""
    logprobs_T = trainer.compute_logprobs(batch)
    trained_T = batch.loss_mask_T != 0
    good_T = np.repeat(batch.rewards_S, batch.lengths_S()) > 0
    return float(logprobs_T[trained_T & good_T].mean() - logprobs_T[trained_T & ~good_T].mean())


def _utilization(batch: TokenBatch, shape: Any, seconds: float) -> dict[str, float]:
    """Return the model FLOP rate of an update, and its share of the measured rate of the device.

    Recomputation does not count as model FLOPs.
    """
    from benchmarks.kernels_gpu import measure_rates

    borders = batch.cu_seqlens_S1.tolist()
    pairs = sum((stop - start) ** 2 / 2 for start, stop in itertools.pairwise(borders))
    flops = 6 * shape.active_parameters * batch.num_tokens
    flops += 3 * shape.attention_flops_per_token_pair * pairs
    rate = measure_rates().matrix_flops
    return {"model_tflops": flops / seconds / 1e12, "share_of_matrix_rate": flops / seconds / rate}
