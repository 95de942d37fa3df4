"""PipelineRL (arXiv 2509.19128): compares learning with in-flight updates and conventional loops.

    python -m benchmarks.papers.pipeline_rl_learning --model runs/quickstart/sft

The conventional loop generates one large batch and makes G optimizer steps on it. According to the
source, PipelineRL and the conventional loop with G = 8 and G = 16 learn equally well per sample,
G = 32 learns less, and G = 64 diverges. All runs train on the same number of trajectories, in
minibatches of equal size, so a batch of G updates is G times as large. Negative control: G = 1,
which is on-policy.
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
            "Source (arXiv 2509.19128v1, section 5): for G = 8, G = 16 and PipelineRL, the reward "
            "after the same number of samples is equal. G = 32 is slower and unstable, and G = 64 "
            "diverges. The largest lag of PipelineRL is larger than that of every G, and its "
            "effective sample size is like that of G = 8. The lag column counts from the start of "
            "a batch: for minibatch i of the G minibatches of a batch, add i updates.",
            training_table("run", runs, *COLUMNS, "lag mean / max"),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
