"""PRIME-RL: trains with `max_async_level` k in {0, 1, 2, 4}.

    python -m benchmarks.papers.prime_rl_learning --model runs/quickstart/sft

According to the source, a small k does not reduce the reward. The table also shows the largest lag,
which must be at most k. Negative control: k = 0 is on-policy, so its lag must be 0.
"""

from __future__ import annotations

from benchmarks.papers.report import write
from benchmarks.papers.training import NO_MEASURE, bench, training_parser, training_table

LEVELS = (0, 1, 2, 4)
COLUMNS = ("accuracy before", "after", "reward, last quarter", "ESS", "mean lag", "largest lag")


def main() -> None:
    options = training_parser(__doc__, "prime_rl_learning", steps=20).parse_args()
    recipe = {"recipe": "prime_rl"}
    runs = {}
    with bench(options.model, options) as train:
        for k in LEVELS:
            schedule = {"preset": "async", "max_async_level": k}
            runs[str(k)] = train(f"k{k}", {"schedule": schedule, "algorithm": recipe})
    write(
        options,
        "PRIME-RL: learning under asynchrony",
        [
            "Source: Prime Intellect's announcement of INTELLECT-2 reports that its ablations "
            "reproduce DeepScaleR's results without degradation under asynchrony. A public summary "
            "reports this for two steps, and for up to four steps on some tasks. No numbers that "
            "compare k = 0 with other values were found. The largest lag must be at most k.",
            training_table("k", runs, *COLUMNS, "s/step"),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
