"""PipelineRL (arXiv 2509.19128): against the conventional loop with G updates a generation.

    python -m benchmarks.papers.pipeline_rl_updates

128 H100, a 7B model, simulated. The conventional loop generates G batches with all GPUs and then
makes G optimizer steps with all of them: a larger G uses the GPUs better and trains on older data
(the largest lag within a generation is G - 1). The source reports about 2 x, and up to 1.57 x at
equal maximum lag. Negative control: with equal lengths the conventional loop has no tail to wait
for, so the advantage must be smaller.
"""

from __future__ import annotations

from benchmarks.papers.report import UNIFORM, parser, point, table, write

UPDATES = (1, 8, 16, 32)
CONCURRENCIES = (512, 1024, 2048, 3072)
BATCH_GROUPS = 128


def conventional(updates: int, *overrides: str) -> float:
    """Trained tokens a second."""
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
    uniform = point("pipeline-7b-128gpu", "schedule.concurrency=3072", *UNIFORM).tokens_per_second
    tailed = pipelines[3072].tokens_per_second
    control = [
        (g, f"{uniform / conventional(g, *UNIFORM):.2f}", f"{tailed / conventional(g):.2f}")
        for g in UPDATES[:2]
    ]
    write(
        options,
        "pipeline_rl_updates",
        "PipelineRL: G updates a generation, 7B, 128 GPUs (simulated)",
        [
            "Source: about 2 x the conventional loop in wall time to the same reward (with G 8 to "
            "32); up to 1.57 x throughput at equal maximum lag. Here: throughput alone.",
            table(("N' of pipeline", "tokens/s", "lag mean / max", "GPUs idle"), ours),
            table(
                (
                    "G",
                    "largest lag",
                    "conventional, tokens/s",
                    "fastest pipeline over it",
                    "at equal largest lag",
                ),
                rows,
            ),
            "Negative control, all lengths equal (pipeline at N' = 3072 over the conventional "
            "loop):",
            table(("G", "equal lengths", "long-tailed"), control),
        ],
    )


if __name__ == "__main__":
    main()
