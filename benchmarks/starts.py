"""Measures a start: seconds to the first submitted request, CPU time and memory of processes.

    python -m benchmarks.starts [--runs 3] [SETTING=VALUE]...

Each run is `megatron-async train` of a tiny model with a real engine on a CPU. Its recorded events
contain the time of its first request. After this request, the run is ended with SIGKILL. CPU
seconds are counted up to the first request. The memory of a process is its private memory plus its
share of shared memory (PSS). It is read only once, at most half a second after the first request,
because reading it takes CPU time of the measured process.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.reporting import made, table
from megatron_async.files.disk import json_lines
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory

_LIMIT_SECONDS = 600.0
_LOOK_SECONDS = 0.25
_SETTINGS = (
    "schedule={preset: copris, groups_per_batch: 4, group_size: 4, concurrency: 24}",
    "sampling.max_new_tokens=64",
    "eval.prompts=4",
    "steps=1000",
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
    ("ray::ScorerWorker", "scorers"),
    ("gcs_server", "Ray"),
    ("raylet", "Ray"),
    ("ray", "Ray"),
)


@dataclass(frozen=True)
class Use:
    """CPU seconds and MiB of memory of one process."""

    kind: str
    cpu_seconds: float
    mib: float


@dataclass(frozen=True)
class Start:
    """A start: seconds to its first request, and the resources of each process until then."""

    wall_seconds: float
    uses: list[Use]


def kind_of(line: str) -> str:
    """Return the kind of a run's process with the command line `line`."""
    return next((kind for mark, kind in _KINDS if mark in line), "other")


def uses(root: psutil.Process, memory: bool = False) -> dict[int, Use]:
    """Return the resources that `root` and all its descendants have used, by process ID.

    Memory is read only if `memory` is set. Otherwise it is 0.
    """
    found = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error), process.oneshot():
            kind, times = kind_of(" ".join(process.cmdline())), process.cpu_times()
            mib = process.memory_full_info().pss / 2**20 if memory else 0.0
            found[process.pid] = Use(kind, times.user + times.system, mib)
    return found


def first_submitted(directory: RunDirectory) -> float | None:
    """Return the time of the first action that submits a request; None if there is none yet."""
    for file in sorted(directory.events.glob("*.jsonl")):
        for line in json_lines(file.read_bytes()):
            if any(action[0] == "Submit" for action in line.get("a", ())):
                return float(line["t"])
    return None


def launch(root: Path, name: str, settings: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Start `megatron-async train` on `root / "config.yaml"`; return the process and its log."""
    command = [sys.executable, "-m", "megatron_async.cli", "train", "--config", "config.yaml"]
    command += [f"name={name}", f"root={root}", "telemetry.progress=lines"]
    command += ["telemetry.trackers=[]", *settings]
    log = root / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return process, log


def start(root: Path, name: str, settings: Sequence[str]) -> Start:
    """Start a run, measure it until its first request, and kill it; return the measurement."""
    directory = RunDirectory(root / name)
    began = time.time()
    process, log = launch(root, name, [*_SETTINGS, *settings])
    family = psutil.Process(process.pid)
    seen: list[tuple[float, dict[int, Use]]] = []
    try:
        while (at := first_submitted(directory)) is None:
            if process.poll() is not None or time.time() > began + _LIMIT_SECONDS:
                raise RuntimeError(f"the run submitted no request: {log.read_text()}")
            seen.append((time.time(), uses(family)))
            time.sleep(_LOOK_SECONDS)
        last = uses(family, memory=True)
    finally:
        everyone = [family, *(family.children(recursive=True) if process.poll() is None else ())]
        for member in everyone:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(everyone, timeout=20)
    # Processes that ended before the first request count too. Processes that started after it count
    # with no CPU time.
    found = {pid: replace(use, cpu_seconds=0.0) for pid, use in last.items()}
    for when, looked in seen:
        if when <= at:
            for pid, use in looked.items():
                mib = last[pid].mib if pid in last else 0.0
                found[pid] = replace(use, mib=mib)
    return Start(at - began, list(found.values()))


def report(starts: list[Start]) -> str:
    """Return a table of the median start, with its processes sorted by CPU time."""
    median = sorted(starts, key=lambda start: start.wall_seconds)[len(starts) // 2]
    walls = ", ".join(f"{start.wall_seconds:.1f}" for start in starts)
    kinds: dict[str, list[Use]] = defaultdict(list)
    for use in median.uses:
        kinds[use.kind].append(use)

    def row(kind: str, of: list[Use]) -> tuple[object, ...]:
        cpu = sum(use.cpu_seconds for use in of)
        return kind, len(of), f"{cpu:.1f}", f"{sum(use.mib for use in of):.0f}"

    by_time = sorted(kinds.items(), key=lambda item: -sum(use.cpu_seconds for use in item[1]))
    rows = [row(kind, of) for kind, of in [*by_time, ("all", median.uses)]]
    middle = statistics.median(start.wall_seconds for start in starts)
    return (
        f"Wall to the first submitted request: {middle:.1f} s (median of {walls}).\n\n"
        f"{table('process | number | CPU s | MiB (PSS)', rows)}\n\n{made('benchmarks.starts')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="SETTING=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build_tiny_model(root / "model", seed=1)
        (root / "config.yaml").write_text(json.dumps({"model": {"path": str(root / "model")}}))
        starts = []
        for number in range(options.runs):
            starts.append(start(root, f"run{number}", options.settings))
            print(f"start {number}: {starts[-1].wall_seconds:.1f} s", flush=True)
        print(report(starts))


if __name__ == "__main__":
    main()
