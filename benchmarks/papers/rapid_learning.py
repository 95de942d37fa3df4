"""RAPID (arXiv 2510.03515): H updates on one inference batch: staleness, clipping, length, time.

    python -m benchmarks.papers.rapid_learning --model runs/quickstart/sft

For each H: mean staleness (log of the clipped whole-generation weight), share of clipped
generations, response length, seconds per update and accuracy, and the rank correlations of all
pairs of them (of five runs, chance reaches 0.9 in size in one pair of twelve). Every run makes
equally many updates of equal size. Negative control: H = 1, where every generation is on-policy:
nothing clipped, staleness 0.
"""

from __future__ import annotations

from benchmarks.papers.correlation import correlations
from benchmarks.papers.report import table, write
from benchmarks.papers.training import NO_MEASURE, Training, bench, training_parser

UPDATES = (1, 2, 4, 8, 16)
GROUPS_PER_UPDATE = 8
GROUP = 4


def seconds_per_update(run: Training, updates: int) -> float:
    return run.mean("time/step") / updates


def main() -> None:
    parser = training_parser(__doc__, "rapid_learning", steps=48)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    with bench(options.model, options) as engine:
        done = []
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
            done.append((h, engine.train(f"h{h}", overrides)))
    columns = {
        "staleness": [run.mean("off_policy/staleness") for _, run in done],
        "clipped generations": [run.mean("off_policy/clipped_generations") for _, run in done],
        "response length": [run.mean("rollout/response_length_mean") for _, run in done],
        "s per update": [seconds_per_update(run, h) for h, run in done],
        "accuracy after, %": [run.after for _, run in done],
    }
    rows = [
        (h, *(f"{values[i]:.4g}" for values in columns.values())) for i, (h, _) in enumerate(done)
    ]
    write(
        options,
        "rapid_learning",
        "RAPID: H updates a generation, trained",
        [
            "Source (abstract of arXiv 2510.03515): 11–34 % less time at similar or better "
            "accuracy; no figures of staleness or clipping by H were found. H = 1 is "
            "the negative control: it must be on-policy.",
            table(("H", *columns), rows),
            correlations({"H": [float(h) for h, _ in done], **columns}),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
