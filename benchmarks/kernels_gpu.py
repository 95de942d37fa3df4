"""Times the kernels and other implementations on one CUDA device.

Invariants
- Shares are relative to rates that the same run measures: the rate of an 8192³ bf16 matrix product
  of random data, and the rate of a device-to-device copy, which counts reads and writes.
- A forward pass counts as one matrix product of 2·R·V·D operations, where R is the number of rows
  with mask 1. Forward and backward together count as four products.
- Every implementation of the head gets the same hidden states, weight and targets. It returns a
  scalar to differentiate: the sum of negative log-probs of the tokens with mask 1, divided by the
  number of all tokens.
- If an implementation is not installed, or its logits do not fit, its row contains the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from megatron_async_kernels import (
    Denominators,
    LossConfig,
    LossInputs,
    describe_backend,
    is_loss,
    policy_loss,
    token_logprob,
)
from torch import Tensor

from benchmarks.reporting import Row, table

MIB = 2**20
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Full logits in bf16, their float32 log-softmax and both gradients must fit in addition to the
# inputs.
EAGER_BYTES_PER_LOGIT = 14


@dataclass(frozen=True)
class HeadShape:
    """Shape of one head: the rows of this rank's vocabulary shard, and the hidden size."""

    name: str
    vocab: int
    hidden: int


HEADS = (
    HeadShape("Qwen2.5-7B", 152_064, 3584),
    HeadShape("Llama-70B", 128_256, 8192),
    HeadShape("Llama-70B, TP8 shard", 16_032, 8192),
)
TOKENS = (4096, 16_384)
SHARES = (1.0, 0.25)


@dataclass(frozen=True)
class Rates:
    """Measured rates of this device.

    Attributes:
        matrix_flops: Operations per second of a matrix product.
        copy_bytes: Bytes per second of a copy, reads and writes together.
    """

    matrix_flops: float
    copy_bytes: float


def milliseconds(function: Callable[[], object], *, repeats: int = 5, warmup: int = 2) -> float:
    """Return the median time of `repeats` calls, measured with CUDA events."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure_rates() -> Rates:
    """Measure the rates to which shares are relative."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right, repeats=11, warmup=5)
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), repeats=11, warmup=3)
    return Rates(2 * 8192**3 / product_ms * 1e3, 2 * 2**30 / copy_ms * 1e3)


# ------------------------------------------------------------ the head


