"""Tables and plots of simulated points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from megatron_async.disk import writing
from megatron_async.simulate.sweep import Point

_COLUMNS = (
    "tokens/s",
    "step s",
    "rollout s",
    "train s",
    "engine idle",
    "trainer idle",
    "gpu idle",
    "slots busy",
    "lag",
    "in samples",
    "off-policy",
    "recomputed",
    "wasted",
)


def label(point: Point) -> str:
    """What tells a point from the others."""
    parts = [text.removeprefix("schedule.") for text in point.labels]
    if not any(part.startswith("preset=") for part in parts):
        parts.insert(0, f"preset={point.config.schedule.preset}")
    return " ".join(part.removeprefix("preset=") for part in parts)


def cells(point: Point) -> tuple[str, ...]:
    """The table's row."""
    s = point.summary
    return (
        f"{s.tokens_per_second:,.0f}",
        f"{s.step_seconds:.4g}",
        f"{s.rollout_seconds:.4g}",
        f"{s.train_seconds:.4g}",
        f"{s.engine_idle:.0%}",
        f"{s.trainer_idle:.0%}",
        f"{s.gpu_idle:.0%}",
        f"{s.slots_busy:.0%} of {s.concurrency}",
        f"{s.lag_mean:.2f} / {s.lag_max}",
        f"{s.lag_samples_mean:,.0f} / {s.lag_samples_max:,}",
        f"{s.off_policy:.0%}",
        f"{s.recomputed:.0%}",
        f"{s.wasted:.0%}",
    )


def table(points: Sequence[Point]) -> Table:
    """All points, with the speed relative to the first one."""
    out = Table(title="simulated; trained tokens a second, mean / max lag in versions and samples")
    out.add_column("schedule", no_wrap=True)
    for name in _COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("x first", justify="right", no_wrap=True)
    base = points[0].summary.tokens_per_second
    for point in points:
        ratio = point.summary.tokens_per_second / base if base else 0.0
        out.add_row(label(point), *cells(point), f"{ratio:.2f}")
    return out


def notes(points: Sequence[Point]) -> list[str]:
    """Warnings that the scheduler gave and what was dropped, by point."""
    out = []
    for point in points:
        for name, message in point.summary.warnings.items():
            out.append(f"{label(point)}: {name}: {message}")
        if point.summary.dropped:
            out.append(f"{label(point)}: dropped trajectories {point.summary.dropped}")
    return out


def plot(points: Sequence[Point], path: Path) -> None:
    """Throughput, idle shares and lag of all points, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [label(point) for point in points]
    places = range(len(points))
    summaries = [point.summary for point in points]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(max(6.0, 0.9 * len(points)), 9))
    axes[0].bar(places, [s.tokens_per_second for s in summaries], color="tab:blue")
    axes[0].set_ylabel("trained tokens / s")
    width = 0.4
    engine = [s.engine_idle for s in summaries]
    trainer = [s.trainer_idle for s in summaries]
    axes[1].bar([p - width / 2 for p in places], engine, width, label="engines")
    axes[1].bar([p + width / 2 for p in places], trainer, width, label="trainer")
    axes[1].set_ylabel("idle share")
    axes[1].legend()
    axes[2].bar(
        [p - width / 2 for p in places], [s.lag_mean for s in summaries], width, label="lag"
    )
    recomputed = [s.recomputed for s in summaries]
    axes[2].bar([p + width / 2 for p in places], recomputed, width, label="recomputed / generated")
    axes[2].set_ylabel("mean lag, recomputed share")
    axes[2].legend()
    axes[2].set_xticks(list(places), names, rotation=45, ha="right")
    figure.tight_layout()
    with writing(path):
        figure.savefig(path)
    pyplot.close(figure)
