"""Cost of an engine's work: decode steps, prefill, KV memory. A roofline, or a measured table.

Invariants
- For a fixed batch a decode step's time is linear in the KV tokens that are read:
  `seconds = fixed + per_kv_token * kv_tokens`. The simulator relies on it: n steps of a batch whose
  KV grows by `batch` tokens a step then take a closed-form time.
- Costs are pure functions.

The roofline of one decode step of `batch` requests on an engine of TP size P:

    max(weight bytes / (P BW e_m),  2 active parameters batch / (P F e_d))   GEMMs
    + KV bytes / (P BW e_m)                                                  attention
    + 2 layers all-reduces of batch x hidden bf16 (P > 1)                    tensor parallelism
    + decode_overhead_seconds

GEMMs share one pass over the weights, attention is bound by memory (Williams et al. 2009 for the
model; Pope et al., arXiv 2211.05102, for the terms). Prefill of tokens with contexts c_i:
(2 active parameters tokens + attention pairs x 4 layers heads head_dim) / (P F e_p).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_async.config.files import parse_yaml, read_text
from megatron_async.config.simulate import EfficiencyConfig
from megatron_async.errors import UserError
from megatron_async.models.shape import BF16, ModelShape
from megatron_async.simulate.hardware import Gpu

FORMAT = "megatron_async.engine_cost"
FORMAT_VERSION = 1


def all_reduce_seconds(
    size: float, ranks: int, bandwidth: float, efficiency: EfficiencyConfig
) -> float:
    """Ring all-reduce of `size` bytes: 2 (P - 1) / P of them over the link, plus its latency."""
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    return efficiency.collective_latency_seconds + moved / (bandwidth * efficiency.links)


@dataclass(frozen=True)
class RooflineEngine:
    """The roofline of the module's docstring."""

    shape: ModelShape
    gpu: Gpu
    efficiency: EfficiencyConfig
    tensor: int
    kv_capacity_tokens: int

    def decode(self, batch: int) -> tuple[float, float]:
        """Seconds of a decode step of `batch` requests: (fixed, per KV token read)."""
        e, gpu, shape = self.efficiency, self.gpu, self.shape
        bandwidth = self.tensor * gpu.memory_bandwidth * e.memory_bandwidth
        flops = self.tensor * gpu.flops * e.decode_flops
        gemm = max(
            shape.weight_bytes_read(batch) / bandwidth, 2 * shape.active_parameters * batch / flops
        )
        size = batch * shape.hidden * BF16
        reduce = all_reduce_seconds(size, self.tensor, gpu.nvlink, e)
        fixed = gemm + 2 * shape.layers * reduce + e.decode_overhead_seconds
        return fixed, shape.kv_bytes_per_token / bandwidth

    def prefill(self, tokens: int, token_pairs: float) -> float:
        """Seconds to prefill `tokens`; `token_pairs` = sum over them of the keys they attend to.

        0 tokens: all of the prompt is cached, and what a request costs anyway is left.
        """
        shape = self.shape
        rate = self.tensor * self.gpu.flops * self.efficiency.prefill_flops
        attention = shape.attention_flops_per_token_pair * token_pairs
        return (2.0 * shape.active_parameters * tokens + attention) / rate


@dataclass(frozen=True)
class MeasuredEngine:
    """A table of measured decode steps: a line over KV tokens at each batch, linear in between.

    Beyond the largest measured batch the last two lines are continued, below the smallest the
    first is used.
    """

    batches: tuple[int, ...]
    fixed: tuple[float, ...]
    per_kv_token: tuple[float, ...]
    prefill_fixed: float
    prefill_per_token: float
    kv_capacity_tokens: int

    def decode(self, batch: int) -> tuple[float, float]:
        """See `RooflineEngine`."""
        per_kv_token = max(0.0, self._between(batch, self.per_kv_token))
        return self._between(batch, self.fixed), per_kv_token

    def _between(self, batch: int, values: tuple[float, ...]) -> float:
        known = self.batches
        if batch <= known[-1] or len(known) == 1:
            return float(np.interp(batch, known, values))
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        return values[-1] + slope * (batch - known[-1])

    def prefill(self, tokens: int, token_pairs: float) -> float:
        """See `RooflineEngine`."""
        del token_pairs  # contained in what was measured
        return self.prefill_fixed + self.prefill_per_token * tokens


EngineCosts: TypeAlias = RooflineEngine | MeasuredEngine


def read_engine_costs(path: Path) -> MeasuredEngine:
    """A cost model as `profile-engine` writes it. Raises UserError naming what does not fit."""
    what = f"simulate.cost_model {path}"
    data = parse_yaml(read_text(path, what), what)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"simulate.cost_model {path} is not a cost model (no format: {FORMAT})")
    if data.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"simulate.cost_model {path} has format_version {data.get('format_version')}, this "
            f"program reads {FORMAT_VERSION}"
        )
    try:
        return fit_engine_costs(data)
    except (LookupError, TypeError, ArithmeticError, ValueError) as error:
        raise UserError(f"simulate.cost_model {path} does not fit: {error!r}") from error


def fit_engine_costs(data: dict[str, Any]) -> MeasuredEngine:
    """Least-squares lines through the measurements. Raises KeyError, TypeError or ValueError.

    A batch that was measured at one KV size only gets the slope of the largest batch that has one.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for row in data["decode"]:
        points.setdefault(int(row["batch"]), []).append(
            (float(row["kv_tokens"]), float(row["seconds"]))
        )
    if not points or min(points) < 1:
        raise ValueError("decode must hold measurements of batches of at least 1")
    lines = {batch: _line(rows) for batch, rows in sorted(points.items())}
    slopes = [slope for _, slope in lines.values() if slope is not None]
    default = slopes[-1] if slopes else 0.0
    fixed, per_token = [], []
    for batch, (intercept, slope) in lines.items():
        if slope is None:
            slope = default
            kv_tokens, seconds = points[batch][0]
            intercept = seconds - slope * kv_tokens
        fixed.append(max(intercept, 0.0))
        per_token.append(slope)
    prefill = [(float(row["tokens"]), float(row["seconds"])) for row in data["prefill"]]
    at_zero, rate = _line(prefill)
    if rate is None:
        at_zero, rate = 0.0, prefill[0][1] / prefill[0][0]
    return MeasuredEngine(
        tuple(lines),
        tuple(fixed),
        tuple(per_token),
        max(at_zero, 0.0),
        rate,
        int(data["kv_capacity_tokens"]),
    )


def _line(points: list[tuple[float, float]]) -> tuple[float, float | None]:
    """Intercept and (not negative) slope; no slope when all points have one abscissa."""
    x, y = np.array(points, dtype=np.float64).T
    spread = x - x.mean()
    if not np.any(spread):
        return float(y.mean()), None
    slope = max(0.0, float((spread * y).sum() / (spread**2).sum()))
    return float(y.mean() - slope * x.mean()), slope
