"""The loss kernels as the launchers build them, for `ahead_of_time`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_async_kernels.is_loss import BLOCK, SEQUENCE_BLOCK, WARPS
from megatron_async_kernels.loss_types import NUM_LAG_BINS, LossConfig, RejectionRule
from megatron_async_kernels.triton_loss_sequences import sequence_kernel, sequence_pass_kernel
from megatron_async_kernels.triton_loss_spec import (
    CHUNK,
    LAG_OFFSET,
    LAG_STRIDE,
    MAX_WIDTH,
    NUM_SEQUENCE_VALUES,
    NUM_SLOT_COLUMNS,
    ROW_WIDTH,
    LossSpec,
    needs_sequences,
)
from megatron_async_kernels.triton_loss_tokens import token_pass_kernel

from benchmarks.compiled.ahead_of_time import KernelBuild

# The plain case, and the one that computes the most of each kind.
COMPILED_CONFIGS: dict[str, LossConfig] = {
    "ppo_clip": LossConfig(),
    "ppo_clip, dual clip, k3, entropy, rules": LossConfig(
        ratio_to="old",
        dual_clip=3.0,
        kl_estimator="k3",
        kl_coef=0.1,
        entropy_coef=0.1,
        rejection=(
            RejectionRule("token", "k1", -1.0, 1.0),
            RejectionRule("seq_max", "k2", -1.0, 1.0),
            RejectionRule("seq_mean", "k3", -1.0, 1.0),
        ),
    ),
    "reinforce, IcePop": LossConfig(
        surrogate="reinforce", weight_level="token", weight_lower=0.5, weight_upper=2.0
    ),
    "gspo": LossConfig(surrogate="gspo", aggregation="seq_mean_token_mean"),
}
_INT64 = {"lag", "cu_seqlens"}
_FLOAT64 = {"slots", "sums", "maxima"}
_INTEGERS = {"num_tokens", "num_sequences", "first_row"}
_SCALARS = {"scale", "inv_weight_mean", "log_staleness_clip"}


def loss_builds() -> Iterator[KernelBuild]:
    """Every kernel of `is_loss` for each of `COMPILED_CONFIGS`."""
    for name, config in COMPILED_CONFIGS.items():
        two_pass = needs_sequences(config)
        spec = LossSpec(
            config=config,
            num_rules=len(config.rejection),
            two_pass=two_pass,
            has_correction=config.ratio_to == "old",
            has_reference=config.kl_estimator != "none",
            has_entropy=config.entropy_coef != 0.0,
            has_lag=True,
        )
        yield _build("tokens", name, token_pass_kernel, BLOCK, WARPS, spec)
        if two_pass:
            yield _build("sequence sums", name, sequence_pass_kernel, BLOCK, WARPS, spec)
        yield _build("sequences", name, sequence_kernel, SEQUENCE_BLOCK, 4, spec)


def _build(
    part: str, label: str, kernel: Any, block: int, warps: int, spec: LossSpec
) -> KernelBuild:
    constants = {
        "CHUNK": CHUNK,
        "BLOCK": block,
        "SLOT_WIDTH": NUM_SLOT_COLUMNS,
        "VALUE_WIDTH": NUM_SEQUENCE_VALUES,
        "ROW_WIDTH": ROW_WIDTH,
        "MAX_WIDTH": MAX_WIDTH,
        "LAG_OFFSET": LAG_OFFSET,
        "LAG_STRIDE": LAG_STRIDE,
        "NUM_LAGS": NUM_LAG_BINS,
        "SPEC": spec,
    }
    types = {name: _type(name) for name in kernel.arg_names if name not in constants}
    return KernelBuild(
        name=f"loss, {part} ({label})",
        kernel=kernel,
        types=types,
        constants={name: constants[name] for name in kernel.arg_names if name in constants},
        aligned=tuple(name for name, kind in types.items() if kind.startswith("*")),
        warps=warps,
        stages=3,
    )


def _type(name: str) -> str:
    if name in _INTEGERS:
        return "i32"
    if name in _SCALARS:
        return "fp32"
    if name in _INT64:
        return "*i64"
    return "*fp64" if name in _FLOAT64 else "*fp32"
