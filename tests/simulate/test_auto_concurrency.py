"""`concurrency: auto` in the simulator: at least 95 % of the best fixed N' of a sweep.

Both are measured over the same batches, after `WARM_UP`, trials included: auto begins with what the
KV cache should hold, two batches' worth at most, and has settled by then.
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
    # N' is bounded by the KV cache: a quarter of what the GPU would hold
    "copris, KV-bound": (
        "copris-7b-16gpu",
        ("simulate.kv_capacity_tokens=150000",),
        (256, 768, 1536),
    ),
    # the cache is large enough; what bounds N' is the prefill of resumed requests
    "copris, not KV-bound": ("copris-7b-16gpu", (), (256, 1024, 2048)),
    # the trainer bounds the throughput once N' is large enough
    "pipeline": ("pipeline-split-7b-128gpu", (), (1024, 3072, 6144)),
}


def point(name: str, *overrides: str) -> Summary:
    steps = (f"simulate.steps={STEPS}", f"simulate.warmup_steps={WARM_UP}")
    return simulate(load_simulation(CONFIGS / f"{name}.yaml", [*steps, *overrides]))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_auto_reaches_95_percent_of_the_best_fixed_concurrency(workload: str) -> None:
    name, overrides, sweep = WORKLOADS[workload]
    speed = {
        n: point(name, *overrides, f"schedule.concurrency={n}").tokens_per_second for n in sweep
    }
    best = max(speed.values())
    assert min(speed.values()) < NEEDED * best, "any N' would do: the sweep shows nothing"
    found = point(name, *overrides, "schedule.concurrency=auto")
    assert found.tokens_per_second >= NEEDED * best, (found.concurrency, speed)
