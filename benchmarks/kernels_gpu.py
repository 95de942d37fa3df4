"""Checks and timings of the kernels on one CUDA device, in one call of under eight minutes.

Invariants
- Shares are of rates measured in the same run: the bf16 matrix rate of an 8192³ product of random
  data, and a device-to-device copy counting reads and writes.
- Forward counts one product (2·R·V·D operations, R taking-part rows), forward and backward four.
- A row that would start after the time limit is printed as skipped, never estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
    reference_token_logprob,
    token_logprob,
)
from torch import Tensor

from benchmarks.kernels_peers import Peer, peers

MIB = 2**20


@dataclass(frozen=True)
class HeadShape:
    """One head: rows of this rank's shard and the hidden size."""

    name: str
    vocab: int
    hidden: int


HEADS = (
    HeadShape("Qwen2.5-7B", 152_064, 3584),
    HeadShape("Llama-70B", 128_256, 8192),
    HeadShape("Llama-70B, TP8 shard", 16_032, 8192),
)
TOKENS = (4096, 16_384, 65_536)
SHARES = (1.0, 0.25)


@dataclass(frozen=True)
class Rates:
    """Measured in this run."""

    matrix_flops: float
    copy_bytes: float


class Clock:
    """Seconds left of the run's limit."""

    def __init__(self, limit_seconds: float) -> None:
        self.end = time.monotonic() + limit_seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def milliseconds(function: Callable[[], object], *, repeats: int = 5, warmup: int = 2) -> float:
    """Median of `repeats` timed by CUDA events."""
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
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right, repeats=11, warmup=5)
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), repeats=11, warmup=3)
    return Rates(2 * 8192**3 / product_ms * 1e3, 2 * 2**30 / copy_ms * 1e3)


