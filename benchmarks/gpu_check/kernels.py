"""The kernels' checks: tests against float64, rates beside the card's and other libraries'."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu_check.check import ROOT, CheckFailed, Findings, Goal, Stage

_TESTS = ("tests/kernels", "tests/algorithms/test_loss_backends.py")
_TEST_SECONDS = 210
_MOST_WORKERS = 8  # each one holds a CUDA context of about half a GiB
_TAIL = 3000
HEAD_FORWARD_GOAL, HEAD_BOTH_GOAL = 0.75, 0.65
LOSS_COPY_GOAL, LOSS_EAGER_GOAL = 0.75, 10.0


def device_tests(_stage: Stage) -> Findings:
    """Every test marked `gpu`: the kernels against float64 and the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-W", "ignore"]
    if importlib.util.find_spec("xdist") is not None:
        # With a cold cache the time goes to about 130 compilations, one core each.
        command += ["-n", str(min(_MOST_WORKERS, os.cpu_count() or 1))]
    done = subprocess.run(
        [*command, *_TESTS], cwd=ROOT, capture_output=True, text=True, timeout=_TEST_SECONDS
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    if done.returncode != 0:
        raise CheckFailed(f"{last}\n{(done.stdout + done.stderr)[-_TAIL:]}")
    return Findings({"pytest": last})


def rates(_stage: Stage) -> Findings:
    """What this card reaches in a matrix product and a copy."""
    from benchmarks.kernels_gpu import measure_rates

    found = measure_rates()
    return Findings(
        {
            "bf16_product_tflops": round(found.matrix_flops / 1e12, 1),
            "copy_gb_per_s": round(found.copy_bytes / 1e9, 1),
            "gpu_memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        }
    )


def loss(_stage: Stage) -> Findings:
    """`is_loss` against copy bandwidth and its eager reference."""
    from benchmarks.kernels_gpu import LOSSES, measure_rates, time_loss

    rate = measure_rates()
    rows: list[dict[str, Any]] = []
    for name in LOSSES:
        for millions in (1, 16, 64):
            rows.append(asdict(time_loss(name, millions, rate)))
            torch.cuda.empty_cache()
    large = [row["copy_share"] for row in rows if row["millions"] > 1]
    eager = [row["eager_ms"] / row["kernel_ms"] for row in rows if row["millions"] == 1]
    return Findings(
        {"rows": rows},
        (
            Goal(
                "is_loss: lowest share of copy bandwidth, 16M and 64M", min(large), LOSS_COPY_GOAL
            ),
            Goal("is_loss: lowest speed-up over eager at 1M", min(eager), LOSS_EAGER_GOAL),
        ),
    )


def head(_stage: Stage) -> Findings:
    """`token_logprob` alone, all rows and a quarter of them."""
    from benchmarks.kernels_gpu import HEADS, SHARES, measure_rates, time_head
    from benchmarks.kernels_peers import OURS

    rate = measure_rates()
    rows: list[dict[str, Any]] = []
    for tokens in (4096, 16_384):
        for shape in HEADS:
            for share in SHARES:
                timing = time_head(OURS, shape, tokens, share, rate)
                rows.append({"head": shape.name, "tokens": tokens, "share": share})
                rows[-1] |= asdict(timing)
                torch.cuda.empty_cache()
    full = [row for row in rows if row["share"] == 1.0 and row["tokens"] == 16_384]
    forward, both = (min(row[key] for row in full) for key in ("forward_share", "both_share"))
    return Findings(
        {"rows": rows},
        (
            Goal("head: lowest share of the matrix rate, forward", forward, HEAD_FORWARD_GOAL),
            Goal("head: the same, forward and backward", both, HEAD_BOTH_GOAL),
        ),
    )


def peers(_stage: Stage) -> Findings:
    """The other libraries on the same inputs, where they can be imported."""
    from benchmarks.kernels_gpu import HEADS, measure_rates, time_head
    from benchmarks.kernels_peers import peers as all_peers

    rate = measure_rates()
    tokens = 4096
    rows: list[dict[str, Any]] = []
    for shape in HEADS:
        for peer in all_peers(tokens, shape.vocab, torch.cuda.mem_get_info()[0]):
            row: dict[str, Any] = {"head": shape.name, "tokens": tokens, "name": peer.name}
            rows.append(row)
            if peer.run is None:
                row["left_out"] = peer.reason
                continue
            try:
                row |= asdict(time_head(peer, shape, tokens, 1.0, rate))
            except RuntimeError as error:  # out of memory and compilers' errors among them
                row["left_out"] = f"{type(error).__name__}: {str(error)[:300]}"
            torch.cuda.empty_cache()
    return Findings({"rows": rows})
