"""Defines a report's figures: the metrics that each shows, their unit, and how they are drawn.

Invariants
- Each axis shows one quantity; every panel has a title and a unit.
- Metrics that a run does not have are omitted, and so are empty panels.
- Steps have the numbers of metrics.jsonl, from 0.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import plotly.graph_objects as go

from megatron_async.report.data import RunData
from megatron_async.scoring.interface import SCORE_FAILURES
from megatron_async.telemetry.metrics import TRAINER_PHASES, evaluated_sets

# Colors of Okabe and Ito: distinct with every kind of color vision, on white and on black.
COLORS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999933",
    "#888888",
)
_HEIGHT: Final = 236
_MARGINS: Final = {"l": 58, "r": 12, "t": 10, "b": 62}
_AT_BOTTOM: Final = {"yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
_MAX_LAG: Final = 8
_FEW_STEPS = 8  # Below this number, every step has a label.
# Thresholds of the ratio of the largest to the smallest value on a logarithmic axis. Above the
# first, the axis has labels at 1, 2 and 5 times each power of ten; above the second, at powers of
# ten; above the third, at every third power of ten.
_FEW_DIGITS, _FEW_POWERS, _MANY_POWERS = 3.0, 100.0, 1e6
# Logarithms of importance weights are clamped to this absolute value.
_MAX_LOG_WEIGHT: Final = 20.0

Figure: TypeAlias = Any  # plotly has no type annotations.
Line: TypeAlias = Mapping[str, float]
_IDLE: Final = "idle"
_Z: Final = 1.96  # Standard errors on either side of a mean in a 95 % interval.
# Metrics of importance weights before truncation: their mean, their chi-square (second moment minus
# 1), and the logarithms of the smallest and the largest one.
_MOMENTS: Final = {
    "token": (
        "off_policy/weight",
        "off_policy/chi2_token",
        "off_policy/log_ratio_min",
        "off_policy/log_ratio_max",
    ),
    "response": (
        "off_policy/weight_sequence",
        "off_policy/chi2_sequence",
        "off_policy/log_weight_sequence_min",
        "off_policy/log_weight_sequence_max",
    ),
}


@dataclass(frozen=True)
class Panel:
    """A figure that shows metrics over the steps of a run.

    Attributes:
        series: Pairs of a label and the metric that is drawn with it.
        good: Description of a good curve, which the page shows.
        band: Metric around which an area is shaded. The ends of the area are the values BAND/below
            and BAND/above from `drawn`. Empty means no area.
        band_name: Meaning of the area, for the legend.
        scale: Factor by which the metrics are multiplied.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    good: str = ""
    draws: Literal["lines", "bars", "areas"] = "lines"
    band: str = ""
    band_name: str = "± 1 std"
    scale: float = 1.0
    logarithmic: bool = False

    def figure(self, run: RunData) -> Figure | None:
        """Draw the panel for a run; return None if the run has no metric of the panel."""
        figure, lines = go.Figure(), [drawn(line) for line in run.train]
        shaded = [line for line in lines if f"{self.band}/below" in line]
        if shaded:
            ends = ([line[f"{self.band}/{end}"] for line in shaded] for end in ("below", "above"))
            _shade(figure, self.band_name, [line["step"] for line in shaded], *ends)
        for index, (label, metric) in enumerate(self.series):
            points = [(line["step"], self.scale * line[metric]) for line in lines if metric in line]
            finite = [y for _, y in points if math.isfinite(y)]
            if finite and (any(finite) or self.draws == "lines"):
                figure.add_trace(self._trace(label, points, COLORS[index % len(COLORS)]))
        if not figure.data:
            return None
        if self.draws == "bars":
            figure.update_layout(barmode="stack", bargap=0.1)
        if self.logarithmic:
            _logarithmic(figure)
        return styled(figure, self.title, self.unit)

    def _trace(self, label: str, points: Sequence[tuple[float, float]], color: str) -> Any:
        """Return the points of one metric as a line, bars or an area, depending on `draws`."""
        x, y = zip(*points, strict=True)
        if self.draws == "bars":
            return go.Bar(x=x, y=y, name=label, marker_color=color, marker_line_width=0)
        stack = {"stackgroup": "one", "line": {"width": 0.5}} if self.draws == "areas" else {}
        mode = "lines+markers" if len(x) < 3 and not stack else "lines"
        return go.Scatter(x=x, y=y, name=label, mode=mode, marker_color=color, **stack)


@dataclass(frozen=True)
class DrawnByFunction:
    """A figure that the function `figure` draws. `good` describes a good one."""

    figure: Callable[[RunData], Figure | None]
    good: str


