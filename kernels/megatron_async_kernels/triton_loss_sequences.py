# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
# Conditions on constants in SPEC are nested, not joined: if the outer one is false, the compiler
# evaluates neither the inner one nor its body, which may read a setting that does not exist.
# ruff: noqa: SIM102
"""Provides the loss kernels over sequences. One sums over the tokens of each sequence, and the
other computes from these sums the values that the loss of a token and the metrics need.

Invariants
- Each program of `sequence_pass_kernel` processes CHUNK consecutive tokens, starting at a multiple
  of CHUNK, and the sequences in them one after the other. For each sequence it writes partial sums
  to a separate slot. The slots of a sequence are adjacent, and `sequence_kernel` reads them in
  order.
- No atomic operations are used: every partial sum is written by one program, and partial sums are
  added in a fixed order, in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async_kernels.triton_loss_terms import (
    bounded_exp,
    divergence,
    first_sequence,
    read_stream,
    token_keep,
)


@triton.jit
def start_rule(zeros, RULE: tl.constexpr, SPEC: tl.constexpr):
    """Return the value with which the reduction of a rejection rule over a sequence starts: -1e30
    for a maximum, 0 for a sum."""
    if SPEC.num_rules > RULE:
        if SPEC.config.rejection[RULE].level == "seq_max":
            zeros = zeros - 1e30
    return zeros


@triton.jit
def add_rule(total, trained, weight, clamped, RULE: tl.constexpr, SPEC: tl.constexpr):
    """Include the divergences of a block of tokens in the running sum or maximum `total` of
    rejection rule number `RULE`, if the rule is one for whole sequences."""
    if SPEC.num_rules > RULE:
        if SPEC.config.rejection[RULE].level != "token":
            value = divergence(weight, clamped, RULE, SPEC)
            if SPEC.config.rejection[RULE].level == "seq_max":
                total = tl.maximum(total, tl.where(trained, value, -1e30))
            else:
                total += tl.where(trained, value, 0.0)
    return total


@triton.jit
def store_rule(at, total, RULE: tl.constexpr, SPEC: tl.constexpr):
    """Reduce the running sums or maxima of rejection rule number `RULE` over all lanes, and store
    the result at address `at`."""
    if SPEC.num_rules > RULE:
        if SPEC.config.rejection[RULE].level == "seq_max":
            tl.store(at, tl.max(total, axis=0).to(tl.float64))
        else:
            tl.store(at, tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def sequence_pass_kernel(
    logprobs,
    rollout,
    old,
    mask,
    cu_seqlens,
    slots,
    num_tokens,
    num_sequences,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Compute the contribution of each block of CHUNK tokens to the sums of each of its sequences.
    It is the first of two passes over the tokens."""
    block = tl.program_id(0)
    position = block * CHUNK
    stop = tl.minimum(position + CHUNK, num_tokens)
    sequence = first_sequence(cu_seqlens, num_sequences, position)
    while position < stop:
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), stop)
        zeros = tl.zeros((BLOCK,), dtype=tl.float32)
        count, log_ratio_sum, kept_sum = zeros, zeros, zeros
        anchor_sum, kept_anchor_sum = zeros, zeros
        rule_0 = start_rule(zeros, 0, SPEC)
        rule_1 = start_rule(zeros, 1, SPEC)
        rule_2 = start_rule(zeros, 2, SPEC)
        rule_3 = start_rule(zeros, 3, SPEC)
        for base in range(position // BLOCK * BLOCK, end, BLOCK):
            lanes = base + tl.arange(0, BLOCK)
            inside = lanes < num_tokens
            mine = (lanes >= position) & (lanes < end)
            trained = mine & (tl.load(mask + lanes, mask=inside, other=0.0) != 0)
            logp = read_stream(logprobs, lanes, inside, trained)
            log_ratio = logp - read_stream(rollout, lanes, inside, trained)
            anchor = log_ratio
            if SPEC.config.ratio_to == "old":
                anchor = logp - read_stream(old, lanes, inside, trained)
            weight, clamped, _ = bounded_exp(log_ratio)
            on = trained.to(tl.float32)
            keep = token_keep(on, weight, clamped, SPEC)
            count += on
            log_ratio_sum += log_ratio
            kept_sum += keep
            anchor_sum += anchor
            kept_anchor_sum += anchor * keep
            rule_0 = add_rule(rule_0, trained, weight, clamped, 0, SPEC)
            rule_1 = add_rule(rule_1, trained, weight, clamped, 1, SPEC)
            rule_2 = add_rule(rule_2, trained, weight, clamped, 2, SPEC)
            rule_3 = add_rule(rule_3, trained, weight, clamped, 3, SPEC)
        slot = slots + (block + sequence).to(tl.int64) * SLOT_WIDTH
        tl.store(slot, tl.sum(count.to(tl.float64), axis=0))
        tl.store(slot + 1, tl.sum(log_ratio_sum.to(tl.float64), axis=0))
        tl.store(slot + 2, tl.sum(kept_sum.to(tl.float64), axis=0))
        tl.store(slot + 3, tl.sum(anchor_sum.to(tl.float64), axis=0))
        tl.store(slot + 4, tl.sum(kept_anchor_sum.to(tl.float64), axis=0))
        store_rule(slot + 5, rule_0, 0, SPEC)
        store_rule(slot + 6, rule_1, 1, SPEC)
        store_rule(slot + 7, rule_2, 2, SPEC)
        store_rule(slot + 8, rule_3, 3, SPEC)
        position = end
        sequence += 1


@triton.jit
def sequence_kernel(
    cu_seqlens,
    slots,
    values,
    sums,
    maxima,
    first_row,
    num_sequences,
    log_staleness_clip,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    MAX_WIDTH: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Add up the partial sums (slots) of each sequence. From the totals, compute the metrics of
    sequences and, if there are two passes, the values that the loss of the sequence's tokens
    needs."""
    NUM_RULES: tl.constexpr = SPEC.num_rules
    sequences = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequences < num_sequences
    begin = tl.load(cu_seqlens + sequences, mask=inside, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + sequences + 1, mask=inside, other=0).to(tl.int32)
    first = begin // CHUNK + sequences
    num_slots = tl.where(end > begin, (end - 1) // CHUNK + sequences - first + 1, 0)
    zeros = tl.zeros((BLOCK,), dtype=tl.float64)
    count, log_ratio, kept, anchor, kept_anchor = zeros, zeros, zeros, zeros, zeros
    for i in range(tl.max(num_slots, axis=0)):
        on = i < num_slots
        slot = slots + (first + i).to(tl.int64) * SLOT_WIDTH
        count += tl.load(slot, mask=on, other=0.0)
        log_ratio += tl.load(slot + 1, mask=on, other=0.0)
        if SPEC.two_pass:
            kept += tl.load(slot + 2, mask=on, other=0.0)
            anchor += tl.load(slot + 3, mask=on, other=0.0)
            kept_anchor += tl.load(slot + 4, mask=on, other=0.0)
    keep = (count > -1.0).to(tl.float32)
    for rule in tl.static_range(NUM_RULES):
        if SPEC.config.rejection[rule].level != "token":
            total = zeros
            if SPEC.config.rejection[rule].level == "seq_max":
                total = total - 1e30
            for i in range(tl.max(num_slots, axis=0)):
                on = i < num_slots
                at = slots + (first + i).to(tl.int64) * SLOT_WIDTH + 5 + rule
                if SPEC.config.rejection[rule].level == "seq_max":
                    total = tl.maximum(total, tl.load(at, mask=on, other=-1e30))
                else:
                    total += tl.load(at, mask=on, other=0.0)
            if SPEC.config.rejection[rule].level == "seq_max":
                total = tl.where(count > 0, total, 0.0)
            if SPEC.config.rejection[rule].level == "seq_mean":
                total = total / tl.maximum(count, 1.0)
            statistic = total.to(tl.float32)
            passes = (statistic >= SPEC.config.rejection[rule].lower) & (
                statistic <= SPEC.config.rejection[rule].upper
            )
            keep = tl.where(passes, keep, 0.0)
    if SPEC.two_pass:
        value = values + sequences * VALUE_WIDTH
        kept_count = tl.maximum(kept, 1.0)
        tl.store(value, keep, mask=inside)
        tl.store(value + 1, (1.0 / kept_count).to(tl.float32), mask=inside)
        tl.store(value + 2, anchor.to(tl.float32), mask=inside)
        tl.store(value + 3, (kept_anchor / kept_count).to(tl.float32), mask=inside)
    trained = inside & (count > 0)
    weight, clamped, _ = bounded_exp(log_ratio.to(tl.float32))
    weight = tl.where(trained, weight, 0.0)
    stale = tl.minimum(clamped, log_staleness_clip)
    clipped = trained & (weight > SPEC.config.staleness_clip)
    row = sums + (first_row + tl.program_id(0)) * ROW_WIDTH
    wide = weight.to(tl.float64)
    tl.store(row + SPEC.at.sequences, tl.sum(trained.to(tl.float32), axis=0))
    tl.store(row + SPEC.at.seq_weight, tl.sum(wide, axis=0))
    tl.store(row + SPEC.at.seq_weight_sq, tl.sum(wide * wide, axis=0))
    tl.store(row + SPEC.at.seq_staleness, tl.sum(tl.where(trained, stale, 0.0), axis=0))
    tl.store(row + SPEC.at.seq_weight_clipped, tl.sum(clipped.to(tl.float32), axis=0))
    extreme = maxima + (first_row + tl.program_id(0)) * MAX_WIDTH
    lowest = float("-inf")
    tl.store(extreme + 2, tl.max(tl.where(trained, log_ratio, lowest), axis=0))
    tl.store(extreme + 3, tl.max(tl.where(trained, -log_ratio, lowest), axis=0))
