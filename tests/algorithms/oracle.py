# ruff: noqa: B905 - zipped rows have equal lengths by construction
"""Provides a second implementation of corrections, losses and advantages in float64 NumPy, one row
and one token at a time.

The oracle is written from the formulas (docs/semantics.md, the papers, and the definitions of verl
0.9.1 that the docstrings of `correction` state), not from the implementation. The oracle has no
packed streams and no closed forms of reductions, and shares only names with the implementation. A
row is a list of trained tokens, each a dict of numbers; untrained tokens are absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BOUND = 20.0
Row = list[dict[str, float]]


def c(x: float) -> float:
    return min(max(x, -BOUND), BOUND)


def mean(values: Sequence[float]) -> float:
    return float(np.sum(np.asarray(values, dtype=np.float64)) / len(values)) if values else 0.0


def population_std(values: Sequence[float]) -> float:
    return float(np.std(np.asarray(values, dtype=np.float64))) if len(values) > 1 else 0.0


def sample_std(values: Sequence[float]) -> float:
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) if len(values) > 1 else 0.0


def share(values: Sequence[Any], test: Callable[[Any], bool]) -> float:
    return mean([float(test(value)) for value in values])


# --- rollout correction -----------------------------------------------------------------------


def bounds(spec: float | str) -> tuple[float | None, float]:
    text = str(spec)
    if "_" in text:
        low, high = text.split("_")
        return float(low), float(high)
    return None, float(text)


def truncated(weight: float, low: float | None, high: float) -> float:
    if low is None:
        return min(weight, high)
    return weight if low <= weight <= high else 0.0


@dataclass
class Correction:
    weights: list[list[float]] | None
    keep: list[list[bool]]
    metrics: dict[str, float] = field(default_factory=dict)


def correction(
    rows: list[Row],
    *,
    level: str | None = None,
    threshold: float | str = 2.0,
    normalize: bool = False,
    options: Sequence[str] = (),
    thresholds: Sequence[float | str] = (),
) -> Correction:
    logs = [[token["old"] - token["rollout"] for token in row] for row in rows]
    metrics: dict[str, float] = {}
    weights = None
    if level is not None:
        weights, found = _weights(logs, level, threshold, normalize)
        metrics.update(found)
    keep = [[True for _ in row] for row in logs]
    for option, spec in zip(options, thresholds, strict=True):
        kept, found = _rejection(logs, option, spec)
        metrics.update(found)
        keep = [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(keep, kept)]
    if options:
        flat = [k for row in keep for k in row]
        metrics["rollout_rs_masked_fraction"] = share(flat, lambda k: not k)
        metrics["rollout_rs_seq_masked_fraction"] = share(keep, lambda row: not all(row))
    metrics.update(_off_policy(rows, logs))
    return Correction(weights, keep, {f"rollout_corr/{k}": v for k, v in metrics.items()})


def _weights(
    logs: list[list[float]], level: str, threshold: float | str, normalize: bool
) -> tuple[list[list[float]], dict[str, float]]:
    low, high = bounds(threshold)
    floor = 1.0 / high if low is None else low
    raw: list[list[float]] = []
    for row in logs:
        if level == "token":
            raw.append([math.exp(c(x)) for x in row])
        else:
            raw.append([math.exp(c(sum(row)))] * len(row))
    used = [[truncated(w, low, high) for w in row] for row in raw]
    flat_raw = [w for row in raw for w in row]
    flat = [w for row in used for w in row]
    m: dict[str, float] = {"mean": mean(flat)}
    if level == "token":
        m["max"], m["min"] = max(flat), min(flat)
        m["ratio_fraction_high"] = share(flat_raw, lambda w: w > high)
        m["ratio_fraction_low"] = share(flat_raw, lambda w: w < floor)
    else:
        totals = [sum(row) for row in logs]
        m["max"] = math.exp(min(max(totals), BOUND))
        m["min"] = math.exp(min(totals))
        m["ratio_fraction_high"] = share(totals, lambda x: x > math.log(high))
        m["ratio_fraction_low"] = share(totals, lambda x: x < math.log(floor))
    clipped = [min(max(w, 0.0), high) for w in flat]
    m["std"] = population_std(clipped)
    normalized = [w / (mean(clipped) + 1e-8) for w in clipped]
    second = mean([w * w for w in normalized])
    m["eff_sample_size"] = 1.0 / second if second else 0.0
    row_used, row_raw = [mean(row) for row in used], [mean(row) for row in raw]
    m["seq_mean"], m["seq_std"] = mean(row_used), sample_std(row_used)
    m["seq_max"], m["seq_min"] = max(row_used), min(row_used)
    m["seq_max_deviation"] = max(abs(w - 1.0) for w in row_used)
    m["seq_fraction_high"] = share(row_raw, lambda w: w > high)
    m["seq_fraction_low"] = share(row_raw, lambda w: w < floor)
    if low is not None:
        m["oob_ratio"] = share(flat_raw, lambda w: not low <= w <= high)
    if normalize:
        average = mean(flat) if level == "token" else mean([row[0] for row in used if row])
        factor = average if average > 1e-8 else 1.0
        used = [[w / factor for w in row] for row in used]
        m["batch_norm_factor"] = factor
    return used, {f"rollout_is_{name}": value for name, value in m.items()}


def k(name: str, log: float) -> float:
    x = c(log)
    return {"k1": -x, "k2": x * x / 2.0, "k3": math.exp(x) - 1.0 - x}[name]


def _rejection(
    logs: list[list[float]], option: str, spec: float | str
) -> tuple[list[list[bool]], dict[str, float]]:
    level, name = option.rsplit("_", 1)
    low, high = bounds(spec)
    if name == "k1":
        low, high = math.log(1.0 / high if low is None else low), math.log(high)
    stats = [[k(name, x) for x in row] for row in logs]
    reduce: dict[str, Callable[[list[float]], float]] = {
        "seq_sum": lambda row: float(sum(row)),
        "seq_mean": mean,
        "seq_max": lambda row: max(row) if row else 0.0,
    }

    def passes(value: float) -> bool:
        return value <= high and (low is None or value >= low)

    if level == "token":
        at_token = stats
        keep = [[passes(value) for value in row] for row in stats]
        per_row = [mean(row) for row in stats if row]
        population = [value for row in stats for value in row]
    else:
        totals = [reduce[level](row) for row in stats]
        at_token = [[total] * len(row) for total, row in zip(totals, stats)]
        keep = [[passes(total)] * len(row) for total, row in zip(totals, stats)]
        per_row = [total for total, row in zip(totals, stats) if row]
        population = per_row
    flat = [value for row in at_token for value in row]
    floor = 0.0 if low is None else low
    m = {
        "mean": mean(flat),
        "max": max(population),
        "min": min(population),
        "fraction_high": share(population, lambda v: v > high),
        "fraction_low": 0.0 if low is None else share(population, lambda v: v < floor),
        "std": population_std([min(max(v, floor), high) for v in flat]),
        "seq_mean": mean(per_row),
        "seq_std": sample_std(per_row),
        "seq_max": max(per_row),
        "seq_min": min(per_row),
        "seq_max_deviation": max(abs(v) for v in per_row),
        "seq_fraction_high": share(per_row, lambda v: v > high),
        "masked_fraction": share([x for row in keep for x in row], lambda x: not x),
        "seq_masked_fraction": share([row for row in keep if row], lambda row: not all(row)),
    }
    if low is not None:
        m["seq_fraction_low"] = share(per_row, lambda v: v < floor)
    return keep, {f"rollout_rs_{option}_{name}": value for name, value in m.items()}


def _off_policy(rows: list[Row], logs: list[list[float]]) -> dict[str, float]:
    old = [mean([token["old"] for token in row]) for row in rows]
    rollout = [mean([token["rollout"] for token in row]) for row in rows]
    diff = [b - a for a, b in zip(old, rollout)]
    flat = [x for row in logs for x in row]
    return {
        "training_ppl": mean([math.exp(-a) for a in old]),
        "rollout_ppl": mean([math.exp(-b) for b in rollout]),
        "training_log_ppl": -mean(old),
        "rollout_log_ppl": -mean(rollout),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(d) for d in diff]),
        "log_ppl_diff_max": max(diff),
        "log_ppl_diff_min": min(diff),
        "ppl_ratio": mean([math.exp(d) for d in diff]),
        "kl": -mean(flat),
        "k3_kl": mean([math.exp(x) - x - 1.0 for x in flat]),
        "chi2_token": mean([math.exp(c(x)) ** 2 for x in flat]) - 1.0,
        "chi2_seq": mean([math.exp(c(sum(row))) ** 2 for row in logs]) - 1.0,
    }


# --- losses -----------------------------------------------------------------------------------


@dataclass
class Loss:
    value: float
    dlogp: list[list[float]]
    dentropy: list[list[float]]
    sums: dict[str, float]
    by_lag: np.ndarray


def loss(rows: list[Row], config: Any, tokens: float, sequences: float, weight_mean: float) -> Loss:
    """Return the loss, its gradients and its metric sums.

    The tokens of `rows` have p, rollout, old, ref, entropy, advantage, v (correction weight) and
    lag.
    """
    out = Loss(0.0, [], [], {}, np.zeros((4, 9)))
    s: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        s[name] = s.get(name, 0.0) + value

    extremes: dict[str, list[float]] = {"log": [], "seq": [], "lag": []}
    for row in rows:
        behavior = [token["p"] - token["rollout"] for token in row]
        anchor = [t["p"] - (t["old"] if config.ratio_to == "old" else t["rollout"]) for t in row]
        keep = _kept(behavior, config.rejection)
        n_kept = sum(keep)
        scale = _scale(config, tokens, sequences, n_kept)
        mean_kept = mean([x for x, kept in zip(anchor, keep) if kept])
        dlogp, dentropy = [], []
        for token, x, kept in zip(row, anchor, keep):
            a = scale if kept else 0.0
            term = _surrogate(config, token, x, sum(anchor), mean_kept, weight_mean)
            value, slope = term["value"], term["slope"]
            kl_value, kl_slope = _kl(config, token, x)
            out.value += a * (value + kl_value - config.entropy_coef * token["entropy"])
            add("policy_loss", a * value)
            add("kl_loss", a * kl_value)
            add("entropy_loss", -a * config.entropy_coef * token["entropy"])
            dlogp.append(a * (slope + kl_slope))
            dentropy.append(-a * config.entropy_coef)
            if kept:
                add("kept_tokens", 1.0)
                for name in ("ratio", "ratio_log", "clip_high", "clip_low", "clip_dual"):
                    add(name, term[name])
                add("coefficient", term["coefficient"])
                add("coefficient_sq", term["coefficient"] ** 2)
        out.dlogp.append(dlogp)
        out.dentropy.append(dentropy)
        if row:
            weight = math.exp(c(sum(behavior)))
            add("sequences", 1.0)
            add("seq_weight", weight)
            add("seq_weight_sq", weight**2)
            add("seq_staleness", math.log(min(weight, config.staleness_clip)))
            add("seq_weight_clipped", float(weight > config.staleness_clip))
            extremes["seq"].append(sum(behavior))
        for token, x in zip(row, behavior):
            weight, d = math.exp(c(x)), token["p"] - token["ref"]
            for name, value in {
                "tokens": 1.0,
                "log_ratio": x,
                "k3": k("k3", x),
                "is_weight": weight,
                "is_weight_sq": weight**2,
                "entropy": token["entropy"],
                "advantage": token["advantage"],
                "advantage_sq": token["advantage"] ** 2,
                "ref_k1": d,
                "ref_k3": math.exp(c(-d)) - 1.0 - c(-d),
                "lag": token["lag"],
                "off_policy_tokens": float(token["lag"] > 0),
            }.items():
                add(name, value)
            extremes["log"].append(x)
            extremes["lag"].append(token["lag"])
            column = min(int(token["lag"]), 8)
            out.by_lag[:, column] += [1.0, weight, weight**2, x]
    s["loss"] = out.value
    infinity = [-math.inf]
    s["log_ratio_max"] = max(extremes["log"] + infinity)
    s["log_ratio_neg_min"] = max([-x for x in extremes["log"]] + infinity)
    s["seq_log_weight_max"] = max(extremes["seq"] + infinity)
    s["seq_log_weight_neg_min"] = max([-x for x in extremes["seq"]] + infinity)
    s["lag_max"] = max(extremes["lag"] + infinity)
    out.sums = s
    return out


def _kept(behavior: list[float], rules: Sequence[Any]) -> list[bool]:
    keep = [True] * len(behavior)
    for rule in rules:
        stats = [k(rule.divergence, x) for x in behavior]
        if rule.level == "seq_sum":
            stats = [sum(stats)] * len(stats)
        elif rule.level == "seq_mean":
            stats = [mean(stats)] * len(stats)
        elif rule.level == "seq_max" and stats:
            stats = [max(stats)] * len(stats)
        keep = [a and rule.lower <= v <= rule.upper for a, v in zip(keep, stats)]
    return keep


def _scale(config: Any, tokens: float, sequences: float, kept: int) -> float:
    if config.aggregation == "token_mean":
        return 1.0 / tokens
    if config.aggregation == "seq_mean_token_sum":
        return 1.0 / sequences
    if config.aggregation == "seq_mean_token_mean":
        return 1.0 / (sequences * kept) if kept else 0.0
    return 1.0 / (sequences * config.fixed_normalizer)


def _surrogate(
    config: Any, token: dict[str, float], x: float, total: float, mean_kept: float, norm: float
) -> dict[str, float]:
    p, a, v = token["p"], token["advantage"], token["v"]
    r, inside = math.exp(c(x)), abs(x) <= BOUND
    out = {"ratio": r, "ratio_log": c(x), "clip_high": 0.0, "clip_low": 0.0, "clip_dual": 0.0}
    if config.surrogate == "sft":
        return {**out, "value": -p, "slope": -1.0, "coefficient": 1.0, "ratio": 0, "ratio_log": 0}
    if config.surrogate == "reinforce":
        raw = {"none": 1.0, "token": r, "sequence": math.exp(c(total))}[config.weight_level]
        high = math.inf if config.weight_upper is None else config.weight_upper
        w = v * truncated(raw, config.weight_lower, high) / norm
        low_flag = config.weight_lower is not None and raw < config.weight_lower
        out |= {"clip_high": float(raw > high), "clip_low": float(low_flag)}
        return {**out, "value": -w * a * p, "slope": -w * a, "coefficient": w}
    if config.surrogate == "aipo":
        over = r > config.aipo_delta
        w = v * min(r, config.aipo_delta)
        slope = 0.0 if over or not inside else -v * r * a
        return {**out, "value": -w * a, "slope": slope, "coefficient": w, "clip_high": float(over)}
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    if config.surrogate == "cispo":
        w = v * min(max(r, low), high)
        out |= {"clip_high": float(r > high), "clip_low": float(r < low)}
        return {**out, "value": -w * a * p, "slope": -w * a, "coefficient": w}
    if config.surrogate == "gspo":
        r, inside = math.exp(min(mean_kept, 10.0)), mean_kept <= 10.0
    free, bound = -a * r, -a * min(max(r, low), high)
    value, clipped = max(free, bound), bound > free
    dual = False
    if config.surrogate == "ppo_clip" and config.dual_clip is not None and a < 0:
        dual = -a * config.dual_clip < value
        value = min(value, -a * config.dual_clip)
    slope = 0.0 if clipped or dual or not inside else v * free
    out |= {
        "ratio": r,
        "clip_high": float(clipped and r > high),
        "clip_low": float(clipped and r < low),
        "clip_dual": float(dual),
    }
    return {**out, "value": v * value, "slope": slope, "coefficient": v}


def _kl(config: Any, token: dict[str, float], x: float) -> tuple[float, float]:
    if config.kl_estimator == "none":
        return 0.0, 0.0
    d, r = token["p"] - token["ref"], math.exp(c(x))
    y = token["v"] * min(r, config.kl_weight_upper)
    if config.kl_estimator == "k2":
        return config.kl_coef * y * d * d / 2.0, config.kl_coef * y * d
    k3 = math.exp(c(-d)) - 1.0 - c(-d)
    slope = y * (1.0 - math.exp(-d)) if abs(d) <= BOUND else 0.0
    if r <= config.kl_weight_upper and abs(x) <= BOUND:
        slope += y * k3
    return config.kl_coef * y * k3, config.kl_coef * slope


# --- advantages -------------------------------------------------------------------------------


def advantages(name: str, rewards: list[float], groups: list[int], **settings: Any) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        members = [r for r, g in zip(rewards, groups) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        if name in ("grpo", "dr_grpo"):
            average, std = (mean(members), sample_std(members)) if others else (0.0, 1.0)
            centered = reward - average
            result.append(centered / (std + 1e-6) if name == "grpo" else centered)
        elif name == "rloo":
            result.append(reward - mean(others))
        elif name == "pg":
            result.append(reward - mean(rewards))
        elif name == "reinforce_pp":
            every = [r for r, n in zip(rewards, settings["tokens"]) for _ in range(n)]
            variance = sample_std(every) ** 2
            result.append((reward - mean(every)) / math.sqrt(variance + 1e-8) if every else 0.0)
        elif name == "rapid":
            weights = [min(math.exp(c(x)), settings["eta"]) for x in settings["log_weights"]]
            terms = [
                w * r
                for j, (w, r, g) in enumerate(zip(weights, rewards, groups))
                if g == group and not (settings["leave_one_out"] and j == i)
            ]
            result.append(reward - mean(terms))
    return result
