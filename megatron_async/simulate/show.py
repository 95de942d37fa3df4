"""Prints and plots the results of simulated configurations, with advice on what to change."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.files.disk import writing
from megatron_async.simulate.statistics import Summary
from megatron_async.simulate.sweep import Point

_COLUMNS = ("tokens/s", "step s", "engine idle", "trainer idle", "lag")
_MORE_COLUMNS = (
    "rollout s",
    "train s",
    "rollout waits",
    "gpu idle",
    "slots busy",
    "lag in queue",
    "longest decile",
    "lag in samples",
    "off-policy",
    "recomputed",
    "wasted",
)


_MUCH_IDLE = 0.4
_FEW_SLOTS = 0.6
_MUCH_LOST = 0.15
_LONG_LAG = 4.0
_OVERLAP = "schedule.preset pipeline or async"
_NO_STRAGGLER = "schedule.preset copris, which does not wait for the longest response, or "
_MORE_REQUESTS = "a higher schedule.concurrency, or "
_KV = "simulate.kv_capacity_tokens"
_LESS_KV = f"lower schedule.concurrency, or raise {_KV}"
_FEWER_UPDATES = "raise schedule.groups_per_batch, or lower schedule.concurrency"
_DROPPED = {
    "stale": "raise schedule.max_async_level, or set schedule.on_stale wait",
    "overflow": "set schedule.overflow block, or lower schedule.concurrency",
    "filtered": "set schedule.dynamic_sampling false, or choose problems that are solved sometimes",
}


def label(point: Point) -> str:
    """Return a short label of a simulated configuration, which has its preset and the settings by
    which it differs from the other configurations."""
    parts = [text.removeprefix("schedule.") for text in point.labels]
    if not any(part.startswith("preset=") for part in parts):
        parts.insert(0, f"preset={point.config.schedule.preset}")
    return " ".join(part.removeprefix("preset=") for part in parts)


def cells(s: Summary) -> dict[str, str]:
    """Return the formatted results of one simulation, by the name of the table's column."""
    return {
        "tokens/s": f"{s.tokens_per_second:,.0f}",
        "step s": f"{s.step_seconds:.4g}",
        "rollout s": f"{s.rollout_seconds:.4g}",
        "train s": f"{s.train_seconds:.4g}",
        "engine idle": f"{s.engine_idle:.0%}",
        "trainer idle": f"{s.trainer_idle:.0%}",
        "rollout waits": f"{s.rollout_waits:.0%}",
        "gpu idle": f"{s.gpu_idle:.0%}",
        "slots busy": f"{s.slots_busy:.0%} of {s.concurrency}",
        "lag": f"{s.lag_mean:.2f} / {s.lag_max}",
        "lag in queue": f"{s.lag_in_queue:.2f}",
        "longest decile": f"{s.longest_decile:.2f}",
        "lag in samples": f"{s.lag_samples_mean:,.0f} / {s.lag_samples_max:,}",
        "off-policy": f"{s.off_policy:.0%}",
        "recomputed": f"{s.recomputed:.0%}",
        "wasted": f"{s.wasted:.0%}",
    }


def table(points: Sequence[Point], *, wide: bool = False) -> Table:
    """Return a table with one row for each simulated configuration, including its speed relative to
    the first one.

    Args:
        points: The simulated configurations.
        wide: Whether to include every column.
    """
    columns = _COLUMNS + _MORE_COLUMNS if wide else _COLUMNS
    out = Table(title="simulated: trained tokens/s; lag, mean / largest, in policy versions")
    out.add_column("schedule", overflow="fold")
    for name in columns:
        out.add_column(name, justify="right", no_wrap=wide)
    out.add_column("x first", justify="right", no_wrap=True)
    base = points[0].summary.tokens_per_second
    for point in points:
        ratio = point.summary.tokens_per_second / base if base else 0.0
        row = cells(point.summary)
        out.add_row(label(point), *(row[name] for name in columns), f"{ratio:.2f}")
    return out


def comments(point: Point) -> list[str]:
    """Return one line of advice for each problem in the results of a simulated configuration, with
    settings to try. The thresholds from which something counts as a problem are assumed."""
    return [f"{label(point)}: {text}" for text in _found(point.summary, point.config)]


