"""Frontier: simulated throughput against lag, for all presets and for single settings of schedules.

    python -m benchmarks.papers.frontier [--seeds N] [--lengths FILE]

The three settings are PipelineRL's 128 GPUs, CoPRIS's 16 GPUs, and episodes with slow tools on 32
GPUs. A curve is one schedule. Its points differ in N' (requests in flight) or, under a staleness
bound, in k (`schedule.max_async_level`). Levers are curves that change settings of a preset.

- Placement: `sync`, `rapid` and `copris` share all GPUs between trainer and engines. All other
  curves need separate GPUs and have one split in each setting: the published split of PipelineRL,
  and for the other two settings the best one of a few splits under `pipeline`.
- Lag is counted in optimizer steps. With H = `updates_per_batch`, minibatch j of a batch is trained
  by weights that are j steps newer than the version with the batch's number. So a lag L in policy
  versions is H * L + (H - 1) / 2 on average, and H - 1 more than H * L at most.
- Ratios compare curves at an equal mean lag. Each curve is interpolated linearly between its points
  and never extrapolated.
- "short pause" and "TP 2" are not schedules. They show how much a weight update that pauses all
  engines for 0.1 s, or engines of two GPUs, would change. `pipeline` could use them as well as any
  other preset that has separate GPUs.
- With equal lengths, every response (in episodes, every turn) has the median length.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.papers.report import CONFIGS, UNIFORM, write
from benchmarks.papers.report import parser as parser_of
from benchmarks.pictures import colors_of, plain, save
from benchmarks.reporting import Row, commit, make_missing, piece_options, read, spread, table
from megatron_async.config.load import load_simulation
from megatron_async.config.simulate import SimulationConfig
from megatron_async.simulate.build import simulate


@dataclass(frozen=True)
class Setting:
    """Model, GPUs and task of a comparison. Settings are separated by spaces.

    Attributes:
        title: Title of the panel.
        config: Name of the file in configs/simulate/.
        common: Settings of all curves.
        shared: Settings of curves whose trainer and engines share all GPUs.
        split: Settings of curves with separate GPUs.
        tensor: Settings of `split` with engines of two GPUs.
        concurrencies: Values of N' of the presets; those of the levers are the middle three.
    """

    title: str
    config: str
    common: str
    shared: str
    split: str
    tensor: str
    concurrencies: tuple[int, ...]


SETTINGS = {
    "pipeline-128": Setting(
        "7B, 128 H100 (PipelineRL): 80 train",
        "pipeline-7b-128gpu",
        "",
        "parallel.ranks=128 parallel.nodes=16 engines.count=128 simulate.placement=colocated",
        "",
        "engines.count=24 engines.tensor=2 engines.max_running_requests=128",
        (256, 512, 768, 1024, 1536),
    ),
    "copris-16": Setting(
        "7B, 16 A100 (CoPRIS): 12 train",
        "copris-7b-16gpu",
        "",
        "",
        "parallel.ranks=12 engines.count=4 simulate.placement=disaggregated simulate.offload=false",
        "engines.count=2 engines.tensor=2",
        (128, 256, 384, 512, 1024),
    ),
    "episodes-32": Setting(
        "7B, 32 H100, slow tools: 16 train",
        "async-7b-32gpu",
        "schedule.groups_per_batch=32 sampling.max_new_tokens=2048 simulate.lengths.median=500 "
        "simulate.episode.turns=4 simulate.episode.tool_seconds=8 simulate.episode.tool_sigma=1 "
        "simulate.episode.observation_tokens=300",
        "parallel.ranks=32 parallel.nodes=4 engines.count=32 simulate.placement=colocated "
        "simulate.offload=true",
        "parallel.ranks=16 parallel.nodes=2 engines.count=16",
        "engines.count=8 engines.tensor=2",
        (64, 96, 128, 192, 256),
    ),
}
STEPS = "simulate.steps=18 simulate.warmup_steps=10 "
BASELINES = ("copris", "pipeline")
PRESETS = ("sync", "rapid", *BASELINES, "async")
UPDATES = (2, 4)
LEVELS = (1, 2, 4)
LAGS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_PIPELINE = "schedule.preset=pipeline "
_CONTINUE = "schedule.preset=pipeline schedule.overlap=false "
_ASYNC = "schedule.preset=async schedule.kv=keep schedule.on_stale="
LEVERS = {
    "pipeline, one waiting batch": _PIPELINE + "schedule.max_waiting_batches=1",
    "pipeline, kv recompute": _PIPELINE + "schedule.kv=recompute",
    "pipeline, background": _PIPELINE + "simulate.background_publication=true",
    "pipeline, short pause": _PIPELINE + "simulate.weight_update_seconds=0.1",
    "pipeline, TP 2": _PIPELINE,
    "continue": _CONTINUE,
    "continue, k = 1": _CONTINUE + "schedule.max_async_level=1 schedule.on_stale=wait",
    "pause": _CONTINUE + "schedule.boundary=pause",
    "async, wait": _ASYNC + "wait",
    "async, mask": _ASYNC + "mask",
}
"""Curves that change settings of a preset. `continue` never ends a request and starts none between
a batch and the update that it causes (`boundary: continue` without overlap)."""
CURVES = (*PRESETS, *LEVERS)
_SHARES = ("trainer_idle", "engine_idle", "recomputed", "wasted")
KEPT = (*_SHARES, "lag_in_queue", "step_seconds", "rollout_seconds", "train_seconds")


def points(setting: Setting, curve: str) -> dict[str, str]:
    """Return the settings of each point of a curve, by the name of the point."""
    shared = f"{STEPS}{setting.common} {setting.shared} schedule.preset={curve} "
    everything = shared + "schedule.group_size=8 schedule.concurrency=65536 "
    counts = setting.concurrencies
    if curve == "sync":
        return {"": everything}
    if curve == "rapid":
        groups = configured(setting, setting.common).schedule.groups_per_batch
        brief = "simulate.steps=3 simulate.warmup_steps=1"
        size = "schedule.updates_per_batch={} schedule.groups_per_batch={} " + brief
        return {f"H = {h}": everything + size.format(h, groups * h) for h in UPDATES}
    if curve == "copris":
        return {f"N' = {n}": f"{shared} schedule.concurrency={n}" for n in counts}
    split = f"{STEPS}{setting.common} {setting.split} "
    if curve.endswith("TP 2"):
        split += setting.tensor + " "
    split += LEVERS.get(curve, f"schedule.preset={curve}") + " schedule."
    if curve.startswith("async"):
        split += f"concurrency={counts[2]} schedule.max_async_level="
        return {f"k = {k}": f"{split}{k}" for k in LEVELS}
    chosen = counts if curve == "pipeline" else counts[1:4]
    return {f"N' = {n}": f"{split}concurrency={n}" for n in chosen}


def configured(setting: Setting, overrides: str) -> SimulationConfig:
    """Return the file of `setting` with overrides that are separated by spaces."""
    return load_simulation(CONFIGS / f"{setting.config}.yaml", overrides.split())


def pieces(seeds: int, lengths: str) -> list[Row]:
    """Return the key of each simulation: all curves with one seed before the next seed.

    With equal lengths there are only the presets and `continue`, with one seed.
    """
    panels = [(lengths, seed) for seed in range(seeds)]
    panels.insert(1, ("equal", 0))
    return [
        {"lengths": kind, "seed": seed, "setting": name, "curve": curve, "point": point}
        for kind, seed in panels
        for name, setting in SETTINGS.items()
        for curve in CURVES
        if kind != "equal" or curve in (*PRESETS, "continue")
        for point in points(setting, curve)
    ]


def measure(key: Row, lengths: Path | None) -> Row:
    """Simulate one point; return its throughput, lags and shares of time."""
    setting = SETTINGS[key["setting"]]
    overrides = f"{points(setting, key['curve'])[key['point']]} seed={key['seed']} "
    if key["lengths"] == "equal":
        overrides += " ".join(UNIFORM)
    elif lengths is not None:
        overrides += f"simulate.lengths.distribution=file simulate.lengths.path={lengths}"
    config = configured(setting, overrides)
    s, updates = simulate(config), config.schedule.updates_per_batch
    return {
        "tokens_per_second": round(s.tokens_per_second, 1),
        "lag_mean": round(updates * s.lag_mean + (updates - 1) / 2, 4),
        "lag_max": updates * s.lag_max + updates - 1,
        **{name: round(getattr(s, name), 4) for name in KEPT},
        "commit": commit(),
    }


def at_lag(curve: Sequence[Row], lag: float) -> float | None:
    """Return the throughput at a mean lag, interpolated linearly; None outside of the points."""
    rows = sorted(curve, key=lambda row: row["lag_mean"])
    if not rows or not rows[0]["lag_mean"] <= lag <= rows[-1]["lag_mean"]:
        return None
    lags, speeds = [row["lag_mean"] for row in rows], [row["tokens_per_second"] for row in rows]
    return float(np.interp(lag, lags, speeds))


def ratios(rows: Sequence[Row], curve: str, over: str, lag: float) -> str:
    """Return the ratio of the throughputs of `curve` and `over` at a mean lag, as the median over
    the seeds that have both."""
    found = []
    for seed in {row["seed"] for row in rows}:
        of = [[r for r in rows if (r["seed"], r["curve"]) == (seed, c)] for c in (curve, over)]
        own, other = (at_lag(curve_rows, lag) for curve_rows in of)
        if own is not None and other is not None:
            found.append(own / other)
    return f"{statistics.median(found):.2f}" if found else "–"


def report(rows: Sequence[Row], lengths: str) -> Iterator[str]:
    """Yield the parts of the result's page: for each setting and kind of lengths, all points and
    the ratios at equal mean lag."""
    for kind in (lengths, "equal"):
        for name, setting in SETTINGS.items():
            own = [row for row in rows if (row["lengths"], row["setting"]) == (kind, name)]
            yield f"## {setting.title}, {kind} lengths"
            cells: list[tuple[object, ...]] = []
            for curve in CURVES:
                found = [[ratios(own, curve, base, lag) for base in BASELINES] for lag in LAGS]
                cells.append((curve, *map(" / ".join, found)))
            yield "Throughput over `copris` / over `pipeline` at a mean lag, medians over seeds:"
            yield table("curve | " + " | ".join(map(str, LAGS)), cells)
            by_point = defaultdict(list)
            for row in own:
                by_point[row["curve"], row["point"]].append(row)
            cells = []
            for point, of in by_point.items():
                speed = spread([row["tokens_per_second"] for row in of], 0)
                lag = (spread([row["lag_mean"] for row in of]), max(row["lag_max"] for row in of))
                shares = [f"{statistics.median(row[n] for row in of):.0%}" for n in _SHARES]
                cells.append((*point, speed, *lag, *shares))
            header = "curve | point | tokens/s | mean lag | largest lag | trainer idle"
            yield table(f"{header} | engines idle | recomputed | wasted", cells)


def draw(rows: Sequence[Row], lengths: str, dark: bool) -> None:
    """Draw throughput against mean and largest lag, with bands from the smallest to the largest
    value over seeds, and against mean lag with equal lengths."""
    ink, paper = colors_of(dark)
    heights = {"height_ratios": (1, 1, 1, 0.2)}
    figure, axes = plt.subplots(4, len(SETTINGS), figsize=(11, 12), gridspec_kw=heights)
    for ax in axes[3]:
        ax.set_axis_off()
    panels = ((lengths, "mean"), (lengths, "max"), ("equal", "mean"))
    for (kind, lag), line in zip(panels, axes, strict=False):
        for (name, setting), ax in zip(SETTINGS.items(), line, strict=True):
            own = [row for row in rows if (row["lengths"], row["setting"]) == (kind, name)]
            for number, curve in enumerate(CURVES):
                of_curve: dict[str, list[tuple[float, float]]] = defaultdict(list)
                for row in own:
                    if row["curve"] == curve:
                        place = (row[f"lag_{lag}"], row["tokens_per_second"] / 1000)
                        of_curve[row["point"]].append(place)
                means = [np.mean(of, axis=0) for of in of_curve.values()]
                bands = [(min(y for _, y in of), max(y for _, y in of)) for of in of_curve.values()]
                line_of = sorted((*mean, *band) for mean, band in zip(means, bands, strict=True))
                x, y, low, high = np.reshape(line_of, (-1, 4)).T
                style = "o-" if curve in PRESETS else "o--"
                color = plt.get_cmap("tab20")(number)
                ax.plot(x, y, style, ms=3, lw=1.3, color=color, label=curve)
                ax.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
            ax.set_title(f"{setting.title}\n{kind} lengths", loc="left", color=ink, fontsize=8)
            ax.set_xlabel(f"{lag} lag in optimizer steps", color=ink, fontsize=8)
            ax.set_ylabel("thousand trained tokens/s", color=ink, fontsize=8)
            ax.set(xlim=(0, None), ylim=(0, None))
            plain(ax, ink, paper)
    named = axes[0][0].get_legend_handles_labels()
    legend = axes[3][1].legend(*named, ncols=5, loc="center", frameon=False, labelcolor=ink)
    legend.set_in_layout(False)  # It is wider than its column.
    save(figure, "frontier", dark, paper)


def main() -> None:
    parser = parser_of(__doc__, "frontier")
    piece_options(parser, "papers/frontier")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--lengths", type=Path, help="file of recorded lengths to use")
    options = parser.parse_args()
    lengths = "long-tailed" if options.lengths is None else options.lengths.stem
    wanted = pieces(options.seeds, lengths)
    make_missing(wanted, read(options.rows), options, lambda key: measure(key, options.lengths))
    rows = read(options.rows)
    for dark in (False, True):
        draw(rows, lengths, dark)
    write(options, "Frontier: throughput against lag (simulated)", list(report(rows, lengths)))


if __name__ == "__main__":
    main()
