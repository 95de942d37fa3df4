"""The closing table of a run, made from its metrics file and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import first_accuracy, read_metrics

_ESS = "off_policy/ess"  # raw, per token (docs/semantics.md section 4: "ESS" alone)


@dataclass(frozen=True)
class RunSummary:
    """Totals of one run. Shares are of trained sequences or tokens; times are seconds."""

    steps: int
    accuracy_first: float | None
    accuracy_last: float | None
    generated_tokens: int
    generation_tokens_per_second: float
    training_tokens_per_second: float
    resumed_share: float
    lag_mean: float
    lag_max: int
    ess: float | None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)


def summarise(directory: RunDirectory) -> RunSummary:
    """Read the surviving line of a run's metrics."""
    train = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in train)

    def weighted(name: str, weight: str = "train/trained_tokens") -> float:
        known = [line for line in train if name in line]
        weights = sum(line[weight] for line in known)
        return sum(line[name] * line[weight] for line in known) / weights if weights else 0.0

    generating = total("rollout/seconds")
    training = total("time/train")
    return RunSummary(
        steps=len(train),
        accuracy_first=first_accuracy(evaluations[0]) if evaluations else None,
        accuracy_last=first_accuracy(evaluations[-1]) if len(evaluations) > 1 else None,
        generated_tokens=int(total("rollout/tokens")),
        generation_tokens_per_second=total("rollout/tokens") / generating if generating else 0.0,
        training_tokens_per_second=total("train/tokens") / training if training else 0.0,
        resumed_share=weighted("rollout/resumed_share"),
        lag_mean=weighted("rollout/lag_mean"),
        lag_max=int(max((line["rollout/lag_max"] for line in train), default=0)),
        ess=weighted(_ESS) if any(_ESS in line for line in train) else None,
        seconds_by_phase={
            name.removeprefix("time/"): total(name)
            for name in ("time/wait_for_batch", "time/train", "time/publish", "time/checkpoint")
        },
    )


def closing_table(
    summary: RunSummary,
    directory: RunDirectory,
    *,
    before_sft: float | None = None,
    extra_phases: Sequence[tuple[str, float]] = (),
) -> Table:
    """Summarise the run in a table; `extra_phases` are (name, seconds) outside of RL."""
    table = Table(title=f"run {directory.path.name}", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")

    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{100 * value:.1f} %"

    if before_sft is not None:
        table.add_row("held-out accuracy before SFT", percent(before_sft))
        table.add_row("held-out accuracy after SFT", percent(summary.accuracy_first))
    else:
        table.add_row("held-out accuracy at the start", percent(summary.accuracy_first))
    table.add_row("held-out accuracy after RL", percent(summary.accuracy_last))
    table.add_row("RL steps", str(summary.steps))
    table.add_row("generated tokens", f"{summary.generated_tokens:,}")
    table.add_row("generation, tokens/s", f"{summary.generation_tokens_per_second:,.0f}")
    table.add_row("training, tokens/s", f"{summary.training_tokens_per_second:,.0f}")
    table.add_row("resumed trajectories", percent(summary.resumed_share))
    table.add_row("token lag, mean / largest", f"{summary.lag_mean:.2f} / {summary.lag_max}")
    table.add_row("ESS (raw, per token)", "-" if summary.ess is None else f"{summary.ess:.3f}")
    for name, seconds in (*extra_phases, *_phases(summary)):
        table.add_row(f"wall time, {name}", f"{seconds:,.1f} s")
    return table


def _phases(summary: RunSummary) -> list[tuple[str, float]]:
    names = {
        "wait_for_batch": "RL: waiting for rollouts",
        "train": "RL: training",
        "publish": "RL: weight updates",
        "checkpoint": "RL: checkpoints",
    }
    return [(names[key], seconds) for key, seconds in summary.seconds_by_phase.items()]


def where_things_are(directory: RunDirectory, base: Path | None = None) -> str:
    """List the paths of TensorBoard logs, metrics and exported checkpoint, as far as they exist."""
    base = base or Path.cwd()
    places = (
        ("TensorBoard  tensorboard --logdir {}", directory.tensorboard),
        ("metrics      {}", directory.metrics_file),
        ("checkpoint   {} (Hugging Face format)", directory.hf_export),
    )
    return "\n".join(
        line.format(path.relative_to(base) if path.is_relative_to(base) else path)
        for line, path in places
        if path.exists()
    )