def _found(s: Summary, config: SimulationConfig) -> Iterator[str]:
    schedule = config.schedule
    # On shared GPUs, engines and trainer work alternately, so each of them is idle by design.
    split = config.simulate.placement == "disaggregated"
    if split and s.engine_idle > _MUCH_IDLE and not schedule.overlap:
        yield (
            f"engines are idle {s.engine_idle:.0%} of the time, because they wait for the "
            f"trainer: try {_OVERLAP}"
        )
    elif split and s.engine_idle > _MUCH_IDLE and s.trainer_idle < _MUCH_IDLE:
        fewer = " and fewer engines.count" if config.engines.count > 1 else ""
        yield f"engines are idle {s.engine_idle:.0%} of the time: try more parallel.ranks{fewer}"
    if split and s.trainer_idle > _MUCH_IDLE:
        remedy = f"{'' if s.kv_full > _MUCH_IDLE else _MORE_REQUESTS}more engines.count"
        if not schedule.overlap:
            remedy = f"{_NO_STRAGGLER if schedule.boundary == 'drain' else ''}{_OVERLAP}"
        yield f"the trainer is idle {s.trainer_idle:.0%} of the time: try {remedy}"
    if s.slots_busy < _FEW_SLOTS and s.kv_full > _MUCH_IDLE:
        waits = f"requests wait for space in the KV cache {s.kv_full:.0%} of the time"
        yield f"{s.slots_busy:.0%} of {s.concurrency} slots are busy, and {waits}: {_LESS_KV}"
    if s.recomputed > _MUCH_LOST:
        _, remedy = max(
            (s.recomputed_at_resume, f"because responses are resumed: {_FEWER_UPDATES}"),
            (s.recomputed_at_preemption, f"because the KV cache is full: {_LESS_KV}"),
            (s.recomputed_at_update, "because of weight updates: set schedule.kv: keep"),
        )
        yield f"{s.recomputed:.0%} of the tokens are prefilled again, mostly {remedy}"
    if s.wasted > _MUCH_LOST:
        reason = max(s.dropped, key=s.dropped.__getitem__, default="stale")
        yield f"{s.wasted:.0%} of the tokens are dropped, mostly as {reason}: {_DROPPED[reason]}"
    if s.lag_mean > _LONG_LAG:
        remedy = "set or lower schedule.max_async_level, or lower schedule.concurrency"
        yield f"the mean lag is {s.lag_mean:.1f} policy versions: {remedy}"


def warnings(points: Sequence[Point]) -> list[str]:
    """Return one line for each warning of the scheduler, and one line with the dropped trajectories
    of each simulated configuration."""
    out = []
    for point in points:
        for name, message in point.summary.warnings.items():
            # The scheduler's warning names a setting of real runs that the simulator does not use.
            # It is replaced by the corresponding setting of the simulator.
            simulated = message.replace("engines.max_total_tokens", _KV)
            out.append(f"{label(point)}: {name}: {simulated}")
        if point.summary.dropped:
            out.append(f"{label(point)}: dropped trajectories {point.summary.dropped}")
    return out


def check_plot(path: Path | None) -> None:
    """Raise UserError if a plot is requested (`path` is not None) and the optional package
    matplotlib is not installed."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"--plot is {path}; drawing it requires matplotlib, which is not installed. Install "
            "megatron_async[plot], or matplotlib itself."
        )


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw throughput, idle shares, lag and recomputation of all simulated configurations as bar
    charts, and save them as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    summaries = [point.summary for point in points]
    quantities: list[tuple[str, str, list[tuple[str, list[float]]]]] = [
        ("trained tokens/s", "%.0f", [("", [s.tokens_per_second for s in summaries])]),
        (
            "idle, %",
            "%.0f",
            [
                ("engines", [100 * s.engine_idle for s in summaries]),
                ("trainer", [100 * s.trainer_idle for s in summaries]),
            ],
        ),
        ("mean lag, policy versions", "%.2f", [("", [s.lag_mean for s in summaries])]),
        ("prefilled again, % of tokens", "%.0f", [("", [100 * s.recomputed for s in summaries])]),
    ]
    size = (max(6.0, 1.1 * len(points)), 11.0)
    figure, axes = pyplot.subplots(len(quantities), 1, sharex=True, figsize=size)
    for axis, (unit, form, series) in zip(axes, quantities, strict=True):
        width = 0.8 / len(series)
        for index, (name, values) in enumerate(series):
            positions = [p + (index - (len(series) - 1) / 2) * width for p in range(len(points))]
            axis.bar_label(axis.bar(positions, values, width, label=name), fmt=form, fontsize=8)
        axis.set_ylabel(unit)
        axis.margins(y=0.2)
        if len(series) > 1:
            axis.legend()
    axes[-1].set_xticks(range(len(points)), [label(p) for p in points], rotation=45, ha="right")
    figure.suptitle("megatron-async simulate")
    figure.tight_layout()
    with writing(path):
        figure.savefig(path)
    pyplot.close(figure)