def drawn(line: Line) -> dict[str, float]:
    """Return the values of a step that panels draw: the metrics in `line`, and values that are
    computed from several metrics.

    The computed values are idle time, the ends of shaded areas around means, and the smallest and
    the largest importance weight.
    """
    found = dict(line)
    if "rollout/seconds" in line and "rollout/seconds_since_last_batch" in line:
        busy = line["rollout/seconds"] + line.get("rollout/update_pause_seconds", 0.0)
        found[_IDLE] = max(0.0, line["rollout/seconds_since_last_batch"] - busy)
    if "reward/standard_error" in line:
        error = _Z * line["reward/standard_error"]
        ends = line.get("reward/min", -math.inf), line.get("reward/max", math.inf)
        found |= _band("reward/mean", line["reward/mean"], error, *ends)
    for mean, chi2, *extremes in _MOMENTS.values():
        if all(name in line for name in (mean, chi2, *extremes)):
            logs = (min(max(line[end], -_MAX_LOG_WEIGHT), _MAX_LOG_WEIGHT) for end in extremes)
            low, high = map(math.exp, logs)
            spread = math.sqrt(max(0.0, line[chi2] + 1 - line[mean] ** 2))
            found |= {f"{mean}/smallest": low, f"{mean}/largest": high}
            found |= _band(mean, line[mean], spread, low, high)
    return found


def _band(name: str, mean: float, spread: float, low: float, high: float) -> dict[str, float]:
    """Return the two ends of the shaded area around a mean, mean - spread and mean + spread,
    limited to `low` and `high`.

    Args:
        name: Name of the mean, with which the names of the two ends begin.
        mean: The mean.
        spread: Distance of the ends from the mean.
        low: Smallest value that occurred, which the lower end cannot be below.
        high: Largest value that occurred, which the upper end cannot be above.
    """
    return {f"{name}/below": max(low, mean - spread), f"{name}/above": min(high, mean + spread)}


def importance_weights(of: str) -> Panel:
    """Return the panel of the importance weights, before truncation, of tokens or of whole
    responses.

    It shows their mean, the smallest and the largest one, and as an area their standard deviation.

    Args:
        of: `token` for weights of tokens, `response` for weights of whole responses.
    """
    mean = _MOMENTS[of][0]
    ends = ((end, f"{mean}/{end}") for end in ("smallest", "largest"))
    return Panel(
        f"Importance weight of a {of}",
        "weight",
        (("mean", mean), *ends),
        "the mean stays near 1 and the area is narrow",
        band=mean,
        logarithmic=True,
    )


def styled(figure: Figure, title: str, unit: str, x_title: str = "step") -> Figure:
    """Set title, axes and the common look of a figure; return the figure.

    The background is transparent, so that the figure suits light and dark pages and paper.
    """
    figure.update_layout(
        title=title,
        height=_HEIGHT,
        margin=_MARGINS,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 11},
        legend={"orientation": "h", "x": 0, "font": {"size": 10}, **_AT_BOTTOM},
        showlegend=True,
        hovermode="x unified",
    )
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    # Invisible ticks move the labels of both axes away from the corner in which they would overlap.
    grid |= {
        "ticks": "outside",
        "tickcolor": "rgba(0,0,0,0)",
    }
    figure.update_xaxes(title={"text": x_title, "standoff": 4}, **grid)
    positions = [x for trace in figure.data for x in trace.x]
    if "minutes" not in x_title and max(positions) - min(positions) < _FEW_STEPS:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(
        title=unit, rangemode="normal" if unit in ("weight", "loss") else "tozero", **grid
    )
    return figure


