"""One-place mistakes in what must not be wrong in silence.

Of `algorithms/`, the torch loss, the packing of batches, a checkpoint's checksums and places, Muon,
and an engine's matrix products and sampling on a CPU.
"""

from __future__ import annotations

from typing import Final

from benchmarks.mutations.mutation import ROOT, Check, Mutation

_FOLDERS: Final = (
    "megatron_async/algorithms",
    "kernels/megatron_async_kernels",
    "megatron_async/trajectory",
    "megatron_async/checkpoint",
    "megatron_async/trainer",
    "megatron_async/engines/sglang",
)
_TESTS: Final = ("algorithms", "kernels", "trajectory", "checkpoint", "trainer", "engines")


def _of(module: str, tests: str, *changes: tuple[str, str]) -> list[Mutation]:
    """Changes of one module; each module and test file is in the first folder that has it."""
    paths = [f"{folder}/{module}.py" for folder in _FOLDERS]
    file = next(path for path in paths if (ROOT / path).exists())
    names = [f"{folder}/test_{name}.py" for folder in _TESTS for name in tests.split()]
    check = Check(tuple(name for name in names if (ROOT / "tests" / name).exists()))
    return [
        Mutation(_name(module, before, after), file, before, after, check)
        for before, after in changes
    ]


def _name(module: str, before: str, after: str) -> str:
    """The change on one line."""
    shown = [" ".join(text.split()) for text in (before, after)]
    return f"{module}: {shown[0]}  ->  {shown[1] or '(nothing)'}"


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *_of(
        "surrogates",
        "losses",
        ("log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND)\n    return", "log_T\n    return"),
        ("log_T.abs() <= SAFETY_BOUND", "log_T.abs() < SAFETY_BOUND"),
        ("else weights > upper", "else weights < upper"),
        ("else weights < lower", "else weights <= lower"),
        ("weights if upper is None else weights.clamp(max=upper)", "weights"),
        ("torch.where(high | low, torch", "torch.where(high, torch"),
        ("weight_T / weight_mean * correction_T", "weight_T * correction_T"),
        ("weight_T / weight_mean * correction_T", "weight_T / weight_mean"),
        (
            "value_T=-coefficient_T * advantages_T * logprobs_T,\n"
            "        dlogp_T=-coefficient_T * advantages_T,\n"
            "        coefficient_T=coefficient_T,\n"
            "        ratio_T=ratio_T,\n"
            "        log_ratio_T=clamped_T,\n"
            "        clip_high_T=high_T,",
            "value_T=-coefficient_T * advantages_T * logprobs_T,\n"
            "        dlogp_T=coefficient_T * advantages_T,\n"
            "        coefficient_T=coefficient_T,\n"
            "        ratio_T=ratio_T,\n"
            "        log_ratio_T=clamped_T,\n"
            "        clip_high_T=high_T,",
        ),
        ("active_T = ~high_T & inside_T", "active_T = inside_T"),
        ("active_T = ~high_T & inside_T", "active_T = ~high_T"),
        ("clamp(max=config.aipo_delta)", "clamp(min=config.aipo_delta)"),
        ("correction_T * ratio_T * advantages_T * active_T", "ratio_T * advantages_T * active_T"),
        (
            "low, high = 1.0 - config.clip_low, 1.0 + config.clip_high\n    free_T",
            "low, high = 1.0 - config.clip_high, 1.0 + config.clip_low\n    free_T",
        ),
        ("clipped_T = bounded_T > free_T", "clipped_T = bounded_T >= free_T"),
        ("torch.maximum(free_T, bounded_T)", "torch.minimum(free_T, bounded_T)"),
        ("(advantages_T < 0) & (limit_T < value_T)", "limit_T < value_T"),
        ("-advantages_T * config.dual_clip", "advantages_T * config.dual_clip"),
        ("~clipped_T & ~dual_T & inside_T", "~clipped_T & inside_T"),
        ("~clipped_T & ~dual_T & inside_T", "~dual_T & inside_T"),
        ("value_T=correction_T * value_T,", "value_T=value_T,"),
        ("clamp(max=GSPO_LOG_BOUND)", "clamp(max=SAFETY_BOUND)"),
        ("correction_T, config, dual=False", "correction_T, config, dual=True"),
        ("ratio_T.clamp(low, high) * correction_T", "ratio_T * correction_T"),
        ("0.5 * weight_T * distance_T", "weight_T * distance_T"),
        ("ratio_T.clamp(max=config.kl_weight_upper) * correction_T", "ratio_T * correction_T"),
        ("(1.0 - inverse_T) * near_T + k3_T * moves_T", "(1.0 - inverse_T) * near_T"),
        ("bounded_exp(-distance_T)", "bounded_exp(distance_T)"),
        ("inverse_T - 1.0 - negative_T", "inverse_T - 1.0 + negative_T"),
    ),
    *_of(
        "loss_torch",
        "losses",
        ("kept_T = stream.mask_T * rejection_keep(", "kept_T = rejection_keep("),
        ("kl_T = config.kl_coef * value_T * scale_T", "kl_T = value_T * scale_T"),
        (
            "dlogp_T + config.kl_coef * slope_T * scale_T",
            "dlogp_T - config.kl_coef * slope_T * scale_T",
        ),
        ("bonus_T = -config.entropy_coef", "bonus_T = config.entropy_coef"),
        (
            "self.logprobs_T - read(inputs.old_logprobs_T)",
            "read(inputs.old_logprobs_T) - self.logprobs_T",
        ),
        ("read(inputs.is_weights_T, 1.0)", "read(None, 1.0)"),
        ('if config.ratio_to == "old"\n', 'if config.ratio_to != "old"\n'),
        ("return -clamped_T", "return clamped_T"),
        ("0.5 * clamped_T.square()", "clamped_T.square()"),
        ("ratio_T - 1.0 - clamped_T", "ratio_T - clamped_T"),
        ('if level == "seq_sum":', 'if level == "seq_mean":'),
        (
            "segment_sum(masked(values_T, mask_T), cu_seqlens_S1)\n    if level",
            "segment_sum(values_T, cu_seqlens_S1)\n    if level",
        ),
        ("statistic >= rule.lower", "statistic > rule.lower"),
        ("statistic <= rule.upper", "statistic < rule.upper"),
        ("keep_T = keep_T * passes", "keep_T = torch.maximum(keep_T, passes)"),
        ("kept_T / max(denominators.tokens, 1.0)", "kept_T / max(denominators.sequences, 1.0)"),
        ("kept_T / (sequences * config.fixed_normalizer)", "kept_T / sequences"),
        (
            "segment_sum(kept_T, cu_seqlens_S1).clamp(min=1.0)\n    return",
            "segment_sum(torch.ones_like(kept_T), cu_seqlens_S1).clamp(min=1.0)\n    return",
        ),
        ("raw_weights(ratio_T, stream.mask_T", "raw_weights(ratio_T, kept_T"),
        (
            "segment_sum(ratio_T * kept_T, stream.cu_seqlens_S1) / length_S",
            "segment_sum(ratio_T * kept_T, stream.cu_seqlens_S1)",
        ),
        ('weight_T.square() * mask_T,\n        "ratio"', 'weight_T * mask_T,\n        "ratio"'),
        ("seq_log_S.clamp(max=math.log(config.staleness_clip))", "seq_log_S"),
        ("(seq_weight_S > config.staleness_clip)", "(seq_weight_S < config.staleness_clip)"),
        ("_largest(-total_S, nonempty_S)", "_largest(total_S, nonempty_S)"),
        ("(lag_T > 0) * mask_T", "(lag_T > 1) * mask_T"),
        ("lag_T.clamp(0, NUM_LAG_BINS - 1)", "lag_T.clamp(0, NUM_LAG_BINS - 2)"),
    ),
    *_of(
        "loss_types",
        "losses",
        ("torch.maximum(self.maxima_E, other.maxima_E)", "other.maxima_E"),
        ("self.lag_sums_LB + other.lag_sums_LB", "self.lag_sums_LB"),
        ("~torch.isfinite(tensor) & trained_T", "~torch.isfinite(tensor)"),
        ("return None, grad * ctx.dlogp_T", "return None, ctx.dlogp_T"),
    ),
    *_of(
        "correction",
        "correction",
        ("(mask.reshape(-1) != 0).double()\n", "torch.ones_like(mask).reshape(-1).double()\n"),
        (
            "torch.arange(batch + 1, device=old.device) * length",
            "torch.arange(batch + 1, device=old.device)",
        ),
        ("raw_weights(log_T, mask_T, cu_S1, level)", "raw_weights(-log_T, mask_T, cu_S1, level)"),
        (
            "raw_weights(log_T, mask_T, cu_S1, level) * mask_T",
            "raw_weights(log_T, mask_T, cu_S1, level)",
        ),
        ("weights_T, _, _ = truncate(raw_T, lower, upper)", "weights_T = raw_T"),
        ("weights_T / factor\n", "weights_T * factor\n"),
        ("factor = weight_mean(weights_T, mask_T", "factor = weight_mean(raw_T, mask_T"),
        ("mean(sums_S / length_S[length_S > 0])", "total(sums_S) / len(length_S)"),
        ("if found > _SMALLEST_MEAN else 1.0", "if found > 0.5 else 1.0"),
        ("keep_T = keep_T * found.keep_T", "keep_T = found.keep_T"),
        (
            "(statistic >= option.lower) & (statistic <= option.upper)",
            "(statistic <= option.upper)",
        ),
        ("mask * keep_T.to", "mask * 0 + keep_T.to"),
        ("mean(touched_S)", "mean(touched_S[rows.length_S > 0])"),
    ),
    *_of(
        "correction",
        "correction",
        ("return self.old_T - self.rollout_T", "return self.rollout_T - self.old_T"),
        ("1.0 / upper if lower is None", "upper if lower is None"),
        ("math.exp(min(largest(total_S), SAFETY_BOUND))", "math.exp(largest(total_S))"),
        (
            'largest(used)\n        metrics["rollout_is_min"]',
            'largest(raw)\n        metrics["rollout_is_min"]',
        ),
        ("mean(raw > upper)", "mean(used > upper)"),
        ("mean(total_S < math.log(floor))", "mean(total_S <= math.log(floor))"),
        ("std(bounded, unbiased=False)", "std(bounded, unbiased=True)"),
        ("(mean(bounded) + _EPSILON)", "(mean(bounded))"),
        ("mean(normalised.square())", "mean(normalised) ** 2"),
        ("std(used_S, unbiased=True)", "std(used_S, unbiased=False)"),
        ("mean(raw_S > upper)", "mean(used_S > upper)"),
        ("(raw < lower) | (raw > upper)", "(raw > upper)"),
        ("option.lower if two_sided else 0.0", "0.0"),
        (
            "rows.row_mean(statistic_T) if statistic_S is None",
            "statistic_S if statistic_S is not None",
        ),
        ("tokens.clamp(low, option.upper)", "tokens"),
        ("per_row_S[nonempty_S]", "per_row_S"),
        ("diff_S = rollout_S - old_S", "diff_S = old_S - rollout_S"),
        ("mean(-log)", "mean(log)"),
        ("log.exp() - log - 1.0", "log.exp() - 1.0"),
        ("(2.0 * log.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp()", "(2.0 * log).exp()"),
        (
            "total_S.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp()) - 1.0",
            "total_S.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp())",
        ),
    ),
    *_of(
        "advantages",
        "advantages",
        (
            "centred_S = rewards_S - mean_G[group_index_S]",
            "centred_S = rewards_S + mean_G[group_index_S]",
        ),
        ("(count_G - 1.0).clamp(min=1.0)).sqrt()", "count_G).sqrt()"),
        ("std_G[group_index_S] + epsilon", "std_G[group_index_S]"),
        ("if not normalize_std:", "if normalize_std:"),
        ("sum_G[group_index_S] - rewards_S", "sum_G[group_index_S]"),
        ("torch.where(alone_G, torch.zeros_like(sum_G), sum_G / count_G)", "sum_G / count_G"),
        ("(rewards_S * tokens_S).sum() / count", "rewards_S.mean()"),
        ("torch.rsqrt(variance + 1e-8)", "torch.sqrt(variance + 1e-8)"),
        ("rewards_S - rewards_S.mean() if", "rewards_S if"),
        (".exp().clamp(max=eta)", ".exp().clamp(min=eta)"),
        ("sum_G[group_index_S] - weighted_S", "sum_G[group_index_S] - rewards_S"),
        ("sum_G[group_index_S] / count_G[group_index_S]", "sum_G[group_index_S]"),
        ("(excess_S / buffer).clamp(0.0, 1.0)", "(excess_S / buffer).clamp(min=0.0)"),
        ("return high_G > low_G", "return high_G >= low_G"),
    ),
    *_of(
        "metrics",
        "metrics",
        (
            "weight_sum * weight_sum / (count * weight_square_sum)",
            "weight_sum / (count * weight_square_sum)",
        ),
        ('"off_policy/kl": -s["log_ratio"]', '"off_policy/kl": s["log_ratio"]'),
        ('s["is_weight_sq"] / tokens - 1.0', 's["is_weight_sq"] / tokens'),
        ('-s["log_ratio_neg_min"]', 's["log_ratio_neg_min"]'),
        ('s["seq_staleness"] / sequences', 's["seq_staleness"] / tokens'),
        ('(s["clip_high"] + s["clip_low"]) / kept', '(s["clip_high"] - s["clip_low"]) / tokens'),
        ("mean(lags > 0)", "mean(lags >= 0)"),
        ("not low <= value <= high", "not low < value < high"),
        ('"rollout_corr/kl", -0.1, 0.1', '"rollout_corr/kl", -math.inf, 0.1'),
    ),
    *_of(
        "loss_settings",
        "config algorithm",
        ("if config.rapid.clip_policy_weight else None", "if True else None"),
        ("if correction.bypass_mode and correction.rollout_is is not None:", "if False:"),
        (
            "rejection_rules(correction) if correction.bypass_mode else ()",
            "rejection_rules(correction)",
        ),
        ('"rollout" if correction.bypass_mode or', '"rollout" if not correction.bypass_mode or'),
    ),
    *_of(
        "algorithm",
        "config algorithm",
        ("(segment_sum(mask_T, cu_S1) > 0).sum()", "(segment_sum(mask_T, cu_S1) >= 0).sum()"),
        ("log_ratio_T = current_T - anchor_T", "log_ratio_T = anchor_T - current_T"),
        ("denominators = replace(denominators, weight_mean=mean)", "pass"),
        ("loss_mask_T=mask_array, is_weights_T=weights_array", "is_weights_T=weights_array"),
        ("loss_mask_T=mask_array, is_weights_T=weights_array", "loss_mask_T=mask_array"),
        (
            "rewards_S - self.config.kl.reward_coef * distance_S",
            "rewards_S + self.config.kl.reward_coef * distance_S",
        ),
        (
            "generation_log_weight(anchor_T - reference_T",
            "generation_log_weight(reference_T - anchor_T",
        ),
        ("cu_S1.diff() - self._tensor(batch.prompt_lengths_S)", "cu_S1.diff()"),
        ("self._tensor(corrected.loss_mask_T)", "self._tensor(batch.loss_mask_T)"),
        ("leave_one_out=rapid.leave_one_out", "leave_one_out=False"),
        ('normalize_std=settings.estimator == "grpo"', "normalize_std=True"),
        ("current_T if is_sft else read", "read"),
        (
            "weights_T, _, _ = truncate(raw_T, config.weight_lower, config.weight_upper)",
            "weights_T = raw_T",
        ),
    ),
    *_of(
        "packed",
        "packed losses",
        ("torch.where(mask_T != 0, values_T, torch.zeros_like(values_T))", "values_T * mask_T"),
        ('initial=float("-inf")', "initial=0.0"),
    ),
    *_of(
        "reduce",
        "correction",
        ("total(values) / values.numel()", "total(values)"),
        ("return -largest(-values.double())", "return largest(values)"),
        ("correction=int(unbiased)", "correction=1"),
    ),
    *_of(
        "packing",
        "packing",
        ("if trajectory.state is not TrajectoryState.DROPPED", "if True"),
        ("int(version_R.max()) > step", "int(version_R.max()) > step + 1"),
        ("NO_VERSION if version is None else number_on", "0 if version is None else number_on"),
        ("trained_T &= version_T >= mask_before", "trained_T &= version_T > mask_before"),
        ("trained_T &= version_T >= mask_before", "pass"),
        ("len(t.prompt.token_ids) + t.response_length", "t.response_length"),
        ("np.where(trained_T, logprobs_T, np.float32(0.0))", "logprobs_T"),
        ("np.where(trained_T, step - version_T, 0)", "step - version_T"),
        ("step - version_T, 0)", "step - version_T - 1, 0)"),
        ("[t.reward for t in chosen]", "sorted(t.reward for t in chosen)"),
        ("[t.reward for t in chosen]", "[t.reward for t in reversed(chosen)]"),
        ("[t.group_id for t in chosen]", "[t.trajectory_id for t in chosen]"),
        ("FinishReason.LENGTH for t", "FinishReason.STOP for t"),
        ("[t.resumed for t in chosen]", "[not t.resumed for t in chosen]"),
        ("temperature=temperature,", ""),
        ("(by_policy_T & ~trained_T).sum()", "by_policy_T.sum()"),
        ("if version.lineage == lineage:", "if True:"),
        ("min(version.number, branch_points[version.lineage])", "version.number"),
        ("min(version.number, branch_points[version.lineage])", "branch_points[version.lineage]"),
        ("if trajectory.reward is None:", "if False:"),
        ("len(trajectory.prompt.token_ids) == 0", "False"),
        ("None if segment.from_environment else segment.version", "segment.version"),
    ),
    *_of(
        "checksum",
        "checksum",
        ("0x9E3779B97F4A7C15", "0x9E3779B97F4A7C14"),
        ("0x94D049BB133111EB", "0xBF58476D1CE4E5B9"),
        ("initial=offsets[0])", "initial=0)"),
        ("(len(part) for part in parts)", "(part.numel() for part in parts)"),
        ("(first, *offsets[1:])", "(first, *offsets)"),
        ("offsets[-1] + (offsets[0] * stride if", "(offsets[0] * stride if"),
        ("offsets[0] * stride if len(shape) == 2 else 0", "0"),
        ("if bits_RC.shape[1] == stride and bits_RC.is_contiguous()", "if True"),
        ("bits_RC.shape[1] == stride and bits_RC", "bits_RC"),
        ("rows_R[:, None] * stride", "rows_R[:, None] * cols"),
        ("places_RC *= signed(_PLACE)\n", "pass\n"),
        ("first + row * rows * stride + column * cols", "first + row * rows * stride"),
        ("first + row * rows * stride + column * cols", "first + column * cols"),
        (": chunk_RC.shape[1]] + chunk_RC", ": chunk_RC.shape[1]] | chunk_RC"),
        ("hashes_RC += signed(begin * _PLACE)", "pass"),
        ("hashes_RC *= signed(constant)", "hashes_RC *= constant & 0xFF"),
        ("            hashes_RC ^= hashes_RC >> 32\n            total", "            total"),
        ("total += hashes_RC.sum()", "total ^= hashes_RC.sum()"),
        ("number &= (1 << 64) - 1", "number &= (1 << 63) - 1"),
    ),
    *_of(
        "checksum",
        "tally",
        ("self.checksum += checksum", "self.checksum ^= checksum"),
        ("self.elements += elements", "self.elements = elements"),
        ("if self.elements != prod(self.shape):", "if self.elements > prod(self.shape):"),
        ("if self.elements != prod(self.shape):", "if self.elements < prod(self.shape):"),
        ("self.checksum % (1 << 64)", "self.checksum % (1 << 32)"),
        ("if loaded != record:", "if loaded.shape != record.shape:"),
        ("if loaded != record:", "if False:"),
        ("sorted(expected.items())", "sorted(expected.items())[:1]"),
    ),
    *_of(
        "placement",
        "placement",
        ("sum(shape[0] for shape in shapes)", "shapes[0][0]"),
        ("if rule.exported]", "]"),
        ("range(stage * per_stage", "range((stage + 1) * per_stage - 1"),
        ("rule.expert or rule.layout", "rule.layout"),
        ("first = max(begin, rows.start * width)", "first = rows.start * width"),
        ("else min(end, rows.stop * width)", "else end"),
        ("offsets[0] + row - rows.start", "offsets[0] + row"),
        ("offsets[1] + column)", "column)"),
        ("rank = rank if size > 1 else 0", "pass"),
        ("yield range(rows), (0, rank * width), width", "yield range(rows), (0, 0), width"),
        ("(rank * half, 0)", "(2 * rank * half, 0)"),
        ("((size + rank) * half, 0)", "((size - 1 + rank) * half, 0)"),
        ("share = -(-rows // size)", "share = rows // size"),
        ("range(min(share, rows - first))", "range(share)"),
        ("if column or not whole:", "if not whole:"),
        ("min(width - column, end - begin)", "width - column"),
    ),
    *_of(
        "muon",
        "muon",
        ("1 - self._momentum)", "self._momentum)"),
        ("matrix.grad.lerp(momentum, self._momentum)", "momentum"),
        ("matrix.mul_(1 - rate * weight_decay)", "pass"),
        ("max(shape) ** 0.5", "min(shape) ** 0.5"),
        ("matrix.grad = None", "pass"),
        (".clamp(min=1e-7)", ""),
        ("else x.T", "else x"),
        ("if placed.rule.is_matrix:", "if True:"),
    ),
    *_of("optimizer", "optimizer", (' * group["wd_mult"]', "")),
    *_of(
        "cpu_matmul",
        "cpu_matmul",
        ("right_KN.t(), None", "right_KN, None"),
        ("product.mul_(float(alpha))", "pass"),
        ("alpha=float(beta))", "alpha=1)"),
        ("beta != 0 and ", ""),
        ("alpha != 0 and ", ""),
        (" and added.dtype is torch.float32", ""),
        ("        and left_MK.dtype is right_KN.dtype is torch.float32\n", ""),
        ("        and _is_plain(right_KN)\n", ""),
        ("        and left_MK.shape[1] == right_KN.shape[0]\n", ""),
        ('"AMD" in str(names) and ', ""),
        ('library.impl("addmm", addmm, "CPU")', "pass"),
    ),
    *_of(
        "sampling",
        "sglang_sampling",
        ("right=True", "right=False"),
        (".clamp_(max=probs_SV.shape[1] - 1)", ""),
        (".clamp_(max=weights_SN.shape[1] - 1)", ""),
        (") * cumulative_SN[:, -1:]", ")"),
        ("block_S * _WIDTH + token_S", "block_S * _WIDTH"),
        ("-probs_SV.shape[1] % _WIDTH", "_WIDTH - probs_SV.shape[1]"),
        ("if sampling_seed is not None:", "if False:"),
    ),
)
