"""CoPRIS (arXiv 2511.05589): measures drift over a long run, for several N' (requests in flight).

    python -m benchmarks.papers.copris_drift --model runs/quickstart/sft

According to the source, a larger N' increases drift: more tokens of each batch come from older
policies. The program prints lag, off-policy share, KL(rollout || policy), ESS and reward for each
quarter of the run. Negative control: the synchronous loop must not drift.
"""

from __future__ import annotations

import numpy as np

from benchmarks.papers.report import write
from benchmarks.papers.training import NO_MEASURE, Training, bench, training_parser
from benchmarks.reporting import table

CONCURRENCIES = (64, 128, 256, 512)
METRICS = {
    "mean lag": "rollout/lag_mean",
    "off-policy share": "rollout/off_policy_token_share",
    "KL": "off_policy/kl",
    "ESS": "off_policy/ess",
    "reward": "rollout/reward_mean",
}


def by_quarter(run: Training, metric: str) -> str:
    return " / ".join(f"{part.mean():.3g}" for part in np.array_split(run.series(metric), 4))


def main() -> None:
    options = training_parser(__doc__, "copris_drift", steps=60).parse_args()
    recipe = {"algorithm": {"recipe": "copris"}}
    with bench(options.model, options) as train:
        done = [train("sync", {**recipe, "schedule": {"preset": "sync"}})]
        for n in CONCURRENCIES:
            schedule = {"preset": "copris", "concurrency": n}
            done.append(train(f"copris-{n}", {**recipe, "schedule": schedule}))
    rows = []
    for run in done:
        quarters = [by_quarter(run, metric) for metric in METRICS.values()]
        columns = run.columns()
        rows.append([run.name, *quarters, columns["largest lag"], columns["after"]])
    write(
        options,
        "CoPRIS: drift over a long run",
        [
            "Source (arXiv 2511.05589): no published number for drift was found. The abstract only "
            "states that CoPRIS corrects for off-policy trajectories. A description of the paper "
            "says that a larger N' means more off-policy tokens, and that N' = 2048 drifts more "
            "than 1024. The table has values for each quarter of the run. `sync` is the negative "
            "control: its lag must be 0.",
            table(f"run | {' | '.join(METRICS)} | largest lag | accuracy", rows),
            NO_MEASURE,
        ],
    )


if __name__ == "__main__":
    main()
