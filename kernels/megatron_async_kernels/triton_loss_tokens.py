# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Provides the loss kernel over tokens, which computes losses, gradients and metric sums while it
reads the input arrays once.

If the loss of a token does not depend on its sequence, there is one pass over the tokens: this
kernel also writes partial sums for each sequence, from which `sequence_kernel` computes the metrics
of sequences. Otherwise there are two passes: `sequence_pass_kernel` and `sequence_kernel` run
first, and this kernel reads their results.

Invariants
- Each program processes CHUNK consecutive tokens, starting at a multiple of CHUNK, and the
  sequences in them one after the other. No atomic operations are used: every partial sum is written
  by one program, and partial sums are added in a fixed order.
- Each lane sums at most CHUNK / BLOCK tokens in float32; these sums are added in float64. Counts
  and sums for each lag are added in float32 within a block of CHUNK tokens, and in float64 over
  blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async_kernels.triton_loss_terms import (
    bounded_exp,
    first_sequence,
    k3_of,
    kl_terms,
    read_stream,
    surrogate_terms,
    token_keep,
)


@triton.jit
def token_pass_kernel(
    logprobs,
    rollout,
    old,
    reference,
    advantages,
    correction,
    mask,
    lag,
    entropy,
    cu_seqlens,
    values,
    slots,
    dlogp,
    dentropy,
    sums,
    maxima,
    num_tokens,
    num_sequences,
    scale,
    inv_weight_mean,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    MAX_WIDTH: tl.constexpr,
    LAG_OFFSET: tl.constexpr,
    LAG_STRIDE: tl.constexpr,
    NUM_LAGS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Compute the losses, gradients and metric sums of one block of CHUNK tokens, while reading the
    input arrays once."""
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    n_tokens, n_kept, n_bad = zeros, zeros, zeros
    policy_sum, kl_sum, bonus_sum = zeros, zeros, zeros
    log_sum, k3_sum, weight_sum, weight_sq = zeros, zeros, zeros, zeros
    ratio_sum, ratio_log_sum, used_sum, used_sq = zeros, zeros, zeros, zeros
    n_above, n_below, n_dual = zeros, zeros, zeros
    entropy_sum, advantage_sum, advantage_sq = zeros, zeros, zeros
    distance_sum, distance_k3, lag_sum, n_off = zeros, zeros, zeros, zeros
    log_max = zeros - float("inf")
    log_neg_min = zeros - float("inf")
    lag_max = zeros - float("inf")
    bins = tl.arange(0, LAG_STRIDE)
    bin_tokens = tl.zeros((LAG_STRIDE,), dtype=tl.float32)
    bin_weight = tl.zeros((LAG_STRIDE,), dtype=tl.float32)
    bin_weight_sq = tl.zeros((LAG_STRIDE,), dtype=tl.float32)
    bin_log = tl.zeros((LAG_STRIDE,), dtype=tl.float32)

    block = tl.program_id(0)
    position = block * CHUNK
    stop = tl.minimum(position + CHUNK, num_tokens)
    sequence = first_sequence(cu_seqlens, num_sequences, position)
    while position < stop:
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), stop)
        seq_keep, seq_inv, seq_log, seq_mean = 1.0, 1.0, 0.0, 0.0
        if SPEC.two_pass:
            value_at = values + sequence * VALUE_WIDTH
            seq_keep = tl.load(value_at)
            seq_inv = tl.load(value_at + 1)
            seq_log = tl.load(value_at + 2)
            seq_mean = tl.load(value_at + 3)
        part_count, part_log = zeros, zeros
        for base in range(position // BLOCK * BLOCK, end, BLOCK):
            lanes = base + tl.arange(0, BLOCK)
            inside = lanes < num_tokens
            mine = (lanes >= position) & (lanes < end)
            trained = mine & (tl.load(mask + lanes, mask=inside, other=0.0) != 0)
            on = trained.to(tl.float32)
            logp = read_stream(logprobs, lanes, inside, trained)
            ent = zeros
            if SPEC.has_entropy:
                ent = read_stream(entropy, lanes, inside, trained)
            advantage = read_stream(advantages, lanes, inside, trained)
            log_ratio = logp - read_stream(rollout, lanes, inside, trained)
            anchor = log_ratio
            if SPEC.config.ratio_to == "old":
                anchor = logp - read_stream(old, lanes, inside, trained)
            v = on
            if SPEC.has_correction:
                v = read_stream(correction, lanes, inside, trained)
            finite = log_ratio + anchor + advantage + v + ent

            weight, clamped, _ = bounded_exp(log_ratio)
            keep = token_keep(on, weight, clamped, SPEC) * seq_keep
            a = keep * scale
            if SPEC.config.aggregation == "seq_mean_token_mean":
                a = a * seq_inv
            value, slope, used, ratio, ratio_log, above, below, dual = surrogate_terms(
                logp, anchor, advantage, v, seq_log, seq_mean, inv_weight_mean, SPEC
            )
            gradient = slope * a
            policy_sum += value * a
            if SPEC.has_reference:
                distance = logp - read_stream(reference, lanes, inside, trained)
                finite += distance
                inverse, negative, _ = bounded_exp(-distance)
                distance_sum += distance
                distance_k3 += tl.where(trained, k3_of(inverse, negative), 0.0)
                if SPEC.config.kl_estimator != "none":
                    kl, kl_slope = kl_terms(distance, anchor, v, SPEC)
                    kl_sum += kl * a
                    gradient += kl_slope * a
            if SPEC.config.entropy_coef != 0.0:
                gradient_entropy = -SPEC.config.entropy_coef * a
                bonus_sum += gradient_entropy * ent
                tl.store(dentropy + lanes, gradient_entropy, mask=mine)
            tl.store(dlogp + lanes, gradient, mask=mine)

            n_tokens += on
            n_kept += keep
            n_bad += tl.where(finite - finite == 0.0, 0.0, on)
            log_sum += log_ratio
            k3_sum += tl.where(trained, k3_of(weight, clamped), 0.0)
            weight_on = weight * on
            weight_sum += weight_on
            weight_sq += weight_on * weight_on
            ratio_sum += ratio * keep
            ratio_log_sum += ratio_log * keep
            used_sum += used * keep
            used_sq += used * used * keep
            n_above += tl.where(above, keep, 0.0)
            n_below += tl.where(below, keep, 0.0)
            n_dual += tl.where(dual, keep, 0.0)
            entropy_sum += ent
            advantage_sum += advantage
            advantage_sq += advantage * advantage
            log_max = tl.maximum(log_max, tl.where(trained, log_ratio, float("-inf")))
            log_neg_min = tl.maximum(log_neg_min, tl.where(trained, -log_ratio, float("-inf")))
            if SPEC.has_lag:
                lag_of = tl.load(lag + lanes, mask=inside, other=0).to(tl.int32)
                lag_of = tl.where(trained, lag_of, 0)
                lag_sum += lag_of.to(tl.float32)
                n_off += tl.where(lag_of > 0, on, 0.0)
                lag_max = tl.maximum(
                    lag_max, tl.where(trained, lag_of.to(tl.float32), float("-inf"))
                )
                bin_of = tl.minimum(tl.maximum(lag_of, 0), NUM_LAGS - 1)
                # A block has only few different lags, so only lags between its smallest and its
                # largest are summed.
                lowest = tl.min(tl.where(trained, bin_of, NUM_LAGS), axis=0)
                highest = tl.max(tl.where(trained, bin_of, -1), axis=0)
                for current in range(lowest, highest + 1):
                    chosen = trained & (bin_of == current)
                    here = bins == current
                    chosen_weight = tl.where(chosen, weight, 0.0)
                    bin_tokens += tl.where(here, tl.sum(chosen.to(tl.float32), axis=0), 0.0)
                    bin_weight += tl.where(here, tl.sum(chosen_weight, axis=0), 0.0)
                    bin_weight_sq += tl.where(
                        here, tl.sum(chosen_weight * chosen_weight, axis=0), 0.0
                    )
                    chosen_log = tl.where(chosen, log_ratio, 0.0)
                    bin_log += tl.where(here, tl.sum(chosen_log, axis=0), 0.0)
            if SPEC.two_pass == 0:
                part_count += on
                part_log += log_ratio
        if SPEC.two_pass == 0:
            slot = slots + (block + sequence).to(tl.int64) * SLOT_WIDTH
            tl.store(slot, tl.sum(part_count.to(tl.float64), axis=0))
            tl.store(slot + 1, tl.sum(part_log.to(tl.float64), axis=0))
        position = end
        sequence += 1

    row = sums + block.to(tl.int64) * ROW_WIDTH
    tl.store(row + SPEC.at.tokens, tl.sum(n_tokens, axis=0))
    tl.store(row + SPEC.at.kept_tokens, tl.sum(n_kept, axis=0))
    tl.store(row + SPEC.at.nonfinite, tl.sum(n_bad, axis=0))
    policy = tl.sum(policy_sum.to(tl.float64), axis=0)
    kl_total = tl.sum(kl_sum.to(tl.float64), axis=0)
    bonus = tl.sum(bonus_sum.to(tl.float64), axis=0)
    tl.store(row + SPEC.at.loss, policy + kl_total + bonus)
    tl.store(row + SPEC.at.policy_loss, policy)
    tl.store(row + SPEC.at.kl_loss, kl_total)
    tl.store(row + SPEC.at.entropy_loss, bonus)
    tl.store(row + SPEC.at.log_ratio, tl.sum(log_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.k3, tl.sum(k3_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.is_weight, tl.sum(weight_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.is_weight_sq, tl.sum(weight_sq.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.ratio, tl.sum(ratio_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.ratio_log, tl.sum(ratio_log_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.coefficient, tl.sum(used_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.coefficient_sq, tl.sum(used_sq.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.clip_high, tl.sum(n_above, axis=0))
    tl.store(row + SPEC.at.clip_low, tl.sum(n_below, axis=0))
    tl.store(row + SPEC.at.clip_dual, tl.sum(n_dual, axis=0))
    tl.store(row + SPEC.at.entropy, tl.sum(entropy_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.advantage, tl.sum(advantage_sum.to(tl.float64), axis=0))
    tl.store(row + SPEC.at.advantage_sq, tl.sum(advantage_sq.to(tl.float64), axis=0))
    if SPEC.has_reference:
        tl.store(row + SPEC.at.ref_k1, tl.sum(distance_sum.to(tl.float64), axis=0))
        tl.store(row + SPEC.at.ref_k3, tl.sum(distance_k3.to(tl.float64), axis=0))
    extreme = maxima + block.to(tl.int64) * MAX_WIDTH
    tl.store(extreme, tl.max(log_max, axis=0))
    tl.store(extreme + 1, tl.max(log_neg_min, axis=0))
    if SPEC.has_lag:
        tl.store(row + SPEC.at.lag, tl.sum(lag_sum, axis=0))
        tl.store(row + SPEC.at.off_policy_tokens, tl.sum(n_off, axis=0))
        tl.store(extreme + 4, tl.max(lag_max, axis=0))
        by_lag = row + LAG_OFFSET + bins
        tl.store(by_lag, bin_tokens)
        tl.store(by_lag + LAG_STRIDE, bin_weight)
        tl.store(by_lag + 2 * LAG_STRIDE, bin_weight_sq)
        tl.store(by_lag + 3 * LAG_STRIDE, bin_log)
