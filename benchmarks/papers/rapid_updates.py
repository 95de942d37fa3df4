"""RAPID (arXiv 2510.03515): H updates on one large inference batch, on the simulator.

    python -m benchmarks.papers.rapid_updates

Four GPUs generate and train in turn, as the authors' public training scripts have it
(configs/simulate/rapid-0.5b-4gpu.yaml): 256 responses an update on MATH, 32 on MBPP+ and MiniF2F;
three epochs, evaluated before and after each. The source reports 11 to 34 % less time than its RL
baselines, which generate anew for every update (H = 1): policy gradient without, GRPO with a
reference model's pass. (Earlier work of the same authors, arXiv 2505.17218, reports 83 % against a
standard GRPO loop.) Every sequence is computed at the length of the longest of its generated batch,
which is what limits the saving: a larger batch has a longer longest. The staleness of a minibatch
is its place in the batch: (H - 1) / 2 on average. Negative control: with a switch of phases and a
rollout that cost nothing, larger batches can save nothing.
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
    """One of the source's benchmarks: groups of 4 responses, prompts, the published saving."""

    name: str
    groups: int
    """Of one optimizer step."""
    evaluated: int
    """Groups that are evaluated together."""
    prompts: int
    test_prompts: int
    published: tuple[int, float]
    """H, and the time that is saved with it."""


MATH = Task("MATH", 64, 32, 12_000, 500, (4, 0.11))
MINIF2F = Task("MiniF2F", 8, 16, 244, 244, (8, 0.32))
MBPP = Task("MBPP+", 8, 16, 264, 114, (8, 0.34))


def simulated(groups: int, updates: int, passes: int, *overrides: str) -> Summary:
    """One batch of `updates` optimizer steps with so many passes without gradient."""
    size = (
        f"schedule.updates_per_batch={updates}",
        f"schedule.groups_per_batch={groups * updates}",
        f"simulate.extra_forward_passes={passes}",
    )
    return point(CONFIG, *size, *overrides)


def evaluations_seconds(task: Task, passes: int) -> float:
    """Before training and after each epoch: the test prompts generated and passed forward."""
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
    """Optimizer steps and minutes of a whole run; a last, smaller batch is dropped."""
    batches = EPOCHS * (task.prompts // (task.groups * updates))
    training = batches * simulated(task.groups, updates, passes).step_seconds
    return batches * updates, (training + evaluations_seconds(task, passes)) / 60


def run_saving(task: Task, updates: int, baseline_passes: int) -> float:
    """Share of the minutes of a whole run that H = `updates` saves."""
    return 1 - run_minutes(task, updates, 1)[1] / run_minutes(task, 1, baseline_passes)[1]


def saved(seconds: float, base: float) -> str:
    return f"{1 - seconds / base:.0%}"


def update_rows(groups: int, *overrides: str) -> list[tuple[object, ...]]:
    """Per optimizer step."""
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
    """Whole runs; the baselines first."""
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
            "than its baselines (its Tables 1 and 3, without their other three cells); 83 % "
            "against a standard GRPO loop in earlier work (abstract of arXiv 2505.17218). Clipped "
            "share and response length need a real training: `rapid_learning.py`.",
            "MATH, 256 responses an update:",
            table(header, update_rows(MATH.groups)),
            "MBPP+ and MiniF2F, 32 responses an update:",
            table(header, update_rows(MBPP.groups)),
            "Whole runs: three epochs and four evaluations, scoring not counted:",
            table(run_header, [row for task in (MATH, MINIF2F, MBPP) for row in run_rows(task)]),
            "What an assumption decides: MATH on other GPUs (H100), and packed instead of padded:",
            table(header, update_rows(MATH.groups, "simulate.gpu.name=H100")),
            table(header, update_rows(MATH.groups, "simulate.padding=packed")),
            "Negative control (MATH), rollout and switching that cost nothing:",
            table(header, update_rows(MATH.groups, *NO_ROLLOUT)),
        ],
    )


if __name__ == "__main__":
    main()
