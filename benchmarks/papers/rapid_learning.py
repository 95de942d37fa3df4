"""RAPID (arXiv 2510.03515): trains with H updates on each inference batch.

    python -m benchmarks.papers.rapid_learning --model runs/quickstart/sft

For each H, the table has the mean staleness (log of the clipped weight of a whole generation), the
share of clipped generations, the response length, the seconds per update and the accuracy. Every
run makes the same number of updates of equal size. Negative control: with H = 1, every generation
is on-policy, so no weight is clipped and the staleness is 0.
"""

from __future__ import annotations

from benchmarks.papers.report import write
from benchmarks.papers.training import NO_MEASURE, bench, training_parser
from benchmarks.reporting import table

UPDATES = (1, 2, 4, 8, 16)
GROUPS_PER_UPDATE = 8
GROUP = 4
HEADER = "H | staleness | clipped generations | response length | s per update | accuracy after, %"


def main() -> None:
    parser = training_parser(__doc__, "rapid_learning", steps=48)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    rows = []
    with bench(options.model, options) as train:
        for h in UPDATES:
            groups = GROUPS_PER_UPDATE * h
            schedule = {
                "preset": "rapid",
                "updates_per_batch": h,
                "groups_per_batch": groups,
                "group_size": GROUP,
                "concurrency": min(groups * GROUP, 512),
            }
            overrides = {
                "steps": options.steps // h,
                "schedule": schedule,
                "algorithm": {"recipe": "rapid"},
                "optimizer": {"lr": options.lr},
            }
            run = train(f"h{h}", overrides)
            figures = (
                run.mean("off_policy/staleness"),
                run.mean("off_policy/clipped_generations"),
                run.mean("rollout/response_length_mean"),
                run.mean("time/step") / h,
                run.after,
            )
            rows.append([h, *(f"{value:.4g}" for value in figures)])
    write(
        options,
        "RAPID: H updates a generation, trained",
        [
            "Source (abstract of arXiv 2510.03515): 11–34 % less time at similar or better "
            "accuracy. No numbers for staleness or clipping at different H were found. H = 1 is "
            "the negative control: it must be on-policy.",
            table(HEADER, rows),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
