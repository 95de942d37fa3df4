"""RAPID (arXiv 2510.03515): H updates on one large inference batch, on the simulator.

    python -m benchmarks.papers.rapid_updates

Four GPUs generate and train in turn, as the authors' public training scripts have it
(configs/simulate/rapid-0.5b-4gpu.yaml): 256 responses an update on MATH, 32 on MBPP+ and MiniF2F.
The source reports 11 to 34 % less time than its RL baselines, which generate anew for every update
(H = 1): policy gradient without, GRPO with a reference model's pass. (Earlier work of the same
authors, arXiv 2505.17218, reports 83 % against a standard GRPO loop.) The staleness of a minibatch
is its place in the batch: (H - 1) / 2 on average. Negative control: with a switch of phases and a
rollout that cost nothing, larger batches can save nothing.
"""

from __future__ import annotations

from benchmarks.papers.report import parser, point, table, write
from megatron_async.simulate.statistics import Summary

CONFIG = "rapid-0.5b-4gpu"
UPDATES = (1, 2, 4, 8, 16)
MATH, CODE = 64, 8
"""Groups of 4 responses an update."""
SLOW = ("simulate.efficiency.training_flops=0.1",)
NO_ROLLOUT = (
    "simulate.lengths.distribution=constant",
    "simulate.lengths.median=1",
    "simulate.weight_update_seconds=0",
    "simulate.efficiency.batch_overhead_seconds=0",
    "simulate.efficiency.decode_overhead_seconds=0",
)


def rows(groups: int, *overrides: str) -> list[tuple[object, ...]]:
    def run(updates: int, passes: int) -> Summary:
        size = (
            f"schedule.updates_per_batch={updates}",
            f"schedule.groups_per_batch={groups * updates}",
            f"simulate.extra_forward_passes={passes}",
        )
        return point(CONFIG, *size, *overrides)

    out: list[tuple[object, ...]] = []
    baselines = [run(1, passes).step_seconds for passes in (0, 1)]
    for updates in UPDATES:
        s = run(updates, 1)
        seconds = s.step_seconds / updates
        saved = ["–"] * 2 if updates == 1 else [f"{1 - seconds / base:.0%}" for base in baselines]
        out.append(
            (
                updates,
                f"{(updates - 1) / 2:g}",
                f"{seconds:.2f}",
                f"{s.rollout_seconds / updates:.2f}",
                f"{s.train_seconds / updates:.2f}",
                *saved,
            )
        )
    return out


def main() -> None:
    options = parser(__doc__, "rapid_updates").parse_args()
    header = (
        "H",
        "staleness (updates)",
        "s per update",
        "of it rollout",
        "of it training",
        "saved against policy gradient",
        "saved against GRPO",
    )
    write(
        options,
        "rapid_updates",
        "RAPID: H updates a generation, 0.5B, four GPUs (simulated)",
        [
            "Source: 11 % (MATH), 32 % (MiniF2F) and 34 % (MBPP+) less time than its baselines "
            "(abstract and a public review; the range of H, 4 to 16, as the issue states it); 83 % "
            "against a standard GRPO loop in earlier work (abstract of arXiv 2505.17218). Clipped "
            "share and response length need a real training: `rapid_learning.py`.",
            "MATH, 256 responses an update; trainer at 35 % of the peak (the default):",
            table(header, rows(MATH)),
            "MBPP+ and MiniF2F, 32 responses an update; trainer at 35 % of the peak:",
            table(header, rows(CODE)),
            "What decides: MATH with a trainer at 10 % of the peak (assumed, not measured):",
            table(header, rows(MATH, *SLOW)),
            "Negative control (MATH), rollout and switching that cost nothing:",
            table(header, rows(MATH, *NO_ROLLOUT)),
        ],
    )


if __name__ == "__main__":
    main()
