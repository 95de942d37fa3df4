"""Measures whether the resource use of a long run grows: memory, descriptors, CPU time and files.

    python -m benchmarks.soak [--steps 10000] [SETTING=VALUE]...

The program starts one `megatron-async train` with a simulated engine. Its model is so small that
nearly all time of a step is spent outside the model. Samples are taken after an eighth, a quarter,
a half, three quarters and all of the steps. The memory of a process is its private resident memory,
without files and shared memory. CPU time is the time since the previous sample, including ended
child processes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.reporting import made, table
from benchmarks.starts import kind_of, launch
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
    "sampling.max_new_tokens=16",
    "eval.prompts=4",
    "eval.every_steps=1000",
)


@dataclass(frozen=True)
class Look:
    """Sample of a run after `step` steps.

    Attributes:
        step: Number of steps so far.
        seconds: Seconds since the start.
        uses: Resource use of its processes, from `uses`.
        files: Number of files and directories in the run directory.
        mib: Size of the run directory in MiB.
    """

    step: int
    seconds: float
    uses: dict[str, list[float]]
    files: int
    mib: float


def uses(root: psutil.Process) -> dict[str, list[float]]:
    """Measure the resources that `root` and all its descendants use.

    Returns:
        For each kind of process: number of processes, MiB, descriptors, threads, and CPU seconds
        since their start.
    """
    found: dict[str, list[float]] = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error), process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            cpu = times.user + times.system + times.children_user + times.children_system
            mib = (memory.rss - memory.shared) / 2**20
            own = [1, mib, process.num_fds(), process.num_threads(), cpu]
            kind = kind_of(" ".join(process.cmdline()))
            before = found.get(kind, [0.0] * len(own))
            found[kind] = [a + b for a, b in zip(before, own, strict=True)]
    return found


def look(directory: RunDirectory, root: psutil.Process, step: int, seconds: float) -> Look:
    """Return a sample of a run, whose process `root` has made `step` steps."""
    sizes = []
    for file in directory.path.rglob("*"):
        with suppress(FileNotFoundError):  # the run has removed the file
            sizes.append(file.stat().st_size if file.is_file() else 0)
    return Look(step, seconds, uses(root), len(sizes), sum(sizes) / 2**20)


def soak(root: Path, steps: int, settings: list[str]) -> list[Look]:
    """Make a run of `steps` steps with `settings`; return its samples."""
    directory = RunDirectory(root / "soak")
    began, looks = time.monotonic(), list[Look]()
    wanted = [round(share * steps) for share in _SHARES]
    # The run has 100 more steps, so that it still runs at the last sample.
    process, log = launch(root, "soak", [*_SETTINGS, f"steps={steps + 100}", *settings])
    family = psutil.Process(process.pid)
    progress = _Steps(directory.metrics_file)
    try:
        while len(looks) < len(wanted):
            seconds = time.monotonic() - began
            if process.poll() is not None or seconds > _LIMIT_SECONDS:
                raise RuntimeError(
                    f"the run ended early or was too slow: {log.read_text()[-2000:]}"
                )
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
    """Counts the steps in a growing file of metrics."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._steps = file, 0, 0

    def done(self) -> int:
        """Read the lines that were added; return the number of training steps so far."""
        with suppress(FileNotFoundError), self._file.open("rb") as opened:
            opened.seek(self._read)
            lines = opened.read().split(b"\n")[:-1]
            self._read += sum(len(line) + 1 for line in lines)
            self._steps += Counter(json.loads(line)["kind"] for line in lines)["train"]
        return self._steps


def report(looks: list[Look]) -> str:
    """Return tables of processes and files; a cell of processes has one value for each sample."""
    rows = []
    for kind in sorted(set().union(*(one.uses for one in looks))):
        looked, before, step = [], 0.0, 0
        for one in looks:
            processes, mib, descriptors, threads, cpu = one.uses.get(kind, [0, 0, 0, 0, before])
            spent = 1000 * (cpu - before) / (one.step - step)
            counts = [f"{count:.0f}" for count in (processes, descriptors, threads)]
            looked.append([counts[0], f"{mib:.1f}", *counts[1:], f"{spent:.1f}"])
            before, step = cpu, one.step
        rows.append([kind, *map(" ".join, zip(*looked, strict=True))])
    kinds = table("process | number | MiB | descriptors | threads | CPU ms a step", rows)
    files = [(one.step, f"{one.seconds:.0f}", one.files, f"{one.mib:.1f}") for one in looks]
    sizes = table("steps | seconds | files | MiB", files)
    return f"{kinds}\n\n{sizes}\n\n{made('benchmarks.soak')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("settings", nargs="*", help="SETTING=VALUE")
    options = parser.parse_args()
    # SIGTERM must end the run too, so it raises SystemExit here.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root = Path(folder)
        build_tiny_model(root / "model", seed=1, shape=_SHAPE)
        (root / "config.yaml").write_text(json.dumps({"model": {"path": str(root / "model")}}))
        print(report(soak(root, options.steps, options.settings)))


if __name__ == "__main__":
    main()
