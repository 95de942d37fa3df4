# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
# Conditions on constants in SPEC are nested, not joined: if the outer one is false, the compiler
# evaluates neither the inner one nor its body, which may read a setting that does not exist.
# ruff: noqa: SIM102
"""Provides device functions that compute the loss of a block of tokens.

`surrogates` has the same formulas and names, with their sources. Each function computes a block of
tokens elementwise in float32; SPEC is a `LossSpec` with the compile-time constants.
`first_sequence` finds the sequence of a token, and `read_stream` reads an input array.

Invariant
- All inputs of a token with mask 0 are read as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounded_exp(value):
    """Return three results for x = `value`: exp(c), c = clamp(x, -20, 20), and whether |x| <= 20. A
    NaN stays NaN."""
    clamped = tl.clamp(value, -20.0, 20.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp(clamped), clamped, tl.abs(value) <= 20.0


@triton.jit
def k3_of(exp_x, x):
    """Compute exp(x) - 1 - x. For |x| < 1, where the log-ratios of on-policy tokens are, a series
    is used, because the difference would lose all precision."""
    series = tl.zeros_like(x) + 1.0
    for n in tl.static_range(8):
        series = 1.0 + series * x * (1.0 / (10 - n))
    return tl.where(tl.abs(x) < 1.0, 0.5 * x * x * series, exp_x - 1.0 - x)


@triton.jit
def divergence(exp_x, x, RULE: tl.constexpr, SPEC: tl.constexpr):
    """Compute the divergence of rejection rule number `RULE` for each token. x is the clamped
    log-ratio of the trained policy to the policy that generated the token.

    It is -x for k1, x ** 2 / 2 for k2, and exp(x) - 1 - x for k3. The name of the divergence is
    read from SPEC here and not passed as an argument, because Triton 3.6 passes a string to a
    device function as a plain `str`, which the function cannot compile.
    """
    if SPEC.config.rejection[RULE].divergence == "k1":
        return -x
    if SPEC.config.rejection[RULE].divergence == "k2":
        return 0.5 * x * x
    return k3_of(exp_x, x)


@triton.jit
def token_keep(trained, exp_x, x, SPEC: tl.constexpr):
    """Return 1 for each token that is trained and that every token-level rejection rule keeps,
    otherwise 0."""
    keep = trained
    NUM_RULES: tl.constexpr = SPEC.num_rules
    for i in tl.static_range(NUM_RULES):
        if SPEC.config.rejection[i].level == "token":
            value = divergence(exp_x, x, i, SPEC)
            inside = (value >= SPEC.config.rejection[i].lower) & (
                value <= SPEC.config.rejection[i].upper
            )
            keep = tl.where(inside, keep, 0.0)
    return keep


@triton.jit
def truncated(raw, SPEC: tl.constexpr):
    """Truncate the weights `raw` to the bounds in SPEC; return the result, whether each weight was
    above the upper bound, and whether it was below the lower bound. With only an upper bound the
    result is min(raw, upper); with a lower bound, weights outside [lower, upper] become 0."""
    above = raw > float("inf")
    below = raw > float("inf")
    weight = raw
    if SPEC.config.weight_upper is not None:
        above = raw > SPEC.config.weight_upper
        weight = tl.where(above, SPEC.config.weight_upper, raw)
    if SPEC.config.weight_lower is not None:
        below = raw < SPEC.config.weight_lower
        weight = tl.where(above | below, 0.0, raw)
    return weight, above, below


@triton.jit
def surrogate_terms(
    logp,
    anchor,
    advantage,
    correction,
    seq_log_weight,
    seq_mean,
    inv_weight_mean,
    SPEC: tl.constexpr,
):
    """Compute the surrogate loss of each token. Return eight values: the loss, its derivative with
    respect to the log-prob, the weight by which the token's term is multiplied, the ratio, the
    log-ratio, and whether the upper clip, the lower clip and the dual clip are active."""
    ratio, ratio_log, inside = bounded_exp(anchor)
    never = ratio < 0.0
    above = never
    below = never
    dual = never
    low: tl.constexpr = 1.0 - SPEC.config.clip_low
    high: tl.constexpr = 1.0 + SPEC.config.clip_high
    if SPEC.config.surrogate == "sft":
        value = -logp
        slope = tl.zeros_like(logp) - 1.0
        weight = tl.zeros_like(logp) + 1.0
        ratio = tl.zeros_like(logp)
        ratio_log = tl.zeros_like(logp)
    elif SPEC.config.surrogate == "aipo":
        above = ratio > SPEC.config.aipo_delta
        weight = tl.where(above, SPEC.config.aipo_delta, ratio) * correction
        value = -weight * advantage
        slope = tl.where(above | (inside == 0), 0.0, -correction * ratio * advantage)
    elif SPEC.config.surrogate == "cispo":
        above = ratio > high
        below = ratio < low
        weight = tl.where(above, high, tl.where(below, low, ratio)) * correction
        slope = -weight * advantage
        value = slope * logp
    elif SPEC.config.surrogate == "reinforce":
        if SPEC.config.weight_level == "none":
            raw = tl.zeros_like(logp) + 1.0
        elif SPEC.config.weight_level == "token":
            raw = ratio
        else:
            raw, _, _ = bounded_exp(seq_log_weight)
        weight, above, below = truncated(raw, SPEC)
        weight = weight * inv_weight_mean * correction
        slope = -weight * advantage
        value = slope * logp
    else:
        if SPEC.config.surrogate == "gspo":
            mean = tl.zeros_like(logp) + seq_mean
            ratio = tl.exp(tl.where(mean > 10.0, 10.0, mean))
            inside = mean <= 10.0
        weight = correction
        free = -advantage * ratio
        bounded = -advantage * tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))
        clipped = bounded > free
        value = tl.where(clipped, bounded, free)
        if SPEC.config.surrogate == "ppo_clip":
            if SPEC.config.dual_clip is not None:
                limit = -advantage * SPEC.config.dual_clip
                dual = (advantage < 0.0) & (limit < value)
                value = tl.where(dual, limit, value)
        value = correction * value
        slope = tl.where(clipped | dual | (inside == 0), 0.0, correction * free)
        above = clipped & (ratio > high)
        below = clipped & (ratio < low)
    return value, slope, weight, ratio, ratio_log, above, below, dual


@triton.jit
def kl_terms(distance, anchor, correction, SPEC: tl.constexpr):
    """Compute `kl_coef` times the importance-weighted KL to the reference policy of each token, and
    its derivative with respect to the token's log-prob."""
    ratio, _, inside = bounded_exp(anchor)
    upper: tl.constexpr = SPEC.config.kl_weight_upper
    weight = tl.where(ratio > upper, upper, ratio) * correction * SPEC.config.kl_coef
    if SPEC.config.kl_estimator == "k2":
        return 0.5 * weight * distance * distance, weight * distance
    inverse, negative, near = bounded_exp(-distance)
    k3 = k3_of(inverse, negative)
    moves = (ratio <= upper) & inside
    fixed = tl.where(tl.abs(distance) < 1.0, distance - k3, 1.0 - inverse)
    slope = tl.where(moves, tl.where(near, distance, k3), tl.where(near, fixed, 0.0))
    return weight * k3, weight * slope


@triton.jit
def first_sequence(cu_seqlens, num_sequences, token):
    """Find the index of the sequence that contains `token`: the smallest s with cu_seqlens[s + 1] >
    token."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle + 1).to(tl.int32) > token:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def read_stream(stream, at, inside, trained):
    """Read the values of an input array at positions `at` as float32, with 0 at untrained
    tokens."""
    return tl.where(trained, tl.load(stream + at, mask=inside, other=0.0).to(tl.float32), 0.0)
