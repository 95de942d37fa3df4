"""Tests that `concurrency: auto` reaches at least 95 % of the throughput of the best fixed N' of a
sweep.

Both are measured over the same batches, after `WARM_UP`, including auto's trials. Auto starts with
the number of requests that the KV cache should fit, but two batches at most, and has settled by
then.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.config.load import load_simulation
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

CONFIGS = Path(__file__).parents[2] / "configs" / "simulate"
WARM_UP = 15
STEPS = 45
NEEDED = 0.95

WORKLOADS = {
    # N' is limited by the KV cache, which has a quarter of the GPU's real capacity.
    "copris, KV-bound": (
        "copris-7b-16gpu",
        ("simulate.kv_capacity_tokens=150000",),
        (256, 768, 1536),
    ),
    # The cache is large enough; the prefill of resumed requests limits N'.
    "copris, not KV-bound": ("copris-7b-16gpu", (), (256, 1024, 2048)),
    # The trainer limits the throughput once N' is large enough.
    "pipeline": ("pipeline-split-7b-128gpu", (), (1024, 3072, 6144)),
}


def point(name: str, *overrides: str) -> Summary:
    steps = (f"simulate.steps={STEPS}", f"simulate.warmup_steps={WARM_UP}")
    return simulate(load_simulation(CONFIGS / f"{name}.yaml", [*steps, *overrides]))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_auto_concurrency_reaches_95_percent_of_best_fixed_value(workload: str) -> None:
    name, overrides, sweep = WORKLOADS[workload]
    speed = {
        n: point(name, *overrides, f"schedule.concurrency={n}").tokens_per_second for n in sweep
    }
    best = max(speed.values())
    assert min(speed.values()) < NEEDED * best, (
        "every N' is good enough, so the sweep tests nothing"
    )
    found = point(name, *overrides, "schedule.concurrency=auto")
    assert found.tokens_per_second >= NEEDED * best, (found.concurrency, speed)
