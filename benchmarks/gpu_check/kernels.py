"""Checks of the kernels: tests against float64, and rates of the device, the kernels and others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import torch

from benchmarks.gpu_check.check import ROOT, CheckFailed, Figures, Stage

_TESTS = ("tests/kernels", "tests/algorithms/test_loss_backends.py")
_TEST_SECONDS = 210
# Limit on worker processes, because each has a CUDA context of about half a GiB.
_MAX_WORKERS = 8
_TAIL = 3000


def device_tests(_stage: Stage) -> Figures:
    """Run every test marked `gpu`, which compare the kernels with float64 and with the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-W", "ignore"]
    if importlib.util.find_spec("xdist") is not None:
        # With a cold cache, most of the time is spent in about 130 compilations of one core each.
        command += ["-n", str(min(_MAX_WORKERS, os.cpu_count() or 1))]
    done = subprocess.run(
        [*command, *_TESTS], cwd=ROOT, capture_output=True, text=True, timeout=_TEST_SECONDS
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    if done.returncode != 0:
        raise CheckFailed(f"{last}\n{(done.stdout + done.stderr)[-_TAIL:]}")
    return {"pytest": last}


def rates(_stage: Stage) -> Figures:
    """Measure the rates of this device for a matrix product and for a copy."""
    from benchmarks.kernels_gpu import measure_rates

    found = measure_rates()
    return {
        "bf16_product_tflops": round(found.matrix_flops / 1e12, 1),
        "copy_gb_per_s": round(found.copy_bytes / 1e9, 1),
        "gpu_memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
    }


def loss(_stage: Stage) -> Figures:
    """Time `is_loss` and its eager reference; report the share of the copy bandwidth."""
    from benchmarks.kernels_gpu import loss_rows, measure_rates

    return {"rows": loss_rows(measure_rates())}


def head(_stage: Stage) -> Figures:
    """Time only `token_logprob`, with mask 1 at all rows and at a quarter of the rows."""
    from benchmarks.kernels_gpu import head_rows, measure_rates

    return {"rows": head_rows(measure_rates())}


def peers(_stage: Stage) -> Figures:
    """Time the installed implementations of the head on equal inputs."""
    from benchmarks.kernels_gpu import measure_rates, peer_rows

    return {"rows": peer_rows(measure_rates())}
