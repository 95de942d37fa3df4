"""Provides `is_loss`, which computes a loss, its gradient and its metrics in one pass over the
tokens.

Invariants
- The Triton and the torch version have the same arguments and results and raise the same errors.
  Their results differ only by rounding, and in how `LossOutput.nonfinite` counts. The Triton
  version does not read `old_logprobs_T` if the ratio is not relative to it.
- The Triton version reads the inputs once if a token's loss depends only on the token, and twice if
  it depends on the token's whole sequence (`needs_sequences`).
- The result repeats bit for bit: no atomics, fixed order of summation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron_async_kernels.backend import Backend, resolve_backend
from megatron_async_kernels.loss_torch import loss_divisor, policy_loss
from megatron_async_kernels.loss_types import (
    MAX_NAMES,
    NUM_LAG_BINS,
    SUM_NAMES,
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    check_finite,
)
from megatron_async_kernels.triton_loss_spec import (
    AT,
    CHUNK,
    LAG_OFFSET,
    LAG_STRIDE,
    MAX_RULES,
    MAX_WIDTH,
    NUM_SEQUENCE_VALUES,
    NUM_SLOT_COLUMNS,
    ROW_WIDTH,
    LossSpec,
    loss_spec,
)

BLOCK = 512
WARPS = 8
SEQUENCE_BLOCK = 128


def is_loss(
    inputs: LossInputs,
    config: LossConfig,
    denominators: Denominators,
    *,
    backend: Backend = "auto",
    check: bool = True,
) -> LossOutput:
    """Compute the loss of one microbatch of whole sequences, its gradient with respect to the
    log-probs, and metric sums.

    Args:
        inputs: the microbatch.
        config: thresholds and choices of the loss.
        denominators: counts over all ranks and microbatches of the optimizer step, by which losses
            are divided.
        backend: "triton" or "chunked", which is plain torch here. "auto" is triton on CUDA and
            plain torch elsewhere. It is also plain torch if triton is not installed, there are more
            than MAX_RULES rejection rules, or the inputs are float64.
        check: whether to raise if inputs are not finite, for which the host waits for the device.
            Without it, the caller can read `LossOutput.finite` later.

    Raises:
        NonFiniteError: `check` is set and an input is not finite at a trained token; the message
            names the input.
        ValueError: An input that `config` needs is missing, shapes differ, the surrogate is `own`,
            or `backend` is "triton" and there are more than MAX_RULES rejection rules.
    """
    name = resolve_backend(backend, inputs.logprobs_T.device, inputs.logprobs_T.dtype)
    if name != "triton" or (backend == "auto" and len(config.rejection) > MAX_RULES):
        return policy_loss(inputs, config, denominators, check=check)
    if config.surrogate == "own":
        raise ValueError("backend 'triton' does not support surrogate 'own'. Call policy_loss")
    inputs.require(config)
    stream = _contiguous(inputs)
    output = _launch(stream, loss_spec(stream, config), denominators)
    if check and float(output.nonfinite) > 0:
        check_finite(stream.streams(), stream.mask_T)
    return output


def _contiguous(inputs: LossInputs) -> LossInputs:
    """Return `inputs` with every tensor at stride 1, as the kernels index it; contiguous tensors
    are not copied."""
    tensors = {n: t.contiguous() for n, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
    return replace(inputs, **tensors)


def _launch(inputs: LossInputs, spec: LossSpec, denominators: Denominators) -> LossOutput:
    num_tokens = int(inputs.mask_T.shape[0])
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
        _run_passes(inputs, spec, denominators, dlogp, dentropy, sums_PX, maxima_PX)
    sums_X = sums_PX.sum(dim=0)
    maxima_X = maxima_PX.amax(dim=0) if len(maxima_PX) else sums_X.new_full((8,), -math.inf)
    lag_sums_LB = sums_X[LAG_OFFSET:].view(4, LAG_STRIDE)[:, :NUM_LAG_BINS]
    if not spec.has_lag:
        names = (AT.tokens, AT.is_weight, AT.is_weight_sq, AT.log_ratio)
        lag_sums_LB[:, 0] = torch.stack([sums_X[at] for at in names])
        maxima_X[4] = torch.where(sums_X[AT.tokens] > 0, 0.0, -math.inf)
    metrics = LossMetrics(sums_X[: len(SUM_NAMES)], lag_sums_LB, maxima_X[: len(MAX_NAMES)])
    loss = sums_X[AT.loss].to(torch.float32)
    return LossOutput(loss, dlogp, dentropy, metrics, sums_X[AT.nonfinite])


def _run_passes(
    inputs: LossInputs,
    spec: LossSpec,
    denominators: Denominators,
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
    num_values = num_sequences if spec.two_pass else 1
    values = torch.empty((num_values, NUM_SEQUENCE_VALUES), dtype=torch.float32, device=device)
    # A kernel argument must be an array, so inputs that this variant of the kernel does not read
    # are replaced by an arbitrary array.
    unused = dlogp
    shared = {
        "logprobs": inputs.logprobs_T,
        "rollout": inputs.rollout_logprobs_T,
        "old": unused if inputs.old_logprobs_T is None else inputs.old_logprobs_T,
        "mask": inputs.mask_T,
        "cu_seqlens": inputs.cu_seqlens_S1,
        "slots": slots,
        "num_tokens": num_tokens,
        "num_sequences": num_sequences,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
        "SLOT_WIDTH": NUM_SLOT_COLUMNS,
        "num_warps": WARPS,
    }
    widths = {"VALUE_WIDTH": NUM_SEQUENCE_VALUES, "ROW_WIDTH": ROW_WIDTH, "MAX_WIDTH": MAX_WIDTH}

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

    def tokens() -> None:
        token_pass_kernel[(blocks,)](
            **shared,
            **widths,
            reference=unused if inputs.ref_logprobs_T is None else inputs.ref_logprobs_T,
            advantages=inputs.advantages_T,
            entropy=unused if inputs.entropy_T is None else inputs.entropy_T,
            correction=unused if inputs.is_weights_T is None else inputs.is_weights_T,
            lag=inputs.cu_seqlens_S1 if inputs.lag_T is None else inputs.lag_T,
            values=values,
            dlogp=dlogp,
            dentropy=unused if dentropy is None else dentropy,
            sums=sums_PX,
            maxima=maxima_PX,
            scale=1.0 / loss_divisor(spec.config, denominators),
            inv_weight_mean=1.0 / denominators.weight_mean,
            LAG_OFFSET=LAG_OFFSET,
            LAG_STRIDE=LAG_STRIDE,
            NUM_LAGS=NUM_LAG_BINS,
            SPEC=spec,
        )

    with on_device(dlogp):
        if spec.two_pass:
            sequence_pass_kernel[(blocks,)](**shared, SPEC=spec)
            sequences()
            tokens()
        else:
            tokens()
            sequences()
