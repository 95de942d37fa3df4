"""PRIME-RL: learning with `max_async_level` k in {0, 1, 2, 4}.

    python -m benchmarks.papers.prime_rl_learning --model runs/quickstart/sft

The source: asynchrony of a few levels does not hurt the reward. Also printed: that the bound held.
Negative control: k = 0 is on-policy; its lag must be 0.
"""

from __future__ import annotations

from benchmarks.papers.report import table, write
from benchmarks.papers.training import NO_MEASURE, bench, training_parser

LEVELS = (0, 1, 2, 4)


def main() -> None:
    options = training_parser(__doc__, "prime_rl_learning", steps=20).parse_args()
    with bench(options.model, options) as engine:
        done = [
            engine.train(
                f"k{k}",
                {
                    "schedule": {"preset": "async", "max_async_level": k},
                    "algorithm": {"recipe": "prime_rl"},
                },
            )
            for k in LEVELS
        ]
    rows = [
        (
            k,
            f"{run.before:.1f} %",
            f"{run.after:.1f} %",
            f"{run.final_reward:.3f}",
            f"{run.mean('off_policy/ess'):.3f}",
            f"{run.mean('rollout/lag_mean'):.2f}",
            f"{run.largest('rollout/lag_max'):.0f}",
            f"{run.mean('time/step'):.2f}",
        )
        for k, run in zip(LEVELS, done, strict=True)
    ]
    header = (
        "k",
        "accuracy before",
        "after",
        "reward, last quarter",
        "ESS",
        "mean lag",
        "largest lag (must be <= k)",
        "s/step",
    )
    write(
        options,
        "prime_rl_learning",
        "PRIME-RL: learning under asynchrony",
        [
            "Source: Prime Intellect's announcement of INTELLECT-2 reports that its ablations "
            "reproduce DeepScaleR's results without degradation under asynchrony; a public summary "
            "reports it for two steps, and for up to four on some tasks. No figures for k = 0 "
            "beside others were found.",
            table(header, rows),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
