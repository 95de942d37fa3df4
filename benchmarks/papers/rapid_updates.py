"""RAPID (arXiv 2510.03515): simulates H updates on one large inference batch.

    python -m benchmarks.papers.rapid_updates

Four GPUs alternate between generation and training, as in the authors' public training scripts
(configs/simulate/rapid-0.5b-4gpu.yaml). An update has 256 responses on MATH, and 32 on MBPP+ and
MiniF2F. A run has three epochs, with an evaluation before the first epoch and after each epoch.

The source reports 11 to 34 % less time than its RL baselines, which generate a new batch for every
update (H = 1). The baseline GRPO has a forward pass of a reference model; the baseline policy
gradient does not. Earlier work of the same authors, arXiv 2505.17218, reports 83 % less time than a
standard GRPO loop.

Every sequence is padded to the length of the longest sequence in its generated batch. This limits
the saving, because the longest sequence of a larger batch is longer. The staleness of a minibatch
is its position in the batch, which is (H - 1) / 2 on average. Negative control: if rollouts and the
switch between generation and training cost no time, larger batches cannot save time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.papers.report import parser, point, write
from benchmarks.reporting import table
from megatron_async.simulate.statistics import Summary

CONFIG = "rapid-0.5b-4gpu"
UPDATES = (1, 2, 4, 8, 16)
EPOCHS = 3
NO_ROLLOUT = (
    "simulate.lengths.distribution=constant",
    "simulate.lengths.median=1",
    "simulate.reward.scorer_seconds=0",
    "simulate.weight_update_seconds=0",
    "simulate.efficiency.batch_overhead_seconds=0",
    "simulate.efficiency.decode_overhead_seconds=0",
)


@dataclass(frozen=True)
class Task:
    """A benchmark of the source, with groups of 4 responses: its sizes and the published saving."""

    name: str
    groups: int
    """Number of groups in one optimizer step."""
    evaluated: int
    """Number of groups that are evaluated together."""
    prompts: int
    test_prompts: int
    published: tuple[int, float]
    """H, and the share of time that is saved with this H."""


MATH = Task("MATH", 64, 32, 12_000, 500, (4, 0.11))
MINIF2F = Task("MiniF2F", 8, 16, 244, 244, (8, 0.32))
MBPP = Task("MBPP+", 8, 16, 264, 114, (8, 0.34))


def simulated(groups: int, updates: int, passes: int, *overrides: str) -> Summary:
    """Simulate batches of `updates` optimizer steps.

    `passes` is the number of additional forward passes without gradient.
    """
    size = (
        f"schedule.updates_per_batch={updates}",
        f"schedule.groups_per_batch={groups * updates}",
        f"simulate.extra_forward_passes={passes}",
    )
    return point(CONFIG, *size, *overrides)


def evaluations_seconds(task: Task, passes: int) -> float:
    """Return the seconds of all evaluations of a run, before training and after each epoch.

    An evaluation generates responses to the test prompts and runs `passes` forward passes.
    """
    no_training = (
        f"schedule.groups_per_batch={task.evaluated}",
        "simulate.training_flops_per_parameter=2",
        f"simulate.extra_forward_passes={passes}",
        "simulate.trainer_seconds_per_update=0",
        "simulate.weight_update_seconds=0",
    )
    batches = math.ceil(task.test_prompts / task.evaluated)
    return (EPOCHS + 1) * batches * point(CONFIG, *no_training).step_seconds


def run_minutes(task: Task, updates: int, passes: int) -> tuple[int, float]:
    """Return the optimizer steps and minutes of a whole run, without a last, incomplete batch."""
    batches = EPOCHS * (task.prompts // (task.groups * updates))
    training = batches * simulated(task.groups, updates, passes).step_seconds
    return batches * updates, (training + evaluations_seconds(task, passes)) / 60


def run_saving(task: Task, updates: int, baseline_passes: int) -> float:
    """Return the share of a whole run's minutes that H = `updates` saves."""
    return 1 - run_minutes(task, updates, 1)[1] / run_minutes(task, 1, baseline_passes)[1]


def saved(seconds: float, base: float) -> str:
    return f"{1 - seconds / base:.0%}"


def update_rows(groups: int, *overrides: str) -> list[tuple[object, ...]]:
    """Return a row for each H, with the seconds of one optimizer step."""
    bases = [simulated(groups, 1, passes, *overrides).step_seconds for passes in (0, 1)]
    out: list[tuple[object, ...]] = []
    for updates in UPDATES:
        s = simulated(groups, updates, 1, *overrides)
        seconds = s.step_seconds / updates
        out.append(
            (
                updates,
                f"{(updates - 1) / 2:g}",
                f"{seconds:.2f}",
                f"{s.rollout_seconds / updates:.2f}",
                f"{s.train_seconds / updates:.2f}",
                *(["–"] * 2 if updates == 1 else [saved(seconds, base) for base in bases]),
            )
        )
    return out


def run_rows(task: Task) -> list[tuple[object, ...]]:
    """Return rows with the minutes of whole runs: first the baselines, then each H."""
    bases = [run_minutes(task, 1, passes) for passes in (0, 1)]
    out: list[tuple[object, ...]] = [
        (task.name, name, steps, f"{minutes:.1f}", "–", "–", "")
        for name, (steps, minutes) in zip(("policy gradient", "GRPO"), bases, strict=True)
    ]
    for updates in UPDATES[2:]:
        steps, minutes = run_minutes(task, updates, 1)
        savings = [f"{run_saving(task, updates, passes):.0%}" for passes in (0, 1)]
        h, saving = task.published
        published = f"{saving:.0%}" if updates == h else ""
        out.append(
            (task.name, f"RAPID, H = {updates}", steps, f"{minutes:.1f}", *savings, published)
        )
    return out


def main() -> None:
    options = parser(__doc__, "rapid_updates").parse_args()
    saving = "saved against policy gradient | saved against GRPO"
    header = f"H | staleness (updates) | s per update | of it rollout | of it training | {saving}"
    run_header = f"benchmark | algorithm | updates | minutes | {saving} | published"
    write(
        options,
        "RAPID: H updates a generation, 0.5B, four GPUs (simulated)",
        [
            "Source: 11 % (MATH, H = 4), 32 % (MiniF2F, H = 8) and 34 % (MBPP+, H = 8) less time "
            "than its baselines (Tables 1 and 3; three other cells of the tables are left out). "
            "Earlier work reports 83 % less time than a standard GRPO loop (abstract of arXiv "
            "2505.17218). The share of clipped generations and the response length need real "
            "training: see `rapid_learning.py`.",
            "MATH, 256 responses per update:",
            table(header, update_rows(MATH.groups)),
            "MBPP+ and MiniF2F, 32 responses per update:",
            table(header, update_rows(MBPP.groups)),
            "Whole runs of three epochs and four evaluations, without the time for scoring:",
            table(run_header, [row for task in (MATH, MINIF2F, MBPP) for row in run_rows(task)]),
            "Effect of two assumptions: MATH on H100 GPUs, and with packing instead of padding:",
            table(header, update_rows(MATH.groups, "simulate.gpu.name=H100")),
            table(header, update_rows(MATH.groups, "simulate.padding=packed")),
            "Negative control (MATH): rollouts and the switch of phases cost no time:",
            table(header, update_rows(MATH.groups, *NO_ROLLOUT)),
        ],
    )


if __name__ == "__main__":
    main()
