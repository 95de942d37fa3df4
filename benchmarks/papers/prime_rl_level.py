"""PRIME-RL: simulates `max_async_level` k in {0, 1, 2, 4}.

    python -m benchmarks.papers.prime_rl_level

According to the source, rollouts of step n come from version max(0, n - k) or newer. With k = 1 and
equal times of both stages, neither side idles. k = 2 tolerates a slow weight broadcast. In the
simulation, 8 of 32 H100 GPUs train a 7B model and 24 generate. Negative control: if the trainer and
the weight update take no time and all lengths are equal, a larger k must gain nothing at equal
requests in flight.
"""

from __future__ import annotations

from benchmarks.papers.report import UNIFORM, parser, point, write
from benchmarks.reporting import table

CONFIG = "async-7b-32gpu"
LEVELS = (0, 1, 2, 4)
SLOW_BROADCAST = ("simulate.weight_update_seconds=30",)
FREE_TRAINER = (
    "simulate.trainer_seconds_per_token=1e-12",
    "simulate.trainer_seconds_per_update=0",
    "simulate.weight_update_seconds=0",
    "simulate.efficiency.batch_overhead_seconds=0",
    "schedule.concurrency=512",
)


def rows(*overrides: str) -> list[tuple[object, ...]]:
    """Simulate every k with these overrides; return a row for each k."""
    base = point(CONFIG, "schedule.max_async_level=0", *overrides).tokens_per_second
    out: list[tuple[object, ...]] = []
    for level in LEVELS:
        s = point(CONFIG, f"schedule.max_async_level={level}", *overrides)
        idle = (f"{s.engine_idle:.0%}", f"{s.trainer_idle:.0%}")
        speed = (f"{s.tokens_per_second:,.0f}", f"{s.tokens_per_second / base:.2f}")
        lag = f"{s.lag_mean:.2f} / {s.lag_max}"
        out.append((level, *speed, *idle, lag, f"{s.wasted:.1%}"))
    return out


def main() -> None:
    options = parser(__doc__, "prime_rl_level").parse_args()
    header = (
        "k | tokens/s | x k = 0 | engines idle | trainer idle | lag mean / max | dropped as stale"
    )
    write(
        options,
        "PRIME-RL: how far inference may run ahead, 7B, 32 GPUs (simulated)",
        [
            'Source (prime-rl\'s documentation, page "Async", of a version that still has '
            "`max_async_level`): with k = 1 and equal step times, neither side idles. With the "
            "default k = 2, a weight broadcast over the Internet overlaps with generation. The "
            "source has no numbers. A test has equal step times "
            "(`tests/simulate/test_async_level.py`: 0.2 % and 0.0 % idle).",
            "Stale groups are dropped (`on_stale: drop`, the preset's default):",
            table(header, rows()),
            "The update waits for long responses instead (`on_stale: wait`):",
            table(header, rows("schedule.on_stale=wait")),
            "A weight update of 30 s. In the simulation, engines are paused during the whole "
            "update. A broadcast during generation is not modeled, so no k can hide the update:",
            table(header, rows(*SLOW_BROADCAST)),
            "Negative control: trainer and weight update take no time, and all lengths are equal:",
            table(header, rows(*FREE_TRAINER, *UNIFORM)),
        ],
    )


if __name__ == "__main__":
    main()
