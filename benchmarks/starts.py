"""What a start costs: wall to the first submitted request, CPU seconds and memory by process.

    python -m benchmarks.starts [--runs 3] [--loaded 8] [SETTING=VALUE]...

Each run is `megatron-async train` of a tiny model with a real engine on CPU; it ends by SIGKILL a
few seconds after its first request, whose time its recorded events have. CPU seconds are those at
that moment. Memory is what each process has for itself and its share of what several have (PSS),
looked at once, when the request has been seen: a look takes time of the process that it looks at.
`--loaded`: beside so many processes that do nothing but count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.command import command_line
from benchmarks.papers.report import table
from megatron_async.files.disk import json_lines
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory

_LIMIT_SECONDS = 600.0
_LOOK_SECONDS = 0.25
_IDLE_SECONDS = 3.0
_SETTINGS = (
    "schedule={preset: copris, groups_per_batch: 4, group_size: 4, concurrency: 24}",
    *("sampling.max_new_tokens=64", "eval.prompts=4", "steps=1000"),
    *("telemetry.progress=lines", "telemetry.tensorboard=false"),
)
_KINDS = (
    ("megatron_async.cli", "train (supervisor)"),
    ("torch.distributed.run", "torchrun"),
    ("megatron_async.train_loop.rank", "trainer ranks"),
    ("engines.sglang.server", "engine: SGLang's server"),
    ("engines.simulated.server", "engine: simulated"),
    ("sglang::", "engine: SGLang's scheduler"),
    ("ray::ManagerHost", "rollout manager"),
    ("rollout-manager", "rollout manager"),
    ("ray::EngineHost", "host of an engine"),
    ("engine0-host", "host of an engine"),
    ("scoring.process_main", "scorers"),
    ("ray::PlacedWorker", "scorers"),
    ("gcs_server", "Ray"),
    ("raylet", "Ray"),
    ("ray", "Ray"),
)


@dataclass(frozen=True)
class Use:
    """CPU seconds and MiB of a process."""

    kind: str
    cpu_seconds: float
    mib: float


@dataclass(frozen=True)
class Start:
    """One start; `uses` by process id."""

    wall_seconds: float
    uses: dict[int, Use]

    def of_kinds(self) -> dict[str, tuple[int, float, float]]:
        """Number of processes, CPU seconds and MiB of each kind."""
        found: dict[str, list[Use]] = defaultdict(list)
        for use in self.uses.values():
            found[use.kind].append(use)
        return {
            kind: (len(uses), sum(u.cpu_seconds for u in uses), sum(u.mib for u in uses))
            for kind, uses in found.items()
        }


def kind_of(line: str) -> str:
    """What the process with this command line is to a run."""
    return next((kind for mark, kind in _KINDS if mark in line), "other")


def uses(root: psutil.Process, memory: bool = False) -> Iterator[tuple[int, Use]]:
    """What this process and all below it use at this moment; `memory`: with their memory."""
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                line = " ".join(process.cmdline())
                kind = kind_of(line)
                times = process.cpu_times()
                mib = process.memory_full_info().pss / 2**20 if memory else 0.0
        except psutil.Error:
            continue
        yield process.pid, Use(kind, times.user + times.system, mib)


def first_submitted(directory: RunDirectory) -> float | None:
    """The time of the first action that submits a request; None while there is none."""
    for file in sorted(directory.events.glob("*.jsonl")):
        for line in json_lines(file.read_bytes()):
            if any(action[0] == "Submit" for action in line.get("a", ())):
                return float(line["t"])
    return None


def start(root: Path, name: str, settings: list[str]) -> Start:
    """Start a run and end it after its first request."""
    directory = RunDirectory(root / name)
    command = [sys.executable, "-m", "megatron_async.cli", "train", "--config", "config.yaml"]
    began = time.time()
    with (root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *_SETTINGS, f"name={name}", f"root={root}", *settings],
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    family = psutil.Process(process.pid)
    seen: list[tuple[float, dict[int, Use]]] = []
    try:
        while (at := first_submitted(directory)) is None:
            if process.poll() is not None or time.time() > began + _LIMIT_SECONDS:
                raise RuntimeError(
                    f"no request was submitted: {(root / f'{name}.log').read_text()}"
                )
            seen.append((time.time(), dict(uses(family))))
            time.sleep(_LOOK_SECONDS)
        last = dict(uses(family, memory=True))
    finally:
        everyone = [family, *(family.children(recursive=True) if process.poll() is None else ())]
        for member in everyone:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(everyone, timeout=20)
    latest: dict[int, Use] = {}  # what has ended meanwhile has used its time too
    for when, found in seen:
        if when <= at:
            latest |= found
    held = {pid: use.mib for pid, use in last.items()}
    at_that_moment = {pid: replace(use, mib=held.get(pid, 0.0)) for pid, use in latest.items()}
    return Start(at - began, at_that_moment)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that take all the time that they get."""
    counting = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(counting) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def report(starts: list[Start]) -> str:
    """The table of the median start, its processes by CPU time."""
    median = sorted(starts, key=lambda start: start.wall_seconds)[len(starts) // 2]
    walls = ", ".join(f"{start.wall_seconds:.1f}" for start in starts)
    kinds = sorted(median.of_kinds().items(), key=lambda item: -item[1][1])
    rows = [[kind, str(n), f"{cpu:.1f}", f"{mib:.0f}"] for kind, (n, cpu, mib) in kinds]
    sums = [sum(values) for values in zip(*(found for _, found in kinds), strict=True)]
    rows.append(["all", str(sums[0]), f"{sums[1]:.1f}", f"{sums[2]:.0f}"])
    middle = statistics.median(start.wall_seconds for start in starts)
    return (
        f"Wall to the first submitted request: {middle:.1f} s (median of {walls}).\n\n"
        + table(["process", "number", "CPU s", "MiB (PSS)"], rows)
        + f"\n\n`{command_line('benchmarks.starts')}`, {os.cpu_count()} cores\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loaded", type=int, default=0, help="busy processes beside it")
    parser.add_argument("settings", nargs="*", help="SETTING=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build_tiny_model(root / "model", seed=1)
        (root / "config.yaml").write_text(json.dumps({"model": {"path": str(root / "model")}}))
        with busy(options.loaded):
            starts = []
            for number in range(options.runs):
                starts.append(start(root, f"run{number}", options.settings))
                print(f"start {number}: {starts[-1].wall_seconds:.1f} s", flush=True)
        print(report(starts))


if __name__ == "__main__":
    main()
