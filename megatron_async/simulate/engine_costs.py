"""Cost models of an engine, which compute the seconds of decode steps and prefill from a roofline
or from a measured table.

Invariants
- For a fixed batch, the time of a decode step is linear in the KV tokens that are read: `seconds =
  fixed + per_kv_token * kv_tokens`. Each step adds `batch` tokens to the KV, so a closed formula
  gives the time of n steps of the same batch. The simulator relies on this.
- Costs are pure functions.

By the roofline, one decode step of `batch` requests on an engine of tensor-parallel size P takes
the sum of these times:

    weights             max(weight_bytes / (P * BW * e_m),
                            2 * active_parameters * batch / (P * F * e_d))
    attention           kv_bytes / (P * BW * e_m)
    tensor parallelism  2 * layers * all_reduce_seconds
    overhead            decode_overhead_seconds

BW is the memory bandwidth and F the peak FLOP/s of one GPU. e_m, e_d and e_p are the shares of them
that are reached (`simulate.efficiency`: `memory_bandwidth`, `decode_flops`, `prefill_flops`). All
requests share one pass over the weights, and attention is bound by memory (Williams et al. 2009 for
the roofline; Pope et al., arXiv 2211.05102, for the terms). Each all-reduce moves batch * hidden
values in bf16; with P = 1 there is none.

One prefill pass takes

    max(weight_bytes / (P * BW * e_m),
        (2 * active_parameters * tokens + 4 * layers * heads * head_dim * token_pairs)
            / (P * F * e_p))
    + decode_overhead_seconds

where token_pairs is the sum over the tokens of the number of keys that each token attends to.
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
    """Return the seconds of a ring all-reduce of `size` bytes over `ranks` GPUs: a fixed latency,
    plus the time in which 2 * (ranks - 1) / ranks * size bytes pass the link of each GPU. Return 0
    for one GPU."""
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    return efficiency.collective_latency_seconds + moved / (bandwidth * efficiency.links)


@dataclass(frozen=True)
class RooflineEngine:
    """Cost model of an engine by the roofline in the module's docstring, from public figures of
    model and GPU.

    Attributes:
        shape: Shape of the model.
        gpu: Peak rates of the GPU.
        efficiency: Shares of the peak rates that are reached, and overheads.
        tensor: Tensor-parallel size.
        kv_capacity_tokens: Number of tokens that fit into the KV cache.
    """

    shape: ModelShape
    gpu: Gpu
    efficiency: EfficiencyConfig
    tensor: int
    kv_capacity_tokens: int

    @property
    def request_seconds(self) -> float:
        """Seconds that a request costs in addition to its decode steps and prefill passes."""
        return 0.0

    def decode(self, batch: int) -> tuple[float, float]:
        """Return the seconds of one decode step of `batch` requests by the roofline, as a pair:
        fixed seconds, and seconds per KV token that is read."""
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
        """Return the seconds of one prefill pass of `tokens` tokens by the roofline.

        Args:
            tokens: Number of tokens of all requests in the pass.
            token_pairs: Sum over the tokens of the number of keys that each attends to.
        """
        shape, e = self.shape, self.efficiency
        rate = self.tensor * self.gpu.flops * e.prefill_flops
        attention = shape.attention_flops_per_token_pair * token_pairs
        bandwidth = self.tensor * self.gpu.memory_bandwidth * e.memory_bandwidth
        read = shape.weight_bytes_read(tokens) / bandwidth
        computed = (2.0 * shape.active_parameters * tokens + attention) / rate
        return max(read, computed) + e.decode_overhead_seconds


@dataclass(frozen=True)
class MeasuredEngine:
    """Cost model of an engine from measurements: for each measured batch size, the time of a decode
    step as a linear function of its KV tokens.

    Between two measured batch sizes, the values are interpolated linearly. Above the largest size
    they are extrapolated from the two largest sizes. Below the smallest size, its values are used.

    Attributes:
        batches: Measured batch sizes, ascending.
        fixed: Fixed seconds of a decode step at each batch size.
        per_kv_token: Seconds per KV token that is read, at each batch size.
        request_seconds: Seconds that a request costs in addition to its decode steps and its
            prefilled tokens.
        prefill_per_token: Seconds per prefilled token.
        kv_capacity_tokens: Number of tokens that fit into the KV cache.
    """

    batches: tuple[int, ...]
    fixed: tuple[float, ...]
    per_kv_token: tuple[float, ...]
    request_seconds: float
    prefill_per_token: float
    kv_capacity_tokens: int

    def decode(self, batch: int) -> tuple[float, float]:
        """Return the seconds of one decode step of `batch` requests by the measurements, as a pair:
        fixed seconds, and seconds per KV token that is read."""
        per_kv_token = max(0.0, self._between(batch, self.per_kv_token))
        return self._between(batch, self.fixed), per_kv_token

    def _between(self, batch: int, values: tuple[float, ...]) -> float:
        known = self.batches
        if batch <= known[-1] or len(known) == 1:
            return float(np.interp(batch, known, values))
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        return values[-1] + slope * (batch - known[-1])

    def prefill(self, tokens: int, token_pairs: float) -> float:
        """Return the measured seconds of one prefill pass of `tokens` tokens, without the cost of
        its requests (`request_seconds`). `token_pairs` is not used."""
        del token_pairs  # The measured cost per token includes the cost of attention.
        return self.prefill_per_token * tokens


EngineCosts: TypeAlias = RooflineEngine | MeasuredEngine


def read_engine_costs(path: Path) -> MeasuredEngine:
    """Read a cost model from the YAML file that `profile-engine` wrote.

    Raises:
        UserError: The file is not a cost model, has another format version, or has invalid values.
    """
    what = f"simulate.cost_model {path}"
    data = parse_yaml(read_text(path, what), what)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(
            f"simulate.cost_model {path} is not a cost model: it has no line 'format: {FORMAT}'"
        )
    if data.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"simulate.cost_model {path} has format_version {data.get('format_version')}; this "
            f"program reads only {FORMAT_VERSION}"
        )
    try:
        return fit_engine_costs(data)
    except (LookupError, TypeError, ArithmeticError, ValueError) as error:
        raise UserError(
            f"simulate.cost_model {path} has missing or invalid values: {error!r}"
        ) from error


def fit_engine_costs(data: dict[str, Any]) -> MeasuredEngine:
    """Fit least-squares lines through the measurements of a cost-model file; return the resulting
    cost model.

    The slope is the time per KV token. A batch size that was measured with only one number of KV
    tokens has no slope; it gets the slope of the largest batch size that has one.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has the wrong type.
        ValueError: A value is invalid.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for row in data["decode"]:
        points.setdefault(int(row["batch"]), []).append(
            (float(row["kv_tokens"]), float(row["seconds"]))
        )
    if not points or min(points) < 1:
        raise ValueError("decode has no measurements, or a batch is less than 1")
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
    """Return intercept and slope of the least-squares line through `points` (pairs x, y).

    A negative slope, which only measurement errors can cause, is replaced by 0. The slope is None
    if all points have the same x.
    """
    x, y = np.array(points, dtype=np.float64).T
    spread = x - x.mean()
    if not np.any(spread):
        return float(y.mean()), None
    slope = max(0.0, float((spread * y).sum() / (spread**2).sum()))
    return float(y.mean() - slope * x.mean()), slope
