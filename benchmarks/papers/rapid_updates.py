"""RAPID (arXiv 2510.03515): H updates on one large inference batch, on the simulator.

    python -m benchmarks.papers.rapid_updates

Four GPUs generate and train in turn; H = N_inference / N_step with N_step of 32 generations. The
source reports 11 to 34 % less time than the RL baselines of its comparison; how many updates those
make on one inference batch is not known to us, so savings are printed against 1, 2 and 4. (Earlier
work of the same authors, arXiv 2505.17218, reports 83 % for large inference batches together with
gradient filtering, against a standard GRPO loop.) The staleness of a minibatch is its place in the
batch: (H - 1) / 2 on average. Negative control: with a switch between the phases and a rollout that
cost nothing, larger batches can save nothing.
"""

from __future__ import annotations

from benchmarks.papers.report import parser, point, table, write

CONFIG = "rapid-1.5b-4gpu"
UPDATES = (1, 2, 4, 8, 16)
BASES = (1, 2, 4)
GROUPS_PER_UPDATE = 8
PADDED = ("simulate.padded_microbatch_sequences=4",)
NO_ROLLOUT = (
    "simulate.lengths.distribution=constant",
    "simulate.lengths.median=1",
    "simulate.weight_update_seconds=0",
    "simulate.offload=false",
    "simulate.efficiency.batch_overhead_seconds=0",
    "simulate.efficiency.decode_overhead_seconds=0",
)


def rows(*overrides: str) -> list[tuple[object, ...]]:
    out: list[tuple[object, ...]] = []
    taken: dict[int, float] = {}
    for updates in UPDATES:
        size = (
            f"schedule.updates_per_batch={updates}",
            f"schedule.groups_per_batch={GROUPS_PER_UPDATE * updates}",
        )
        s = point(CONFIG, *size, *overrides)
        seconds = s.step_seconds / updates
        taken[updates] = seconds
        saved = [f"{1 - seconds / taken[base]:.0%}" if base in taken else "–" for base in BASES]
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
        *(f"saved against H = {base}" for base in BASES),
    )
    write(
        options,
        "rapid_updates",
        "RAPID: H updates a generation, 1.5B, four GPUs (simulated)",
        [
            "Source: 11–34 % less time than its baselines, with H between 4 and 16; 83 % for large "
            "inference batches with gradient filtering against a standard GRPO loop in earlier "
            "work (arXiv 2505.17218). Clipped share and response length need a real training: "
            "`rapid_learning.py`.",
            "Packed sequences (this trainer):",
            table(header, rows()),
            "Microbatches of four sequences padded to the longest (a plain training loop):",
            table(header, rows(*PADDED)),
            "Negative control, rollout and switching that cost nothing:",
            table(header, rows(*NO_ROLLOUT)),
        ],
    )


if __name__ == "__main__":
    main()
