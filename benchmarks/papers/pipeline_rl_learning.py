"""PipelineRL (arXiv 2509.19128): learning with G updates a generation against in-flight updates.

    python -m benchmarks.papers.pipeline_rl_learning --model runs/quickstart/sft

The source: G of 8 and 16 and PipelineRL learn equally much per sample, G = 32 less, G = 64
diverges. All runs train on equally many trajectories in minibatches of equal size: with G updates a
generation is G times as large. Negative control: G = 1, which is on-policy.
"""

from __future__ import annotations

from benchmarks.papers.report import write
from benchmarks.papers.training import GROUP, NO_MEASURE, bench, training_parser, training_table

COLUMNS = ("generations", "accuracy before", "after", "reward, last quarter", "ESS")
UPDATES = (1, 8, 16, 32)


def main() -> None:
    parser = training_parser(__doc__, "pipeline_rl_learning", steps=64)
    parser.set_defaults(groups=4)
    options = parser.parse_args()
    algorithm = {"recipe": "pipeline_rl"}
    runs = {}
    with bench(options.model, options) as train:
        for g in UPDATES:
            schedule = {
                "preset": "sync",
                "updates_per_batch": g,
                "groups_per_batch": options.groups * g,
                "concurrency": options.groups * g * GROUP,
            }
            size = {"steps": options.steps // g, "schedule": schedule, "algorithm": algorithm}
            runs[f"conventional, G = {g}"] = train(f"g{g}", size)
        for kv in ("keep", "recompute"):
            in_flight = {"schedule": {"preset": "pipeline", "kv": kv}, "algorithm": algorithm}
            runs[f"in flight, KV cache: {kv}"] = train(f"pipeline-{kv}", in_flight)
    write(
        options,
        "PipelineRL: learning per sample",
        [
            "Source (arXiv 2509.19128v1, section 5): reward by samples is the same for G = 8, G = "
            "16 and PipelineRL, G = 32 is slower and unstable, G = 64 diverges; PipelineRL's "
            "largest lag is above that of every G, its effective sample size like that of G = 8. "
            "The lag column counts from the start of a batch: within one, minibatch i of G is i "
            "updates older still.",
            training_table("run", runs, *COLUMNS, "lag mean / max"),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
