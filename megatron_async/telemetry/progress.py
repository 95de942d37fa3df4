"""What a person sees while a run goes on: one line for each step, and a live status below it.

Reads only `metrics.jsonl` and the status that the supervisor hands in; a run that is watched and a
run that is not are the same run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text


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
        self._offset = metrics_file.stat().st_size if metrics_file.exists() else 0
        self._began = time.monotonic()
        self._shown_warnings: set[str] = set()

    def __enter__(self) -> Progress:
        if self._live_wanted and not self._silent:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: dict[str, Any]) -> None:
        """Show new steps and the present state of the queues."""
        if self._silent:
            return
        for line in self._new_lines():
            if line["kind"] == "warning":
                self._warn(line["name"], f"{line['message']} (step {line['step'] + 1})")
            else:
                self._console.print(format_step(line, self._steps), highlight=False)
        for name, message in status.get("warnings", {}).items():
            self._warn(name, message)
        if self._live is not None:
            self._live.update(Text(format_status(status, time.monotonic() - self._began)))

    def _warn(self, name: str, message: str) -> None:
        """Each name once; metrics.jsonl has every one up to the newest weight update."""
        if name not in self._shown_warnings:
            self._shown_warnings.add(name)
            self._console.print(f"warning {name}: {message}", highlight=False)

    def _new_lines(self) -> list[dict[str, Any]]:
        if not self._metrics_file.exists():
            return []
        with self._metrics_file.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(text) for text in whole.splitlines()]


def format_step(line: dict[str, Any], steps: int) -> str:
    """One finished step, or one evaluation, as a line."""
    if line["kind"] == "eval":
        return "\n".join(_accuracies(line))
    if line["kind"] == "sft":
        return (
            f"sft {line['step'] + 1:>4}/{steps}  loss {line['train/loss']:.4f}  "
            f"{line['train/tokens_per_second']:,.0f} tok/s"
        )
    return (
        f"step {line['step'] + 1:>4}/{steps}  reward {line['rollout/reward_mean']:.3f}  "
        f"loss {line['train/loss']:+.4f}  "
        f"gen {line['rollout/tokens_per_second']:,.0f} tok/s  "
        f"train {line['train/tokens_per_second']:,.0f} tok/s  "
        f"resumed {100 * line['rollout/resumed_share']:.0f} %  "
        f"lag {line['rollout/lag_mean']:.2f}/{line['rollout/lag_max']:.0f}  "
        f"{line['time/step']:.1f} s"
    )


def _accuracies(line: dict[str, Any]) -> Iterator[str]:
    for name, accuracy in line.items():
        prefix, slash, last = name.rpartition("/")
        if slash and last == "accuracy":
            which = prefix.removeprefix("eval").removeprefix("/") or "held-out"
            yield (
                f"{which} accuracy at step {line['step']}: {100 * accuracy:.1f} % "
                f"of {line[f'{prefix}/answers']:.0f} answers, "
                f"{line[f'{prefix}/length_mean']:.1f} tokens each"
            )


def format_status(status: dict[str, Any], elapsed: float) -> str:
    """Queues and buffers, one line."""
    if not status:
        return f"{elapsed:,.0f} s  starting engines and trainers"
    states = status.get("states", {})
    waiting = "  ".join(f"{name} {count}" for name, count in states.items() if count)
    return (
        f"{elapsed:,.0f} s  engines {status['engines_up']}/{status['engines']}  "
        f"in flight {status['running']}  {waiting}  weights {status['version']}"
    )
