"""Shows the progress of a run on the console: one line for each step and, on a terminal, a live
panel below the lines.

The module reads only `metrics.jsonl` and the status that the launcher passes to it, so that showing
a run does not change it.

Invariants
- Steps have the numbers of metrics.jsonl, TensorBoard and the store, from 0.
- Lines of steps fit 80 columns; the panel is as wide as the terminal, up to 120 columns.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_async.files.disk import json_lines, whole_lines_end
from megatron_async.telemetry.metrics import evaluated_sets, sampling_name

T = TypeVar("T")
Status: TypeAlias = dict[str, Any]
_POLL_SECONDS = 0.5
_REMEMBERED = 8
"""Number of newest steps from which the remaining time is estimated."""
_MAX_COLUMNS = 120
_SHOWN_WARNINGS = 3
_ENGINES_START = "engines load the model, trainer ranks start"


class Progress:
    """Shows the progress of one run on the console. Lines that the metrics file has already when
    the object is created are not shown."""

    def __init__(
        self, metrics_file: Path, steps: int, choice: Literal["auto", "live", "lines", "off"]
    ) -> None:
        self._metrics_file = metrics_file
        self._steps = steps
        self._console = Console(soft_wrap=True)
        self._live_wanted = choice == "live" or (choice == "auto" and sys.stdout.isatty())
        self._silent = choice == "off"
        self._live: Live | None = None
        self._offset = whole_lines_end(metrics_file)
        self._began = time.monotonic()
        self._warnings: dict[str, str] = {}
        self._last: dict[str, Any] = {}
        self._phase = ""
        self._evaluated: dict[str, Any] = {}
        self._done: int | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def __enter__(self) -> "Progress":
        if self._live_wanted:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=2)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def follow(self, ended: Callable[[], T | None], status: Callable[[], Status | None]) -> T:
        """Show the progress of a run until `ended` returns a result; return this result.

        Args:
            ended: Function that returns None while the run continues.
            status: Function that returns the present status of the rollout manager; None if the run
                has no rollout manager.
        """
        with self:
            while (found := ended()) is None:
                self.update(status())
                time.sleep(_POLL_SECONDS)
            self.update(None)
        return found

    def update(self, status: Status | None) -> None:
        """Show the new lines of the metrics file, and the present status of engines and responses.

        Args:
            status: Status of the rollout manager. It is None if the run has no manager or has
                ended, and empty if the manager has no status yet.
        """
        if self._silent:
            return
        for line in self._new_lines():
            if line["kind"] == "warning":
                self._warn(line["name"], f"{line['message']} (step {line['step']})")
                continue
            if line["kind"] == "start":
                continue
            self._console.print(format_step(line, self._steps), highlight=False)
            if line["kind"] == "eval":
                self._evaluated = line
            else:
                self._last = line
                self._done = int(line["step"]) + 1
                self._seconds.append(line.get("time/step", 0.0))
        # Before the first step after a resume, the number of the policy version is the number of
        # steps that were trained before the resume.
        if status and not self._last:
            self._done = int(status["version"].rpartition(".")[2])
        for name, message in (status or {}).get("warnings", {}).items():
            self._warn(name, message)
        if self._live is not None:
            self._live.update(self._panel(status))
        elif not self._last:
            self._show_phase(_phase(status))

    def _show_phase(self, phase: str) -> None:
        """Print in which phase of its start the run is, unless this or a later phase was printed
        already.

        So no phase is repeated if the status cannot be read for a moment.
        """
        if self._phase in ("", _ENGINES_START) and phase not in ("", self._phase):
            self._phase = phase
            self._console.print(phase, highlight=False)

    def _warn(self, name: str, message: str) -> None:
        """Print a warning unless a warning of the same name was printed before.

        The file metrics.jsonl gets every warning, including repeated ones. Warnings of the rollout
        side are written to it at each weight update, so the newest ones may not be in it yet.
        """
        if name not in self._warnings:
            self._console.print(f"warning {name}: {message}", highlight=False)
        self._warnings[name] = message

    def _panel(self, status: Status | None) -> Panel:
        """Return the live panel with progress bar, times, metrics of the last step, status and
        warnings."""
        line, elapsed = self._last, time.monotonic() - self._began
        done = self._done or 0
        rows: list[tuple[str, str]] = [("time", _times(elapsed, self._seconds, self._steps - done))]
        for name, prefix in evaluated_sets(self._evaluated).items():
            text = _scores(self._evaluated, prefix)
            rows.append((name, f"{text} ({_sampling(self._evaluated, prefix)})"))
        if "rollout/reward_mean" in line:
            rows += [
                ("reward", f"{line['rollout/reward_mean']:.3f}"),
                ("tokens/s", _speeds(line)),
                (
                    "lag",
                    "mean {rollout/lag_mean:.2f}, largest {rollout/lag_max:.0f}".format_map(line),
                ),
            ]
        elif "train/loss" in line:
            rows.append(("loss", f"{line['train/loss']:.4f}"))
        if status is not None:
            rows.append(("now", format_status(status)))
        names = list(self._warnings)
        if names:
            more = (
                f" and {len(names) - _SHOWN_WARNINGS} more" if len(names) > _SHOWN_WARNINGS else ""
            )
            rows.append(("warnings", ", ".join(names[-_SHOWN_WARNINGS:]) + more))
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(name, style="dim"), Text(text))
        bar = ProgressBar(total=self._steps, completed=done)
        width = min(_MAX_COLUMNS, self._console.width)
        rows_of_both = Table.grid(expand=True)
        # The bar is put into a table, because outside a table it has no line break at its end.
        rows_of_both.add_row(bar)
        rows_of_both.add_row(table)
        title = "starting" if self._done is None else f"{done} of {self._steps} steps"
        return Panel(rows_of_both, title=title, width=width)

    def _new_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines that were appended to the metrics file since the last call."""
        if not self._metrics_file.exists():
            return []
        with self._metrics_file.open("rb") as file:
            # If the file has become shorter, it was removed and created again.
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return list(json_lines(complete))