def ours(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the loss, computed with this project's kernels."""
    logprobs_T = token_logprob(hidden_TD, weight_VD, targets_T, token_mask=mask_T)
    assert isinstance(logprobs_T, Tensor)
    return -logprobs_T.sum() / targets_T.shape[0]


def eager(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the loss, computed from full logits in the inputs' dtype; the mask is applied last."""
    logits_TV = hidden_TD @ weight_VD.t()
    losses_T = torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none")
    return (losses_T * mask_T).sum() / targets_T.shape[0]


def implementations(tokens: int, vocab: int) -> Mapping[str, LossFunction | str]:
    """Return each implementation by name, or the reason why it cannot run."""
    found: dict[str, LossFunction | str] = {"megatron_async": ours}
    if EAGER_BYTES_PER_LOGIT * tokens * vocab < 0.8 * torch.cuda.mem_get_info()[0]:
        found |= {"torch eager": eager, "torch.compile": torch.compile(eager)}
    else:
        found |= dict.fromkeys(("torch eager", "torch.compile"), "full logits do not fit")
    found["liger-kernel"] = found["cut-cross-entropy"] = "not installed"
    if importlib.util.find_spec("liger_kernel") is not None:
        found["liger-kernel"] = _liger()
    if importlib.util.find_spec("cut_cross_entropy") is not None:
        found["cut-cross-entropy"] = _cut_cross_entropy()
    return found


def _liger() -> LossFunction:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=-100, reduction="sum")

    def run(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
        labels_T = torch.where(mask_T != 0, targets_T, -100)
        return loss(weight_VD, hidden_TD, labels_T) / targets_T.shape[0]

    return run


def _cut_cross_entropy() -> LossFunction:
    from cut_cross_entropy import linear_cross_entropy

    def run(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
        labels_T = torch.where(mask_T != 0, targets_T, -100)
        total = linear_cross_entropy(hidden_TD, weight_VD, labels_T, reduction="sum")
        return total / targets_T.shape[0]

    return run


def time_head(run: LossFunction, shape: HeadShape, tokens: int, share: float, rates: Rates) -> Row:
    """Time one implementation on random data in which `share` of the rows have mask 1.

    Returns:
        Median times, shares of the measured matrix rate, and the peak memory in addition to inputs
        and gradients.
    """
    generator = torch.Generator(device="cuda").manual_seed(1)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden_TD = torch.randn(tokens, shape.hidden, **options).requires_grad_()
    weight_VD = (torch.randn(shape.vocab, shape.hidden, **options) / 64).requires_grad_()
    targets_T = torch.randint(0, shape.vocab, (tokens,), generator=generator, device="cuda")
    mask_T = torch.rand(tokens, generator=generator, device="cuda") < share
    rows = int(mask_T.sum())

    def forward() -> Tensor:
        with torch.no_grad():
            return run(hidden_TD, weight_VD, targets_T, mask_T)

    def both() -> None:
        hidden_TD.grad = weight_VD.grad = None
        run(hidden_TD, weight_VD, targets_T, mask_T).backward()

    both()
    hidden_TD.grad = weight_VD.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    results = 2 * (hidden_TD.numel() + weight_VD.numel())
    extra_mib = (torch.cuda.max_memory_allocated() - before - results) / MIB
    forward_ms = milliseconds(forward, warmup=1)
    both_ms = milliseconds(both, warmup=1)
    product = 2.0 * rows * shape.vocab * shape.hidden
    forward_flops, both_flops = product / forward_ms * 1e3, 4 * product / both_ms * 1e3
    return {
        "forward_ms": forward_ms,
        "forward_tflops": forward_flops / 1e12,
        "forward_share": forward_flops / rates.matrix_flops,
        "both_ms": both_ms,
        "both_tflops": both_flops / 1e12,
        "both_share": both_flops / rates.matrix_flops,
        "extra_mib": extra_mib,
    }


def head_rows(rates: Rates) -> list[Row]:
    """Time `token_logprob` for every head, with mask 1 at all rows and at a quarter of the rows."""
    rows: list[Row] = []
    for tokens in TOKENS:
        for shape in HEADS:
            for share in SHARES:
                row: Row = {"head": shape.name, "tokens": tokens, "share": share}
                rows.append(row | time_head(ours, shape, tokens, share, rates))
                torch.cuda.empty_cache()
    return rows


def peer_rows(rates: Rates) -> list[Row]:
    """Time all implementations of the head on equal inputs, with the smallest number of tokens."""
    tokens, rows = TOKENS[0], list[Row]()
    for shape in HEADS:
        for name, run in implementations(tokens, shape.vocab).items():
            row: Row = {"head": shape.name, "tokens": tokens, "name": name}
            rows.append(row)
            if isinstance(run, str):
                row["left_out"] = run
                continue
            try:
                row |= time_head(run, shape, tokens, 1.0, rates)
            except RuntimeError as error:  # also out of memory, and errors of compilers
                row["left_out"] = f"{type(error).__name__}: {str(error)[:300]}"
            torch.cuda.empty_cache()
    return rows


# ------------------------------------------------------------ the loss


def loss_inputs(tokens: int, length: int = 2048) -> LossInputs:
    """Return float32 inputs of `tokens` tokens in sequences of `length`; a fifth has mask 0."""
    generator = torch.Generator(device="cuda").manual_seed(2)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, device="cuda")

    logprobs_T = -normal(1.0).abs()
    mask_T = (torch.rand(tokens, generator=generator, device="cuda") < 0.8).float()
    return LossInputs(
        logprobs_T=logprobs_T,
        rollout_logprobs_T=logprobs_T + normal(0.1),
        advantages_T=normal(1.0),
        mask_T=mask_T,
        cu_seqlens_S1=torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32),
        lag_T=torch.randint(0, 3, (tokens // length,), generator=generator, device="cuda")
        .to(torch.int32)
        .repeat_interleave(length),
    )


LOSSES = {
    "ppo_clip": LossConfig(),
    "reinforce, truncated": LossConfig(
        surrogate="reinforce", weight_level="token", weight_upper=5.0
    ),
    "gspo (two passes)": LossConfig(surrogate="gspo", aggregation="seq_mean_token_mean"),
}


def time_loss(name: str, millions: int, rates: Rates) -> Row:
    """Time `is_loss` of `LOSSES[name]` and its eager reference on `millions` · 2**20 tokens.

    The number of bytes assumes that each stream is read once and the gradient is written once.
    `eager_ms` is None if the reference runs out of memory.
    """
    inputs, config = loss_inputs(millions * 2**20), LOSSES[name]
    counts = Denominators(tokens=float(inputs.mask_T.sum()), sequences=512.0 * millions)
    kernel_ms = milliseconds(
        lambda: is_loss(inputs, config, counts, check=False), repeats=11, warmup=3
    )
    # Five streams of 4 bytes are read and one is written. A second pass reads three streams again.
    streams = 6 + (3 if "two passes" in name else 0)
    bytes_per_second = 4.0 * streams * millions * 2**20 / kernel_ms * 1e3
    eager_ms: float | None = None
    with suppress(torch.OutOfMemoryError):
        eager_ms = milliseconds(
            lambda: policy_loss(inputs, config, counts, check=False), repeats=3, warmup=1
        )
    return {
        "loss": name,
        "millions": millions,
        "kernel_ms": kernel_ms,
        "gb_per_s": bytes_per_second / 1e9,
        "copy_share": bytes_per_second / rates.copy_bytes,
        "eager_ms": eager_ms,
    }


def loss_rows(rates: Rates) -> list[Row]:
    """Time all losses at 1, 16 and 64 million tokens."""
    rows = []
    for name in LOSSES:
        for millions in (1, 16, 64):
            rows.append(time_loss(name, millions, rates))
            torch.cuda.empty_cache()
    return rows


def _table(rows: list[Row]) -> str:
    """Return a Markdown table with a column for each name that occurs in the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [f"{value:.4g}" if isinstance(value, float) else value for value in map(row.get, names)]
        for row in rows
    ]
    return table(" | ".join(names), cells)


def gpu_report() -> str:
    """Return the whole report as Markdown."""
    rates = measure_rates()
    parts = [
        f"{describe_backend()}, torch {torch.__version__}",
        f"Measured rates: bf16 product {rates.matrix_flops / 1e12:.0f} TFLOP/s, copy "
        f"{rates.copy_bytes / 1e9:.0f} GB/s.",
        "### `is_loss`",
        _table(loss_rows(rates)),
        "### `token_logprob`",
        _table(head_rows(rates)),
        "### The head by other implementations",
        _table(peer_rows(rates)),
    ]
    return "\n\n".join(parts)
