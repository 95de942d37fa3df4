"""PipelineRL (arXiv 2509.19128): learning with G updates a generation against in-flight updates.

    python -m benchmarks.papers.pipeline_rl_learning --model runs/quickstart/sft

The source: G of 8 and 16 and PipelineRL learn equally much per sample, G = 32 less, G = 64
diverges. All runs train on equally many trajectories in minibatches of equal size: with G updates a
generation is G times as large. Negative control: G = 1, which is on-policy.
"""

from __future__ import annotations

from benchmarks.papers.report import table, write
from benchmarks.papers.training import NO_MEASURE, bench, training_parser

UPDATES = (1, 8, 16, 32)


def main() -> None:
    parser = training_parser(__doc__, "pipeline_rl_learning", steps=64)
    parser.set_defaults(groups=4)
    options = parser.parse_args()
    algorithm = {"recipe": "pipeline_rl"}
    updates, groups = options.steps, options.groups
    with bench(options.model, options) as engine:
        done = []
        for g in UPDATES:
            schedule = {
                "preset": "sync",
                "updates_per_batch": g,
                "groups_per_batch": groups * g,
                "concurrency": groups * g * 8,
            }
            overrides = {"steps": updates // g, "schedule": schedule, "algorithm": algorithm}
            done.append((f"conventional, G = {g}", engine.train(f"g{g}", overrides)))
        for kv in ("keep", "recompute"):
            schedule = {"preset": "pipeline", "kv": kv}
            run = engine.train(f"pipeline-{kv}", {"schedule": schedule, "algorithm": algorithm})
            done.append((f"in flight, KV cache: {kv}", run))
    rows = [
        (
            name,
            len(run.lines),
            f"{run.before:.1f} %",
            f"{run.after:.1f} %",
            f"{run.final_reward:.3f}",
            f"{run.mean('off_policy/ess'):.3f}",
            f"{run.mean('rollout/lag_mean'):.2f} / {run.largest('rollout/lag_max'):.0f}",
        )
        for name, run in done
    ]
    header = (
        "run",
        "generations",
        "accuracy before",
        "after",
        "reward, last quarter",
        "ESS",
        "lag mean / max",
    )
    write(
        options,
        "pipeline_rl_learning",
        "PipelineRL: learning per sample",
        [
            "Source (arXiv 2509.19128v1, section 5): reward by samples is the same for G = 8, G = "
            "16 and PipelineRL, G = 32 is slower and unstable, G = 64 diverges; PipelineRL's "
            "largest lag is above that of every G, its effective sample size like that of G = 8. "
            "The lag column counts from the start of a batch: within one, minibatch i of G is i "
            "updates older still.",
            table(header, rows),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
