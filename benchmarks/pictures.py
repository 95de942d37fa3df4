"""Draws the pictures of README and documentation: `python -m benchmarks.pictures [RUN]`.

- Timelines of the five schedules. The simulator runs the product's scheduler on a virtual clock,
  with two engines of four slots each and the same response lengths for all schedules. The factors
  in the titles are throughputs relative to `sync`. Each throughput is the median of five seeds with
  180 updates each.
- Learning curves, from benchmarks/results/quickstart.jsonl and smollm2.jsonl. RUN is a run
  directory with the name `quickstart` or `smollm2`. If RUN is given, its file of metrics is first
  replaced by the metrics of this run.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_async.config.load import build_simulation
from megatron_async.config.simulate import SimulationConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.simulate.build import build_world
from megatron_async.simulate.world import World

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
RESULTS = Path(__file__).parent / "results"
# Name of the picture by the name of the run.
CURVES = {"quickstart": "learning", "smollm2": "smollm2"}
KEPT = ("kind", "step", "reward/mean", "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
PRESETS = {
    "sync": "sync: all wait for the longest response",
    "rapid": "rapid: one large batch, four updates",
    "copris": "copris: unfinished responses are kept and resumed",
    "pipeline": "pipeline: weights change under running requests",
    "async": "async: overlap with a bound on lag",
}
SECONDS = 60.0
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "parallel": {"ranks": 2},
    "engines": {"count": 2, "max_running_requests": 4},
    "sampling": {"max_new_tokens": 3000},
    "task": {"scorer_workers": 64},
    "simulate": {
        "model": "qwen2.5-7b",
        "gpu": {"name": "H100"},
        "gpus": 4,
        "placement": "disaggregated",
        "lengths": {"median": 450, "sigma": 0.9},
        "steps": 40,
    },
}


@dataclass
class Timeline:
    """Bars of a simulated run, in virtual seconds.

    Attributes:
        generated: For each span of generation: slot, start, end and policy version.
        trained: For each update: start and end.
    """

    generated: list[tuple[int, float, float, int]] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)


class Watch:
    """Recorder of the spans of time in which each request ran, with the policy version."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.timeline = Timeline()
        self._running: dict[int, tuple[int, float]] = {}
        self._free: dict[str, set[int]] = defaultdict(lambda: set(range(4)))
        self._engine: dict[int, str] = {}
        self._engines: dict[str, int] = {}
        self._version, self._training = 0, 0.0

    def step(self, scheduler: Scheduler, event: ev.Event) -> list[ev.Action]:
        """Record an event, pass it to the scheduler, and record the actions; return the actions."""
        now = self.world.now if self.world is not None else 0.0
        match event:
            case ev.Finished(trajectory_id=i):
                self._end(i, now)
            case ev.ManyAborted(requests=requests):
                for request in requests:
                    self._end(request[0], now)
            case ev.BatchTaken():
                self._training = now
            case ev.UpdateRequested():
                self.timeline.trained.append((self._training, now))
            case ev.WeightsPublished(version=version):
                for i, (slot, began) in list(self._running.items()):
                    self.timeline.generated.append((slot, began, now, self._version))
                    self._running[i] = (slot, now)
                self._version = version.number
        actions = scheduler.step(event)
        for action in actions:
            if isinstance(action, ev.Submit):
                slot = min(self._free[action.engine_id], default=0)
                self._free[action.engine_id].discard(slot)
                self._engine[action.trajectory_id] = action.engine_id
                row = slot + 4 * self._engines.setdefault(action.engine_id, len(self._engines))
                self._running[action.trajectory_id] = (row, now)
        return actions

    def _end(self, trajectory_id: int, now: float) -> None:
        row, began = self._running.pop(trajectory_id)
        self._free[self._engine[trajectory_id]].add(row % 4)
        self.timeline.generated.append((row, began, now, self._version))


def settings_of(preset: str, seed: int) -> SimulationConfig:
    """Return the settings of a simulation with batches of 4 groups of 2 (`rapid`: 8 groups)."""
    schedule: dict[str, Any] = {"preset": preset, "groups_per_batch": 4, "group_size": 2}
    if preset != "sync" and preset != "rapid":
        schedule["concurrency"] = 8
    if preset == "rapid":
        schedule |= {"groups_per_batch": 8, "updates_per_batch": 4}
    return build_simulation({**SETTINGS, "seed": seed, "schedule": schedule})


def trained_per_second(preset: str) -> float:
    """Return the trained tokens per second after a warm-up, as the median of five seeds."""
    found = []
    for seed in range(5):
        world = build_world(settings_of(preset, seed))
        world.run(200)
        summary = world.statistics.summary(20, engine_gpus=2, trainer_gpus=2, shared=False)
        found.append(summary.tokens_per_second)
    return statistics.median(found)


def timeline(preset: str) -> Timeline:
    """Simulate a schedule for more than a minute of virtual time; return its timeline."""
    watch = Watch()
    watch.world = build_world(settings_of(preset, SETTINGS["seed"]), watch)  # type: ignore[arg-type]
    watch.world.run(SETTINGS["simulate"]["steps"])
    return watch.timeline


