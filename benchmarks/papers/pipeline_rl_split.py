"""PipelineRL (arXiv 2509.19128): simulates 128 GPUs of which T train, with a bound on the lag.

    python -m benchmarks.papers.pipeline_rl_split

In the source's model, the throughput is the minimum of the generation rate and the training rate. T
is chosen to maximize this throughput, while the largest lag is at most g_max. For each T, this
program prints the rate of generation with a trainer that takes no time, the rate of training from
the trainer's cost model, and the rate of both together in the simulator. N' is the number of
requests in flight: from a list, the program chooses the N' with the highest throughput among those
whose largest lag is within the bound. Negative control: if the trainer takes no time, the smallest
T must be the best.
"""

from __future__ import annotations

from benchmarks.papers.report import CONFIGS, parser, point, write
from benchmarks.reporting import table
from megatron_async.config.load import load_simulation
from megatron_async.simulate.build import group_source, trainer_costs
from megatron_async.simulate.statistics import Summary

CONFIG = "pipeline-split-7b-128gpu"
GPUS = 128
TRAINERS = (32, 48, 64, 80, 96)
BOUNDS = (8, 12, 16)
CONCURRENCIES = (1024, 1536, 2048, 3072)
FREE_TRAINER = ("simulate.trainer_seconds_per_token=1e-12", "simulate.trainer_seconds_per_update=0")


def split(trainers: int) -> tuple[str, ...]:
    nodes = f"parallel.nodes={trainers // 8}"
    return (f"parallel.ranks={trainers}", nodes, f"engines.count={GPUS - trainers}")


def training_alone(trainers: int) -> float:
    """Return the response tokens per second of a trainer that never waits for batches."""
    config = load_simulation(CONFIGS / f"{CONFIG}.yaml", list(split(trainers)))
    source = group_source(config)
    groups = range(config.schedule.groups_per_batch)
    lengths = [length for number in groups for length in source.group(number)[0]]
    prompt = config.simulate.lengths.prompt_tokens
    costs = trainer_costs(config)
    seconds = costs.batch_seconds([n + prompt for n in lengths], 1) + costs.publish_seconds
    return sum(lengths) / seconds


def within(bound: int, trainers: int, *overrides: str) -> tuple[int, Summary] | None:
    """Return the fastest N' in `CONCURRENCIES` with a largest lag of at most `bound`, and its run.

    The result is None if no N' is within the bound.
    """
    found = [
        (n, point(CONFIG, *split(trainers), *overrides, f"schedule.concurrency={n}"))
        for n in CONCURRENCIES
    ]
    kept = [(n, s) for n, s in found if s.lag_max <= bound]
    return max(kept, key=lambda pair: pair[1].tokens_per_second, default=None)


def main() -> None:
    options = parser(__doc__, "pipeline_rl_split").parse_args()
    rows = []
    best: dict[int, int] = {}
    for bound in BOUNDS:
        speeds = {}
        for trainers in TRAINERS:
            found = within(bound, trainers)
            if found is None:
                rows.append((bound, trainers, "no N' is within the bound", *["–"] * 5))
                continue
            n, together = found
            concurrency = f"schedule.concurrency={n}"
            generation = point(CONFIG, *split(trainers), *FREE_TRAINER, concurrency)
            training = training_alone(trainers)
            smaller = min(generation.tokens_per_second, training)
            speeds[trainers] = together.tokens_per_second
            speed = [generation.tokens_per_second, training, together.tokens_per_second]
            cells = [f"{tokens:,.0f}" for tokens in speed]
            over = f"{together.tokens_per_second / smaller:.2f}"
            rows.append((bound, trainers, n, together.lag_max, *cells, over))
        best[bound] = max(speeds, key=lambda t: speeds[t]) if speeds else 0
    free = {
        t: point(CONFIG, *split(t), *FREE_TRAINER, "schedule.concurrency=3072").tokens_per_second
        for t in TRAINERS
    }
    fastest = max(free, key=lambda t: free[t])
    header = (
        "g_max | T | N' | largest lag | generation alone | training alone | together "
        "| over the smaller"
    )
    write(
        options,
        "PipelineRL: T training GPUs of 128 under a lag bound (simulated, tokens/s)",
        [
            "Source (arXiv 2509.19128v1, section 4 and appendix A.3): throughput = min(generation, "
            "training). T and the number of requests in flight are searched for the highest "
            "throughput with a largest lag of at most g_max.",
            table(header, rows),
            "Best T: " + ", ".join(f"{t} for g_max {b}" for b, t in best.items()) + ".",
            f"Negative control, a trainer that takes no time (N' = 3072): the best T is {fastest}, "
            f"and the smallest T in the list is {min(TRAINERS)}.",
        ],
    )


if __name__ == "__main__":
    main()
