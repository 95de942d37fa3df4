"""`is_loss`: ratio, correction, surrogate, gradient and metrics in one pass over the tokens.

Invariants
- Same structs in and out as `megatron_async.algorithms.interface`; any object with the same
  attributes is taken.
- One read of the streams where a token's loss depends on the token alone, two where it depends on
  its sequence (`needs_sequences`).
- The result repeats bit for bit: no atomics, fixed order of summation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async_kernels.backend import Backend, resolve_backend
from megatron_async_kernels.loss_reference import reference_is_loss
from megatron_async_kernels.loss_types import (
    MAX_NAMES,
    NUM_LAG_BINS,
    SUM_NAMES,
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    mirror,
    raise_non_finite,
    require_inputs,
)
from megatron_async_kernels.triton_loss_spec import (
    AT,
    CHUNK,
    LAG_OFFSET,
    LAG_STRIDE,
    MAX_WIDTH,
    NUM_SEQUENCE_VALUES,
    NUM_SLOT_COLUMNS,
    ROW_WIDTH,
    LossSpec,
    loss_spec,
)

if TYPE_CHECKING:
    from megatron_async_kernels.triton_head import PartialStats

BLOCK = 512
WARPS = 8
SEQUENCE_BLOCK = 128


def is_loss(
    inputs: LossInputs | Any,
    config: LossConfig | Any,
    denominators: Denominators | Any,
    *,
    backend: Backend = "auto",
    check: bool = True,
) -> LossOutput:
    """Loss, dLoss/dlogp and metric sums of one microbatch of whole sequences.

    Args
        inputs, config, denominators: as in `megatron_async.algorithms.interface`.
        backend: "auto" is triton on CUDA and plain torch elsewhere ("chunked" is the same there:
            nothing in this function is larger than its inputs).
        check: read the count of non-finite tokens back (one synchronisation) and raise.

    Raises
        NonFiniteInput: `check` and a stream is not finite at a trained token; names the stream.
        ValueError: `config` needs a stream that is missing, or shapes differ.
    """
    stream = mirror(LossInputs, inputs)
    settings, counts = mirror(LossConfig, config), mirror(Denominators, denominators)
    name = resolve_backend(backend, stream.logprobs_T.device, stream.logprobs_T.dtype)
    if name != "triton":
        return reference_is_loss(stream, settings, counts, check=check)
    require_inputs(stream, settings)
    spec = loss_spec(stream, settings)
    result = launch_loss(stream, spec, counts)
    if check and float(result.nonfinite) > 0:
        raise_non_finite(stream)
    return result.output


@dataclass(frozen=True, eq=False)
class FinishedHead:
    """Where the fused kernel writes what it finishes, each [R]; entropy None if not wanted."""

    partial: PartialStats
    rows_R: Tensor
    logprobs_R: Tensor
    log_sum_exp_R: Tensor
    entropy_R: Tensor | None


@dataclass(frozen=True, eq=False)
class LossResult:
    """The output, and how many trained tokens had a stream that is not finite ([], on device)."""

    output: LossOutput
    nonfinite: Tensor


def launch_loss(
    inputs: LossInputs,
    spec: LossSpec,
    denominators: Denominators,
    head: FinishedHead | None = None,
) -> LossResult:
    """Run the kernels. With `head`, streams are [T] but sequences, gradients and log-probs [R].

    `inputs.cu_seqlens_S1` counts the tokens of the gradients' space (T, or R with `head`).
    """
    num_tokens = int((inputs.mask_T if head is None else head.logprobs_R).shape[0])
    num_sequences = int(inputs.cu_seqlens_S1.shape[0]) - 1
    device = inputs.mask_T.device
    blocks = -(-num_tokens // CHUNK)
    sequence_blocks = -(-num_sequences // SEQUENCE_BLOCK)
    sums_PX = torch.zeros((blocks + sequence_blocks, ROW_WIDTH), dtype=torch.float64, device=device)
    maxima_PX = torch.full(
        (blocks + sequence_blocks, MAX_WIDTH), -math.inf, dtype=torch.float64, device=device
    )
    dlogp = torch.empty(num_tokens, dtype=torch.float32, device=device)
    dentropy = torch.empty_like(dlogp) if spec.config.entropy_coef != 0.0 else None
    if num_tokens > 0:
        _run_passes(inputs, spec, denominators, head, dlogp, dentropy, sums_PX, maxima_PX)
    sums_X = sums_PX.sum(dim=0)
    maxima_X = maxima_PX.amax(dim=0) if len(maxima_PX) else sums_X.new_full((8,), -math.inf)
    lag_sums_LB = sums_X[LAG_OFFSET:].view(4, LAG_STRIDE)[:, :NUM_LAG_BINS]
    if not spec.has_lag:
        names = (AT.tokens, AT.is_weight, AT.is_weight_sq, AT.log_ratio)
        lag_sums_LB[:, 0] = torch.stack([sums_X[at] for at in names])
        maxima_X[4] = torch.where(sums_X[AT.tokens] > 0, 0.0, -math.inf)
    metrics = LossMetrics(sums_X[: len(SUM_NAMES)], lag_sums_LB, maxima_X[: len(MAX_NAMES)])
    output = LossOutput(sums_X[AT.loss].to(torch.float32), dlogp, dentropy, metrics)
    return LossResult(output, sums_X[AT.nonfinite])


def _run_passes(
    inputs: LossInputs,
    spec: LossSpec,
    denominators: Denominators,
    head: FinishedHead | None,
    dlogp: Tensor,
    dentropy: Tensor | None,
    sums_PX: Tensor,
    maxima_PX: Tensor,
) -> None:
    from megatron_async_kernels.triton_head import on_device
    from megatron_async_kernels.triton_loss_sequences import sequence_kernel, sequence_pass_kernel
    from megatron_async_kernels.triton_loss_tokens import token_pass_kernel

    device, num_tokens = dlogp.device, int(dlogp.shape[0])
    num_sequences = int(inputs.cu_seqlens_S1.shape[0]) - 1
    blocks = -(-num_tokens // CHUNK)
    slots = torch.empty(
        (blocks + num_sequences, NUM_SLOT_COLUMNS), dtype=torch.float64, device=device
    )
    values = torch.empty(
        (num_sequences if spec.two_pass else 1, NUM_SEQUENCE_VALUES),
        dtype=torch.float32,
        device=device,
    )
    # A stream that this specialisation does not read is passed as some array that exists.
    unused = dlogp
    logprobs = inputs.logprobs_T if head is None else head.logprobs_R
    entropy = inputs.entropy_T if head is None else head.entropy_R
    finished = {
        "log_sum_exp": unused if head is None else head.log_sum_exp_R,
        "entropy": unused if entropy is None else entropy,
        "max_in": unused if head is None else head.partial.max_PR,
        "sum_in": unused if head is None else head.partial.sum_PR,
        "weighted_in": unused if head is None else head.partial.weighted_PR,
        "target_in": unused if head is None else head.partial.target_R,
        "stats_stride": num_tokens,
        "num_splits": 1 if head is None else head.partial.splits,
    }
    shared = {
        "logprobs": logprobs,
        "rollout": inputs.rollout_logprobs_T,
        "old": unused if inputs.old_logprobs_T is None else inputs.old_logprobs_T,
        "mask": inputs.mask_T,
        "rows": inputs.cu_seqlens_S1 if head is None else head.rows_R,
        "cu_seqlens": inputs.cu_seqlens_S1,
        "slots": slots,
        "num_tokens": num_tokens,
        "num_sequences": num_sequences,
        **finished,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
        "SLOT_WIDTH": NUM_SLOT_COLUMNS,
        "num_warps": WARPS,
    }
    widths = {
        "VALUE_WIDTH": NUM_SEQUENCE_VALUES,
        "ROW_WIDTH": ROW_WIDTH,
        "MAX_WIDTH": MAX_WIDTH,
    }

    def sequences() -> None:
        sequence_kernel[(-(-num_sequences // SEQUENCE_BLOCK),)](
            inputs.cu_seqlens_S1,
            slots,
            values,
            sums_PX,
            maxima_PX,
            blocks,
            num_sequences,
            math.log(spec.config.staleness_clip),
            CHUNK=CHUNK,
            BLOCK=SEQUENCE_BLOCK,
            SLOT_WIDTH=NUM_SLOT_COLUMNS,
            **widths,
            SPEC=spec,
            num_warps=4,
        )

    def tokens(token_spec: LossSpec) -> None:
        token_pass_kernel[(blocks,)](
            **shared,
            **widths,
            reference=unused if inputs.ref_logprobs_T is None else inputs.ref_logprobs_T,
            advantages=inputs.advantages_T,
            correction=unused if inputs.is_weights_T is None else inputs.is_weights_T,
            lag=inputs.cu_seqlens_S1 if inputs.lag_T is None else inputs.lag_T,
            values=values,
            dlogp=dlogp,
            dentropy=unused if dentropy is None else dentropy,
            sums=sums_PX,
            maxima=maxima_PX,
            scale=_scale(spec.config, denominators),
            inv_weight_mean=1.0 / denominators.weight_mean,
            LAG_OFFSET=LAG_OFFSET,
            LAG_STRIDE=LAG_STRIDE,
            NUM_LAGS=NUM_LAG_BINS,
            SPEC=token_spec,
        )

    with on_device(dlogp):
        if spec.two_pass:
            sequence_pass_kernel[(blocks,)](**shared, SPEC=spec)
            sequences()
            # The first pass has finished the log-probs.
            tokens(replace(spec, combine=False))
        else:
            tokens(spec)
            sequences()


def _scale(config: LossConfig, denominators: Denominators) -> float:
    """What one kept token's loss counts, before a division by its sequence's length."""
    if config.aggregation == "token_mean":
        return 1.0 / max(denominators.tokens, 1.0)
    sequences = max(denominators.sequences, 1.0)
    if config.aggregation == "seq_mean_token_sum_norm":
        return 1.0 / (sequences * config.fixed_normalizer)
    return 1.0 / sequences
