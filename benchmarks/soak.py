"""What a long run uses, by process: memory, descriptors, CPU a step, and files, as steps go by.

    python -m benchmarks.soak [--steps 10000] [SETTING=VALUE]...

One `megatron-async train` of a model so small that a step is what surrounds it, with a simulated
engine, looked at as it passes an eighth, a quarter, a half, three quarters and the whole of its
steps. Memory is what belongs to a process alone (resident, without files and what is shared); CPU
is of the steps since the look before, children that have ended included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.command import command_line
from benchmarks.papers.report import table
from benchmarks.starts import kind_of
from megatron_async.models.tiny_model import TinyModel, build_tiny_model
from megatron_async.run_directory import RunDirectory

_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
_LIMIT_SECONDS = 6 * 3600.0
_LOOK_SECONDS = 0.2
_SHAPE = TinyModel(hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, ffn_size=32)
_SETTINGS = (
    "schedule={preset: copris, groups_per_batch: 1, group_size: 2, concurrency: 4}",
    "engines={kind: simulated, device: cpu, max_total_tokens: 16384, stream_interval: 8}",
    "engines.simulated={mean_length: 8, step_seconds: 0.001}",
    "weights={transport: tensor, verify: never}",
    "task.scorer_workers=2",
    "store.compact_after_checkpoints=1",
    "checkpoint={every_steps: 100, export_hf: false}",
    *("sampling.max_new_tokens=16", "eval.prompts=4", "eval.every_steps=1000"),
    *("telemetry.progress=lines", "telemetry.trackers=[]"),
)


@dataclass(frozen=True)
class Use:
    """What all processes of one kind use; `cpu_seconds` from their start on."""

    processes: int
    mib: float
    descriptors: int
    threads: int
    cpu_seconds: float


@dataclass(frozen=True)
class Look:
    """A run after so many steps; `files` and `mib` of its directory."""

    step: int
    seconds: float
    uses: dict[str, Use]
    files: int
    mib: float


def uses(root: psutil.Process) -> dict[str, Use]:
    """What this process and all below it use, by kind."""
    found: dict[str, Use] = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error), process.oneshot():
            kind = kind_of(" ".join(process.cmdline()))
            memory, times = process.memory_info(), process.cpu_times()
            before = found.get(kind, Use(0, 0.0, 0, 0, 0.0))
            found[kind] = Use(
                before.processes + 1,
                before.mib + (memory.rss - memory.shared) / 2**20,
                before.descriptors + process.num_fds(),
                before.threads + process.num_threads(),
                before.cpu_seconds
                + sum((times.user, times.system, times.children_user, times.children_system)),
            )
    return found


def look(directory: RunDirectory, root: psutil.Process, step: int, seconds: float) -> Look:
    sizes = []
    for file in directory.path.rglob("*"):
        with suppress(FileNotFoundError):  # what is removed meanwhile
            sizes.append(file.stat().st_size if file.is_file() else 0)
    return Look(step, seconds, uses(root), len(sizes), sum(sizes) / 2**20)


def soak(root: Path, steps: int, settings: list[str]) -> list[Look]:
    """Run so many steps, and look."""
    directory, log = RunDirectory(root / "soak"), root / "soak.log"
    command = [sys.executable, "-m", "megatron_async.cli", "train", "--config", "config.yaml"]
    began, looks = time.monotonic(), list[Look]()
    wanted = [round(share * steps) for share in _SHARES]
    # A few more: the last look is at a run that goes on.
    own = ["name=soak", f"root={root}", f"steps={steps + 100}"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *_SETTINGS, *own, *settings],
            cwd=root,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    family = psutil.Process(process.pid)
    progress = _Steps(directory.metrics_file)
    try:
        while len(looks) < len(wanted):
            seconds = time.monotonic() - began
            if process.poll() is not None or seconds > _LIMIT_SECONDS:
                raise RuntimeError(f"it did not go on: {log.read_text()[-2000:]}")
            if (step := progress.done()) >= wanted[len(looks)]:
                looks.append(look(directory, family, step, seconds))
                print(looks[-1], flush=True)
            time.sleep(_LOOK_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(120)
    return looks


class _Steps:
    """Counts the steps that a file of metrics has, as it grows."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._steps = file, 0, 0

    def done(self) -> int:
        with suppress(FileNotFoundError), self._file.open("rb") as opened:
            opened.seek(self._read)
            lines = opened.read().split(b"\n")[:-1]
            self._read += sum(len(line) + 1 for line in lines)
            self._steps += Counter(json.loads(line)["kind"] for line in lines)["train"]
        return self._steps


def report(looks: list[Look]) -> str:
    """A table of processes by kind, each cell a value for each look."""
    rows = []
    for kind in sorted(set().union(*(one.uses for one in looks))):
        cells: list[list[str]] = [[], [], [], [], []]
        before, step = 0.0, 0
        for one in looks:
            use = one.uses.get(kind, Use(0, 0.0, 0, 0, before))
            spent = 1000 * (use.cpu_seconds - before) / (one.step - step)
            values = (use.processes, f"{use.mib:.1f}", use.descriptors, use.threads, f"{spent:.1f}")
            for cell, value in zip(cells, values, strict=True):
                cell.append(str(value))
            before, step = use.cpu_seconds, one.step
        rows.append([kind, *(" ".join(cell) for cell in cells)])
    head = ["process", "number", "MiB", "descriptors", "threads", "CPU ms a step"]
    files = [
        [str(one.step), f"{one.seconds:.0f}", str(one.files), f"{one.mib:.1f}"] for one in looks
    ]
    return (
        f"{table(head, rows)}\n\n{table(['steps', 'seconds', 'files', 'MiB'], files)}"
        f"\n\n`{command_line('benchmarks.soak')}`, {os.cpu_count()} cores\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("settings", nargs="*", help="SETTING=VALUE")
    options = parser.parse_args()
    # So that a run is not left behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root = Path(folder)
        build_tiny_model(root / "model", seed=1, shape=_SHAPE)
        (root / "config.yaml").write_text(json.dumps({"model": {"path": str(root / "model")}}))
        print(report(soak(root, options.steps, options.settings)))


if __name__ == "__main__":
    main()