def format_step(line: dict[str, Any], steps: int) -> str:
    """Format a line of metrics.jsonl, about a step or an evaluation, for the console.

    Args:
        line: The line of metrics.jsonl.
        steps: Number of steps of the run.
    """
    position = f"{line['step']:>4}/{steps - 1}"
    if line["kind"] == "eval":
        return "\n".join(_evaluated(line))
    if line["kind"] == "sft":
        return (
            f"sft {position}  loss {line['train/loss']:.4f}  "
            f"{line['train/tokens_per_second']:,.0f} tok/s"
        )
    return (
        f"step {position}  reward {line['rollout/reward_mean']:.3f}  {_speeds(line)} tok/s  "
        f"max lag {line['rollout/lag_max']:.0f}  "
        f"{line['time/step']:.1f} s"
    )


def _evaluated(line: dict[str, Any]) -> list[str]:
    """Format an evaluation as one line for each of its sets."""
    return [
        f"{name}, step {line['step']}: {_scores(line, prefix)} "
        f"({line[f'{prefix}/responses']:.0f} responses, {_sampling(line, prefix)}, "
        f"{line[f'{prefix}/length_mean']:.1f} tokens){_span(line, prefix)}"
        for name, prefix in evaluated_sets(line).items()
    ]


def _scores(line: dict[str, Any], prefix: str) -> str:
    """Format the accuracy and the mean reward of an evaluation set."""
    accuracy, reward = line[f"{prefix}/accuracy"], line[f"{prefix}/reward_mean"]
    return f"accuracy {100 * accuracy:.1f} %, reward {reward:.3f}"


def _sampling(line: dict[str, Any], prefix: str) -> str:
    """Format how the responses of an evaluation set were sampled."""
    return sampling_name(line[f"{prefix}/temperature"])


def _span(line: dict[str, Any], prefix: str) -> str:
    """Format the range of policy versions that generated the responses of an evaluation set; return
    an empty text if only one version did."""
    ends = [line.get(f"{prefix}/version_{end}", 0.0) for end in ("oldest", "newest")]
    return f", versions {ends[0]:.0f} to {ends[1]:.0f}" if ends[0] < ends[1] else ""


def _speeds(line: dict[str, Any]) -> str:
    """Format the tokens per second of generation and training.

    The speed of generation is `-` if it was not measured, which is the case if the batch was
    complete before the trainer asked for it.
    """
    generation = line.get("rollout/tokens_per_second")
    shown = "-" if generation is None else f"{generation:,.0f}"
    return f"gen {shown} train {line['train/tokens_per_second']:,.0f}"


def _times(elapsed: float, seconds: deque[float], remaining: int) -> str:
    """Format the elapsed and the estimated remaining time, such as `3:20, about 12:30 left`.

    Args:
        elapsed: Seconds since the start.
        seconds: Seconds of each of the newest steps.
        remaining: Number of steps that are not trained yet.
    """
    text = _clock(elapsed)
    if seconds and remaining > 0:
        text += f", about {_clock(remaining * sum(seconds) / len(seconds))} left"
    return text


def _clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _phase(status: Status | None) -> str:
    """Return in words what a run waits for before its first step, according to the status of the
    rollout manager; return an empty text if `status` is None."""
    if status is None:
        return ""
    if not status or status["engines_up"] < status["engines"]:
        return _ENGINES_START
    return f"engines {status['engines']}/{status['engines']} generate"


_STATES = {
    "running": "in generation",
    "partial": "interrupted",
    "waiting": "between turns",
    "finished": "being scored",
    "scored": "waiting for their group or batch",
    "batched": "in batches so far",
    "dropped": "dropped so far",
}
"""Descriptions of the states of trajectories. Pending trajectories, which were not sent to an
engine yet, are not shown."""


def format_status(status: Status) -> str:
    """Format engines, weights and the number of responses in each state as one line."""
    if not status:
        return _ENGINES_START
    lineage, _, number = status["version"].rpartition(".")
    restored = f" (lineage {lineage})" if lineage != "0" else ""
    states = status.get("states", {})
    responses = [f"{states[name]} {text}" for name, text in _STATES.items() if states.get(name)]
    return (
        f"engines {status['engines_up']}/{status['engines']}, weights of step {number}{restored}; "
        f"responses: {', '.join(responses) or 'none'}"
    )
