"""The console while a run goes on: one line a step, and on a terminal a calm panel below.

Reads only `metrics.jsonl` and the status that the supervisor hands in; a run that is watched and a
run that is not are the same run.

Invariants
- Steps have the numbers that metrics.jsonl, TensorBoard and the store give them, from 0.
- Lines of steps fit 80 columns; the panel takes the width of the terminal, up to 120.
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
"""Steps that the time left is estimated from."""
_MOST_COLUMNS = 120
_SHOWN_WARNINGS = 3
_ENGINES_START = "engines load the model, trainer ranks start"


class Progress:
    """Follows one run from where its metrics file stands now."""

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
        """Show what happens until `ended` returns something, which is returned."""
        with self:
            while (found := ended()) is None:
                self.update(status())
                time.sleep(_POLL_SECONDS)
            self.update(None)
        return found

    def update(self, status: Status | None) -> None:
        """Show new steps and the present state of the queues; None: nothing generates."""
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
        if status and not self._last:  # a restored run has trained the steps of its version
            self._done = int(status["version"].rpartition(".")[2])
        for name, message in (status or {}).get("warnings", {}).items():
            self._warn(name, message)
        if self._live is not None:
            self._live.update(self._panel(status))
        elif not self._last:
            self._show_phase(_phase(status))

    def _show_phase(self, phase: str) -> None:
        """Only forwards: a status that fails for a moment does not start the engines again."""
        if self._phase in ("", _ENGINES_START) and phase not in ("", self._phase):
            self._phase = phase
            self._console.print(phase, highlight=False)

    def _warn(self, name: str, message: str) -> None:
        """Each name once; metrics.jsonl has every one up to the newest weight update."""
        if name not in self._warnings:
            self._console.print(f"warning {name}: {message}", highlight=False)
        self._warnings[name] = message

    def _panel(self, status: Status | None) -> Panel:
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
        width = min(_MOST_COLUMNS, self._console.width)
        rows_of_both = Table.grid(expand=True)
        rows_of_both.add_row(bar)  # by itself it ends without a line break
        rows_of_both.add_row(table)
        title = "starting" if self._done is None else f"{done} of {self._steps} steps"
        return Panel(rows_of_both, title=title, width=width)

    def _new_lines(self) -> list[dict[str, Any]]:
        if not self._metrics_file.exists():
            return []
        with self._metrics_file.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # somebody removed it: this one is new
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(json_lines(whole))


def format_step(line: dict[str, Any], steps: int) -> str:
    """Format a finished step, or an evaluation, as a line."""
    place = f"{line['step']:>4}/{steps - 1}"
    if line["kind"] == "eval":
        return "\n".join(_evaluated(line))
    if line["kind"] == "sft":
        return (
            f"sft {place}  loss {line['train/loss']:.4f}  "
            f"{line['train/tokens_per_second']:,.0f} tok/s"
        )
    return (
        f"step {place}  reward {line['rollout/reward_mean']:.3f}  {_speeds(line)} tok/s  "
        f"lag {line['rollout/lag_mean']:.1f}/{line['rollout/lag_max']:.0f}  "
        f"{line['time/step']:.1f} s"
    )


def _evaluated(line: dict[str, Any]) -> list[str]:
    """Return a line for each evaluation set."""
    return [
        f"{name}, step {line['step']}: {_scores(line, prefix)} "
        f"({line[f'{prefix}/responses']:.0f} answers, {_sampling(line, prefix)}, "
        f"{line[f'{prefix}/length_mean']:.1f} tokens){_span(line, prefix)}"
        for name, prefix in evaluated_sets(line).items()
    ]


def _scores(line: dict[str, Any], prefix: str) -> str:
    accuracy, reward = line[f"{prefix}/accuracy"], line[f"{prefix}/reward_mean"]
    return f"accuracy {100 * accuracy:.1f} %, reward {reward:.3f}"


def _sampling(line: dict[str, Any], prefix: str) -> str:
    return sampling_name(line[f"{prefix}/temperature"])


def _span(line: dict[str, Any], prefix: str) -> str:
    """The versions of an evaluation that measured several."""
    ends = [line.get(f"{prefix}/version_{end}", 0.0) for end in ("oldest", "newest")]
    return f", versions {ends[0]:.0f} to {ends[1]:.0f}" if ends[0] < ends[1] else ""


def _speeds(line: dict[str, Any]) -> str:
    """Format the speeds of both sides; a batch that was ready before its turn has none."""
    generation = line.get("rollout/tokens_per_second")
    shown = "-" if generation is None else f"{generation:,.0f}"
    return f"gen {shown} train {line['train/tokens_per_second']:,.0f}"


def _times(elapsed: float, seconds: deque[float], left: int) -> str:
    """`3:20, about 12:30 left`."""
    text = _clock(elapsed)
    if seconds and left > 0:
        text += f", about {_clock(left * sum(seconds) / len(seconds))} left"
    return text


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _phase(status: Status | None) -> str:
    """Name what a run waits for before its first step."""
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
"""States of trajectories, in words. Pending ones have not been sent to an engine yet."""


def format_status(status: Status) -> str:
    """Format engines, weights and responses by state as one line."""
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
