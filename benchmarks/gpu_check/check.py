"""Defines a check and its result, and runs a check in a separate process with a time limit.

Invariants
- Checks cannot affect each other, because a device error or a hang ends with the check's process.
- A result is written when its check ends. No number is estimated or copied from another result.
- If a module is missing, the check is skipped and its result names the module. After any other
  error, the check has failed and its result has the traceback.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks import reporting
from benchmarks.reporting import ROOT, commit

RESULTS = reporting.RESULTS / "gpu"
_LOG_TAIL = 3000
_GIB = 2**30
# Time limits are meant for a GPU node without other work. On a laptop or in CI, where only `doctor`
# and trial runs are possible, other work shares the cores, so the limits are multiplied by this
# factor.
_PATIENCE_ON_CPU = 5
_OURS = ("megatron_async", "megatron_async_kernels", "benchmarks", "tests")

Status = Literal["ok", "failed", "skipped"]
Figures = Mapping[str, Any]
"""Measured values that a check returns; they must be valid JSON."""


class CheckFailed(Exception):
    """Raised by a failing check; the message names the failed condition and the measured value."""


@dataclass(frozen=True)
class Stage:
    """Environment of a check.

    Attributes:
        device: Device type, `cuda` or `cpu`.
        trial_run: Whether the check runs at toy sizes on the CPU, only to try its code.
        scratch: Temporary directory.
    """

    device: str
    trial_run: bool
    scratch: Path


@dataclass(frozen=True)
class Check:
    """A check: its function and requirements.

    Attributes:
        name: Name of the check.
        part: Number of the part that contains the check.
        limit_seconds: Time limit on a GPU machine.
        run: Runs the check.
        needs: Modules that the check needs in addition to torch.
        cuda: Whether the check cannot run without a CUDA device, not even as a trial run.
        cpu_too: Whether the check also runs on a machine without a CUDA device.
    """

    name: str
    part: int
    limit_seconds: int
    run: Callable[[Stage], Figures]
    needs: tuple[str, ...] = ()
    cuda: bool = False
    cpu_too: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a check, one line of the result file."""

    check: str
    part: int
    status: Status
    reason: str
    seconds: float
    peak_memory_gib: float
    device: str
    versions: Mapping[str, str]
    commit: str
    date: str
    trial_run: bool = False
    figures: Figures = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps(asdict(self))


def found(module: str) -> bool:
    """Return whether this interpreter finds the module `module`."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def reason_to_skip(check: Check, *, trial_run: bool) -> str | None:
    """Return the reason why the check cannot run on this machine, or None if it can."""
    import torch

    if not torch.cuda.is_available() and not check.cpu_too:
        if check.cuda:
            return "no CUDA device"
        if not trial_run:
            return "no CUDA device (--trial-run tries its code on the CPU)"
    missing = [module for module in check.needs if not found(module)]
    return f"cannot be imported: {', '.join(missing)}" if missing else None


@cache
def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages on which results depend."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "megatron-core", "transformer-engine", "sglang"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def result_of(
    check: Check,
    status: Status,
    reason: str,
    *,
    seconds: float = 0.0,
    peak: float = 0.0,
    trial_run: bool = False,
    figures: Figures | None = None,
) -> Result:
    """Return the result of a check, with this machine's device, versions, commit and date."""
    return Result(
        check=check.name,
        part=check.part,
        status=status,
        reason=reason,
        seconds=round(seconds, 2),
        peak_memory_gib=round(peak / _GIB, 3),
        device=device_name(),
        versions=versions(),
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        trial_run=trial_run,
        figures=figures or {},
    )


def run_here(check: Check, *, trial_run: bool) -> Result:
    """Run the check in this process; return its result."""
    import torch

    began = time.monotonic()
    on_gpu = torch.cuda.is_available()
    trial_run = trial_run and not on_gpu
    status: Status
    figures = None
    try:
        with TemporaryDirectory(prefix="gpu_check_") as scratch:
            stage = Stage("cuda" if on_gpu else "cpu", trial_run, Path(scratch))
            figures = check.run(stage)
        status, reason = "ok", ""
    except ModuleNotFoundError as missing:
        module = (missing.name or "").split(".")[0]
        status = "failed" if module in _OURS else "skipped"
        reason = f"cannot be imported: {missing.name}"
    except CheckFailed as failed:
        status, reason = "failed", str(failed)
    except Exception:  # noqa: BLE001 - every error is a result of the check
        status, reason = "failed", traceback.format_exc()[-_LOG_TAIL:]
    peak = (
        torch.cuda.max_memory_allocated()
        if on_gpu
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return result_of(
        check,
        status,
        reason,
        seconds=time.monotonic() - began,
        peak=peak,
        trial_run=trial_run,
        figures=figures,
    )


def run_apart(check: Check, *, trial_run: bool) -> Result:
    """Run the check in a separate process with a time limit; return its result."""
    limit = check.limit_seconds * (_PATIENCE_ON_CPU if device_name() == "cpu" else 1)
    with TemporaryDirectory(prefix="gpu_check_") as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", check.name]
        command += ["--answer", str(answer), *(["--trial-run"] if trial_run else [])]
        began = time.monotonic()
        try:
            # Only results go to stdout, so the check's own output goes to stderr.
            done = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=2, timeout=limit)
            if answer.exists():
                return Result(**json.loads(answer.read_text()))
            reason = f"the check's process ended with code {done.returncode} without a result"
        except subprocess.TimeoutExpired:
            reason = f"had not ended after {limit} s"
    return result_of(check, "failed", reason, seconds=time.monotonic() - began)


def _environment() -> dict[str, str]:
    """Return environment variables with which both packages can be imported if not installed."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


class ResultFile:
    """File with the results of one device, one JSON line per result."""

    def __init__(self, folder: Path) -> None:
        name = "".join(c if c.isalnum() else "-" for c in device_name())
        self.path = folder / f"{name}.jsonl"
        self._kept = RESULTS / self.path.name

    def done(self) -> set[str]:
        """Return the names of checks with an `ok` line for these versions of torch and triton."""
        found = set()
        for path in {self.path, self._kept}:
            if not path.exists():
                continue
            for line in path.read_text().splitlines():
                result = json.loads(line)
                same = all(
                    result["versions"].get(name) == versions().get(name)
                    for name in ("torch", "triton")
                )
                if result["status"] == "ok" and same:
                    found.add(result["check"])
        return found

    def add(self, result: Result) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(result.line() + "\n")