def _logarithmic(figure: Figure) -> None:
    """Make a figure's vertical axis logarithmic, with so few labels that they do not overlap.

    By default plotly labels all multiples of each power of ten, and the labels overlap. Here, only
    1, 2 and 5 times each power have a label, or fewer if the values span a large range.
    """
    figure.update_yaxes(type="log")
    drawn = [y for trace in figure.data for y in trace.y if 0 < y < math.inf]
    if drawn and (span := max(drawn) / min(drawn)) > _FEW_DIGITS:
        digits = (1, 2, 5) if span < _FEW_POWERS else (1,)
        powers = range(-12, 12, 1 if span < _MANY_POWERS else 3)
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        figure.update_yaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def _shade(
    figure: Figure, name: str, x: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    """Draw a shaded area between the curves `low` and `high`."""
    figure.add_trace(
        go.Scatter(
            x=[*x, *reversed(x)],
            y=[*high, *reversed(low)],
            fill="toself",
            fillcolor="rgba(0,114,178,0.18)",
            mode="lines",
            line={"width": 0},
            name=name,
            hoverinfo="skip",
        )
    )


def _evaluated(
    run: RunData, metric: str, title: str, unit: str, scale: float = 1.0
) -> Figure | None:
    """Draw a metric of each evaluation set, with its 95 % interval if that was measured.

    Returns:
        The figure; None if no evaluation has the metric.
    """
    figure = go.Figure()
    sets: dict[str, str] = {}
    for line in run.evaluations:
        sets |= evaluated_sets(line)
    for (name, prefix), color in zip(sets.items(), itertools.cycle(COLORS), strict=False):
        key = f"{prefix}/{metric}"
        lines = [line for line in run.evaluations if key in line]
        ends = {
            end: [scale * abs(line.get(f"{key}_{end}", line[key]) - line[key]) for line in lines]
            for end in ("high", "low")
        }
        measured = any(ends["high"] + ends["low"])
        figure.add_trace(
            go.Scatter(
                x=[line["step"] for line in lines],
                y=[scale * line[key] for line in lines],
                error_y={"array": ends["high"], "arrayminus": ends["low"]} if measured else None,
                mode="lines+markers",
                name=f"{name}, 95 % interval" if measured else name,
                marker_color=color,
            )
        )
    return styled(figure, title, unit, "policy version") if figure.data else None


def accuracy(run: RunData) -> Figure | None:
    """Draw the accuracy of each evaluation set."""
    return _evaluated(run, "accuracy", "Accuracy of evaluations", "%", scale=100)


def evaluation_reward(run: RunData) -> Figure | None:
    """Draw the mean reward of each evaluation set."""
    return _evaluated(run, "reward_mean", "Reward of evaluations", "reward")


def event_timeline(run: RunData) -> Figure | None:
    """Draw the times of warnings and resumes, with a row for each warning's name and one for
    resumes; return None if there are none."""
    points = [
        (line["time"], str(line["name"]), str(line["message"])[:160]) for line in run.warnings
    ]
    points += [
        (after["time"], "resume", f"lineage {after['lineage']:.0f} from step {after['step']:.0f}")
        for before, after in itertools.pairwise(run.train)
        if after["lineage"] != before["lineage"]
    ]
    if not points:
        return None
    times, names, texts = zip(*points, strict=True)
    minutes = [max(0.0, time - run.began) / 60 for time in times]
    marks = {"mode": "markers", "marker_size": 9, "cliponaxis": False}
    figure = go.Figure(go.Scatter(x=minutes, y=names, text=texts, **marks))
    styled(figure, "Warnings and restarts", "", "minutes since the first step")
    figure.update_layout(showlegend=False, hovermode="closest", xaxis_rangemode="nonnegative")
    return figure.update_yaxes(automargin=True)


def episode_endings(run: RunData) -> Figure | None:
    """Draw the number of episodes by their number of turns and by the reason for their end."""
    figure = go.Figure()
    hows = sorted({ending for ending, _ in run.episode_endings})
    for how, color in zip(hows, itertools.cycle(COLORS), strict=False):
        counts = {turns: n for (by, turns), n in sorted(run.episode_endings.items()) if by == how}
        look = {"width": 0.8, "marker_color": color, "marker_line_width": 0}
        figure.add_trace(go.Bar(x=[*counts], y=[*counts.values()], name=how, **look))
    figure.update_layout(barmode="stack")
    title = "Episodes by number of turns and end"
    return styled(figure, title, "episodes", "turns") if figure.data else None


_LAG_SHARES: Final = (
    *((f"lag {k}", f"staleness/lag_share_{k}") for k in range(_MAX_LAG)),
    (f"lag {_MAX_LAG} or more", f"staleness/lag_share_{_MAX_LAG}"),
)
_ROLLOUT_PHASES: Final = (
    ("generating", "rollout/seconds"),
    ("weight update", "rollout/update_pause_seconds"),
    ("idle or waiting", _IDLE),
)
_UPDATE_PHASES: Final = (
    ("until engines are ready", "weights/ready_seconds"),
    ("transfer", "weights/transfer_seconds"),
    ("verification", "weights/verify_seconds"),
)
_TRANSFER_PHASES: Final = tuple(
    (label, f"weights/transfer_{phase}_seconds")
    for label, phase in (
        ("gathering", "gather"),
        ("waiting for earlier stages", "turn"),
        ("waiting for engines", "wait_for_load"),
        ("broadcast", "broadcast"),
        ("loading", "load"),
        ("writing", "write"),
        ("publishing", "publish"),
        ("receiving", "receive"),
    )
)

PANELS: Final[tuple[Panel | DrawnByFunction, ...]] = (
    Panel(
        "Reward of a batch",
        "reward",
        (("mean", "reward/mean"),),
        "rises by more than the area, the 95 % interval of the mean",
        band="reward/mean",
        band_name="95 % interval",
    ),
    DrawnByFunction(evaluation_reward, "rises as the training reward does"),
    DrawnByFunction(accuracy, "rises, until the intervals no longer overlap"),
    Panel(
        "Response length",
        "tokens",
        (("mean", "rollout/response_length_mean"), ("longest", "rollout/response_length_max")),
        "changes slowly; a mean near the limit means cut responses",
    ),
    Panel(
        "Turns of an episode",
        "turns",
        (("mean", "rollout/turns_mean"), ("largest", "rollout/turns_max")),
        "below the limit of turns",
    ),
    DrawnByFunction(episode_endings, "most episodes end by the environment, not by a limit"),
    Panel(
        "Reply time of the environment",
        "s",
        (
            ("mean", "rollout/environment_seconds"),
            ("longest", "rollout/environment_seconds_max"),
        ),
        "small compared with the time of a step",
    ),
    Panel(
        "Throughput",
        "tokens/s",
        (
            ("generation", "rollout/tokens_per_second"),
            ("training, prompts included", "train/tokens_per_second"),
        ),
        "steady",
    ),
    Panel(
        "Time of the trainer by phase",
        "s",
        TRAINER_PHASES,
        "training is most of each bar; a long wait means that generation is too slow",
        "bars",
    ),
    Panel(
        "Time of the rollout side by phase",
        "s",
        _ROLLOUT_PHASES,
        "generating is most of each bar",
        "bars",
    ),
    Panel(
        "Waiting for the other side",
        "s",
        (("trainer", "time/wait_for_batch"), ("rollout side", "rollout/wait_for_trainer_seconds")),
        "both are near 0; the side that waits less is the bottleneck",
    ),
    Panel(
        "Lag",
        "policy versions",
        (
            ("mean over trained tokens", "rollout/lag_mean"),
            ("before the group is complete", "rollout/lag_before_queue_mean"),
            ("from then until training", "rollout/lag_in_queue_mean"),
            ("largest", "rollout/lag_max"),
        ),
        "low and steady; its part until training shrinks with a faster trainer or shorter queue",
    ),
    Panel(
        "Trained tokens by lag",
        "%",
        _LAG_SHARES,
        "most tokens have small lags",
        "areas",
        scale=100,
    ),
    Panel(
        "Effective sample size (raw)",
        "% of the samples",
        (("per token", "off_policy/ess"), ("per response", "off_policy/ess_sequence")),
        "per token near 100 %; below 30 % the data are too stale",
        scale=100,
    ),
    importance_weights("token"),
    importance_weights("response"),
    Panel(
        "Clipped, truncated, filtered",
        "%",
        (
            ("tokens clipped in the loss", "actor/clip_fraction"),
            ("responses cut at the length limit", "rollout/truncated_share"),
            ("groups with equal rewards", "reward/uninformative_groups"),
            ("resumed responses", "rollout/resumed_share"),
        ),
        "small shares; groups with equal rewards give no gradient",
        scale=100,
    ),
    Panel(
        "Scores that failed",
        "scores",
        tuple((name.replace("_", " "), f"rollout/{name}") for name in SCORE_FAILURES.values()),
        "none",
        "bars",
    ),
    Panel(
        "Log-probs of engines and trainer, same weights",
        "|difference of log-probs|",
        (("mean", "weights/probe_mean_error"), ("largest", "weights/probe_max_error")),
        "flat; a rise means stale weights or growing rounding errors",
        logarithmic=True,
    ),
    Panel(
        "KV cache in use",
        "%",
        (("mean", "rollout/kv_usage"), ("largest", "rollout/kv_usage_max")),
        "high, and below 100 %",
        scale=100,
    ),
    Panel(
        "Weight updates by phase",
        "s",
        _UPDATE_PHASES,
        "short compared with the training time of a step",
        "bars",
    ),
    Panel("Transfer of weights by phase (phases overlap)", "s", _TRANSFER_PHASES, "steady"),
    Panel(
        "Loss",
        "loss",
        (("mean of the updates", "train/loss"),),
        "bounded; its value alone does not show progress",
    ),
    Panel(
        "Gradient norm",
        "norm",
        (("before clipping", "train/grad_norm"),),
        "bounded, without growing peaks",
    ),
    Panel(
        "Entropy",
        "nats",
        (("mean over trained tokens", "actor/entropy"),),
        "falls slowly; near 0 exploration has ended, a steep rise is a collapse",
    ),
    DrawnByFunction(event_timeline, "few marks"),
)
"""All figures in the order of the page."""