def keep_curve(run: Path) -> None:
    """Write the metrics of `run` that its learning curve needs, to benchmarks/results/."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rows = [
        {name: line[name] for name in KEPT if name in line}
        for line in lines
        if line["kind"] in ("train", "eval")
    ]
    (RESULTS / f"{run.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_curve(run: str, dark: bool) -> None:
    """Draw the mean reward of every batch, and held-out accuracies with 95 % intervals."""
    ink, paper = colors_of(dark)
    rows = [json.loads(line) for line in (RESULTS / f"{run}.jsonl").open()]
    train = [row for row in rows if row["kind"] == "train"]
    held_out = [row for row in rows if row["kind"] == "eval" and "eval/accuracy" in row]
    figure, ax = plt.subplots(figsize=(7, 3.2))
    ax.plot([r["step"] for r in train], [r["reward/mean"] for r in train], color="#4c9be8")
    heights = [r["eval/accuracy"] for r in held_out]
    lows = [r["eval/accuracy"] - r["eval/accuracy_low"] for r in held_out]
    highs = [r["eval/accuracy_high"] - r["eval/accuracy"] for r in held_out]
    steps = [r["step"] for r in held_out]
    ax.errorbar(steps, heights, [lows, highs], fmt="o", color="#d9822b", capsize=3)
    for row in held_out:
        above = (row["step"], row["eval/accuracy_high"])
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": ink}
        ax.annotate(f"{row['eval/accuracy']:.1%}", above, (0, 4), **style)
    ax.set_title(
        "orange: held-out accuracy, the likeliest answer\n"
        "blue: mean reward of a batch, lower because its answers are drawn at temperature 1",
        loc="left", color=ink, fontsize=9,
    )  # fmt: skip
    ax.set_xlabel("update", color=ink)
    ax.set_ylim(0.0, 1.08)
    ax.set_xlim(-2, max(steps) + 2)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(ax, ink, paper)
    save(figure, CURVES[run], dark, paper)


def colors_of(dark: bool) -> tuple[str, str]:
    """Set the fonts of pictures; return the colors of ink and paper."""
    mpl.rcParams.update({"svg.hashsalt": "megatron_async", "svg.fonttype": "none"})
    mpl.rcParams.update({"font.family": "sans-serif", "font.size": 9})
    return ("#d7dae0", "#0d1117") if dark else ("#24292f", "#ffffff")


def plain(ax: Axes, ink: str, paper: str) -> None:
    """Give axes the colors `ink` and `paper`, horizontal grid lines and no frame."""
    ax.set_facecolor(paper)
    ax.tick_params(colors=ink, length=0)
    ax.grid(axis="y", color=ink, alpha=0.15)
    for side in ax.spines.values():
        side.set_visible(False)


def save(figure: Figure, name: str, dark: bool, paper: str) -> None:
    """Write `figure` to docs/pictures/NAME-dark.svg or NAME-light.svg, on the color `paper`."""
    figure.patch.set_facecolor(paper)
    figure.tight_layout()
    FOLDER.mkdir(exist_ok=True)
    target = FOLDER / f"{name}-{'dark' if dark else 'light'}.svg"
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def draw(timelines: dict[str, Timeline], speeds: dict[str, float], dark: bool) -> None:
    """Draw the timelines of all schedules, one above the other.

    Args:
        timelines: Timelines by schedule.
        speeds: Trained tokens per second by schedule.
        dark: Whether the picture is for a dark background.
    """
    ink, paper = colors_of(dark)
    figure, axes = plt.subplots(len(timelines), 1, figsize=(9, 8.2), sharex=True)
    colors = plt.get_cmap("viridis")
    for (preset, line), ax in zip(timelines.items(), axes, strict=True):
        ax.set_facecolor(paper)
        for row, begin, end, version in line.generated:
            if begin < SECONDS and end > begin:
                color = colors(0.15 + 0.8 * (version % 6) / 5)
                ax.barh(row, end - begin, left=begin, height=0.8, color=color, lw=0.4, ec=paper)
        for begin, end in line.trained:
            if begin < SECONDS:
                ax.barh(9.2, end - begin, left=begin, height=1.3, color="#d9822b", lw=0.4, ec=paper)
        times = speeds[preset] / speeds["sync"]
        quicker = "" if preset == "sync" else f" — {times:.1f} × the trained tokens a second"
        _frame(ax, PRESETS[preset] + quicker, ink)
    axes[-1].set_xlabel("virtual seconds", color=ink)
    axes[0].annotate(
        "rows 1–8: slots of two engines, colored by policy version; below, orange: the trainer",
        (0, 1.22), xycoords="axes fraction", color=ink, fontsize=8,
    )  # fmt: skip
    save(figure, "schedules", dark, paper)


def _frame(ax: Axes, title: str, ink: str) -> None:
    ax.set_title(title, loc="left", color=ink, fontsize=9.5, fontweight="bold")
    ax.set_xlim(0, SECONDS)
    ax.set_ylim(10.2, -0.8)
    ax.set_yticks([3.5, 9.2], ["generate", "train"], color=ink)
    ax.tick_params(colors=ink, length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def main() -> None:
    if sys.argv[1:]:
        keep_curve(Path(sys.argv[1]))
    timelines = {preset: timeline(preset) for preset in PRESETS}
    speeds = {preset: trained_per_second(preset) for preset in PRESETS}
    for dark in (False, True):
        draw(timelines, speeds, dark)
        for run in CURVES:
            draw_curve(run, dark)


if __name__ == "__main__":
    main()
