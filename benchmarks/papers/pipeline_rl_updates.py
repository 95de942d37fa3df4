"""PipelineRL (arXiv 2509.19128): simulates it and the conventional loop with G updates per batch.

    python -m benchmarks.papers.pipeline_rl_updates

The simulation has 128 H100 GPUs and a 7B model. The conventional loop generates G batches with all
GPUs, and then makes G optimizer steps with all GPUs. With a larger G, GPUs are better used, but the
trained data are older: the largest lag within a generation is G - 1.

The source (section 5 of v1) reports about 2 times the samples per second of the conventional loop
with G = 32. Its appendix A.4, which models only matrix multiplications, reports up to 1.57 times at
equal largest lag. This program also simulates that case study, with the source's own hardware
model. Negative control: with equal lengths, the conventional loop does not wait for long responses,
so the advantage of PipelineRL must be smaller.
"""

from __future__ import annotations

from benchmarks.papers.report import CONFIGS, UNIFORM, parser, point, write
from benchmarks.reporting import table

UPDATES = (1, 8, 16, 32)
CONCURRENCIES = (1024, 2048, 3072)
BATCH_GROUPS = 128
CASE_ENGINE = f"simulate.cost_model={CONFIGS / 'engines' / 'matmul-h100-7b.yaml'}"
FLASH = 2 * 7.07e9 / 989e12
"""Seconds of the source's unit of time, the flash: one token's forward pass at the peak rate."""


def conventional(updates: int, *overrides: str) -> float:
    """Return the trained tokens per second of the conventional loop with G = `updates`."""
    size = (
        f"schedule.groups_per_batch={BATCH_GROUPS * updates}",
        f"schedule.updates_per_batch={updates}",
        "simulate.steps=3",
        "simulate.warmup_steps=1",
    )
    return point("conventional-7b-128gpu", *size, *overrides).tokens_per_second


def main() -> None:
    options = parser(__doc__, "pipeline_rl_updates").parse_args()
    pipelines = {n: point("pipeline-7b-128gpu", f"schedule.concurrency={n}") for n in CONCURRENCIES}
    fastest = max(s.tokens_per_second for s in pipelines.values())
    rows = []
    for updates in UPDATES:
        speed = conventional(updates)
        equal = [s.tokens_per_second for s in pipelines.values() if s.lag_max <= updates - 1]
        at_equal_lag = f"{max(equal) / speed:.2f}" if equal else "none so fresh"
        rows.append((updates, updates - 1, f"{speed:,.0f}", f"{fastest / speed:.2f}", at_equal_lag))
    ours = [
        (n, f"{s.tokens_per_second:,.0f}", f"{s.lag_mean:.2f} / {s.lag_max}", f"{s.gpu_idle:.0%}")
        for n, s in pipelines.items()
    ]
    case = {
        name: point(f"{name}-case-study-128gpu", CASE_ENGINE)
        for name in ("pipeline", "conventional")
    }
    flashes = {name: s.tokens_per_second * FLASH for name, s in case.items()}
    uniform = point("pipeline-7b-128gpu", "schedule.concurrency=3072", *UNIFORM).tokens_per_second
    tailed = pipelines[3072].tokens_per_second
    control = [
        (g, f"{uniform / conventional(g, *UNIFORM):.2f}", f"{tailed / conventional(g):.2f}")
        for g in UPDATES[:2]
    ]
    write(
        options,
        "PipelineRL: G updates a generation, 7B, 128 GPUs (simulated)",
        [
            "Source (arXiv 2509.19128v1, section 5 and appendix A.4): about 2 x the samples per "
            "second of the conventional loop with G = 32, which is the largest G that trained "
            "stably. Therefore the same reward is reached about 2 x faster. According to the "
            "source's analysis, the factor is up to 1.57 x at equal largest lag.",
            table("N' of pipeline | tokens/s | lag mean / max | GPUs idle", ours),
            table(
                "G | largest lag | conventional, tokens/s | fastest pipeline over it "
                "| at equal largest lag",
                rows,
            ),
            "The source's case study with its own hardware model. Rates are in tokens per flash, "
            "and a flash is the time of one token's forward pass at the peak rate. The source "
            "reports 16.9 and 10.7, and a ratio of 1.57:",
            table(
                "pipeline | lag mean / max | conventional (lag 133) | ratio",
                [
                    (
                        f"{flashes['pipeline']:.1f}",
                        f"{case['pipeline'].lag_mean:.0f} / {case['pipeline'].lag_max}",
                        f"{flashes['conventional']:.1f}",
                        f"{flashes['pipeline'] / flashes['conventional']:.2f}",
                    )
                ],
            ),
            "Negative control with equal lengths: throughput of PipelineRL at N' = 3072, divided "
            "by that of the conventional loop:",
            table("G | equal lengths | long-tailed", control),
        ],
    )


if __name__ == "__main__":
    main()