def check_correctness() -> str:
    """Largest errors against float64 of log-probs, entropy and gradients, as a table."""
    lines = [
        "| type | T × V × D | log-prob | entropy | dHidden (relative) | dWeight (relative) |",
        "|---|---|---|---|---|---|",
    ]
    generator = torch.Generator(device="cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, vocab, hidden in ((1000, 5003, 512), (257, 30_011, 200)):
            hidden_TD = torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)
            weight_VD = torch.randn(vocab, hidden, generator=generator, device="cuda") / 16
            weight_VD = weight_VD.to(dtype)
            targets_T = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
            mask_T = torch.rand(tokens, generator=generator, device="cuda") < 0.7
            exact = [hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()]
            mine = [hidden_TD.requires_grad_(), weight_VD.requires_grad_()]
            actual = token_logprob(
                mine[0], mine[1], targets_T, token_mask=mask_T, return_entropy=True
            )
            expected = reference_token_logprob(exact[0], exact[1], targets_T, token_mask_T=mask_T)
            (actual[0].sum() + 0.1 * actual[1].sum()).backward()
            (expected[0].sum() + 0.1 * expected[1].sum()).backward()
            errors = [float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)]
            for ours, theirs in zip(mine, exact, strict=True):
                assert ours.grad is not None and theirs.grad is not None
                scale = float(theirs.grad.abs().max())
                errors.append(float((ours.grad - theirs.grad).abs().max()) / scale)
            cells = " | ".join(f"{error:.1e}" for error in errors)
            lines.append(f"| {dtype} | {tokens} × {vocab} × {hidden} | {cells} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class HeadTiming:
    """Medians, shares of the measured matrix rate, peak memory above inputs and gradients."""

    forward_ms: float
    forward_tflops: float
    forward_share: float
    both_ms: float
    both_tflops: float
    both_share: float
    extra_mib: float

    def cells(self) -> str:
        return " | ".join(
            [
                *(f"{self.forward_ms:.2f}", f"{self.forward_tflops:.0f}"),
                *(f"{100 * self.forward_share:.0f} %", f"{self.both_ms:.2f}"),
                *(f"{self.both_tflops:.0f}", f"{100 * self.both_share:.0f} %"),
                f"{self.extra_mib:.0f}",
            ]
        )


def time_head(peer: Peer, shape: HeadShape, tokens: int, share: float, rates: Rates) -> HeadTiming:
    """One implementation on random data; `share` of the rows take part."""
    assert peer.run is not None
    generator = torch.Generator(device="cuda").manual_seed(1)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden_TD = torch.randn(tokens, shape.hidden, **options).requires_grad_()
    weight_VD = (torch.randn(shape.vocab, shape.hidden, **options) / 64).requires_grad_()
    targets_T = torch.randint(0, shape.vocab, (tokens,), generator=generator, device="cuda")
    mask_T = torch.rand(tokens, generator=generator, device="cuda") < share
    rows = int(mask_T.sum())
    run = peer.run

    def forward() -> Tensor:
        with torch.no_grad():
            return run(hidden_TD, weight_VD, targets_T, mask_T)

    def both() -> None:
        hidden_TD.grad = weight_VD.grad = None
        run(hidden_TD, weight_VD, targets_T, mask_T).backward()

    repeats = 5 if tokens <= 16_384 else 3
    both()
    hidden_TD.grad = weight_VD.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    results = 2 * (hidden_TD.numel() + weight_VD.numel())
    extra_mib = (torch.cuda.max_memory_allocated() - before - results) / MIB
    forward_ms = milliseconds(forward, repeats=repeats, warmup=1)
    both_ms = milliseconds(both, repeats=repeats, warmup=1)
    product = 2.0 * rows * shape.vocab * shape.hidden
    forward_flops, both_flops = product / forward_ms * 1e3, 4 * product / both_ms * 1e3
    return HeadTiming(
        forward_ms=forward_ms,
        forward_tflops=forward_flops / 1e12,
        forward_share=forward_flops / rates.matrix_flops,
        both_ms=both_ms,
        both_tflops=both_flops / 1e12,
        both_share=both_flops / rates.matrix_flops,
        extra_mib=extra_mib,
    )


def head_table(rates: Rates, clock: Clock) -> str:
    """All heads, token counts, shares and peers; torch.compile only at the smallest token count."""
    lines = [
        "| head | T | share | implementation | forward ms | TFLOP/s | of matrix rate | "
        "forward+backward ms | TFLOP/s | of matrix rate | extra MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tokens in TOKENS:
        for shape in HEADS:
            for share in SHARES:
                free_bytes = torch.cuda.mem_get_info()[0]
                for peer in peers(tokens, shape.vocab, free_bytes):
                    if peer.name == "torch.compile" and tokens != TOKENS[0]:
                        continue
                    prefix = f"| {shape.name} | {tokens} | {share:.0%} | {peer.name} | "
                    if peer.run is None:
                        lines.append(f"{prefix}{peer.reason} |" + " |" * 6)
                        continue
                    if clock.left < 20:
                        lines.append(f"{prefix}skipped: time limit |" + " |" * 6)
                        continue
                    try:
                        timing = time_head(peer, shape, tokens, share, rates)
                        lines.append(f"{prefix}{timing.cells()} |")
                    except torch.OutOfMemoryError:
                        lines.append(f"{prefix}out of memory |" + " |" * 6)
                    torch.cuda.empty_cache()
    return "\n".join(lines)


def loss_inputs(tokens: int, length: int = 2048) -> LossInputs:
    """`tokens` tokens in sequences of `length`, float32, a fifth of them masked."""
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


@dataclass(frozen=True)
class LossTiming:
    """Medians; `eager_ms` is None where eager ran out of memory."""

    loss: str
    millions: int
    kernel_ms: float
    gb_per_s: float
    copy_share: float
    eager_ms: float | None


def time_loss(name: str, millions: int, rates: Rates) -> LossTiming:
    """`is_loss` of `LOSSES[name]`; bytes: each stream read once, the gradient written."""
    inputs, config = loss_inputs(millions * 2**20), LOSSES[name]
    counts = Denominators(tokens=float(inputs.mask_T.sum()), sequences=512.0 * millions)
    kernel_ms = milliseconds(
        lambda: is_loss(inputs, config, counts, check=False), repeats=11, warmup=3
    )
    # Five streams of 4 bytes read and one written; the second pass reads three again.
    streams = 6 + (3 if "two passes" in name else 0)
    bytes_per_second = 4.0 * streams * millions * 2**20 / kernel_ms * 1e3
    eager_ms: float | None = None
    with suppress(torch.OutOfMemoryError):
        eager_ms = milliseconds(
            lambda: policy_loss(inputs, config, counts, check=False), repeats=3, warmup=1
        )
    return LossTiming(
        loss=name,
        millions=millions,
        kernel_ms=kernel_ms,
        gb_per_s=bytes_per_second / 1e9,
        copy_share=bytes_per_second / rates.copy_bytes,
        eager_ms=eager_ms,
    )


def loss_table(rates: Rates, clock: Clock) -> str:
    """`is_loss` against its eager reference."""
    lines = [
        "| loss | tokens | kernel ms | GB/s | of copy rate | eager ms | eager / kernel |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in LOSSES:
        for millions in (1, 16, 64):
            if clock.left < 10:
                lines.append(f"| {name} | {millions}M | skipped: time limit | | | | |")
                continue
            found = time_loss(name, millions, rates)
            cells = [f"{found.kernel_ms:.3f}", f"{found.gb_per_s:.0f}"]
            cells.append(f"{100 * found.copy_share:.0f} %")
            if found.eager_ms is None:
                cells += ["out of memory", ""]
            else:
                cells += [f"{found.eager_ms:.2f}", f"{found.eager_ms / found.kernel_ms:.1f}"]
            lines.append(f"| {name} | {millions}M | " + " | ".join(cells) + " |")
            torch.cuda.empty_cache()
    return "\n".join(lines)


def gpu_report(limit_seconds: float) -> str:
    """The whole report as markdown."""
    clock = Clock(limit_seconds)
    rates = measure_rates()
    parts = [
        f"{describe_backend()}, torch {torch.__version__}",
        f"Measured rates: bf16 product {rates.matrix_flops / 1e12:.0f} TFLOP/s, copy "
        f"{rates.copy_bytes / 1e9:.0f} GB/s.",
        "### Errors against float64",
        check_correctness(),
        "### `is_loss`",
        loss_table(rates, clock),
        "### `token_logprob`",
        head_table(rates, clock),
    ]
    return "\n\n".join(parts)
