"""Checks of a machine beyond its Python packages, for `doctor`: each with its remedy.

Invariants
- Nothing is started but `nvidia-smi` and `nvcc --version`, within a limit, and nothing is written.
- `checks` is pure: what was found in, sentences out.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_GB: Final = 1e9
_COMMAND_SECONDS: Final = 20.0
# CUDA 13's own minimum; the glibc of SGLang's kernel wheels (manylinux_2_34).
LEAST_DRIVER: Final = {13: 580, 12: 525}
LEAST_GLIBC: Final = (2, 34)
LEAST_OPEN_FILES: Final = 65_536
LEAST_SHARED_MEMORY: Final = 16 * _GB
LEAST_DISK: Final = 100 * _GB
LEAST_LOCKED_MEMORY: Final = 16 * _GB  # for NCCL's buffers of all ranks of a node (assumed)
_INFINIBAND: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine; None: not there. Sizes are in bytes.

    `locked_memory` is the limit that `ulimit -l` shows, or `resource.RLIM_INFINITY` for unlimited.
    `infiniband` has the names of InfiniBand and RoCE devices.
    """

    driver: str | None = None
    cuda: str | None = None
    glibc: str = ""
    nvcc: str | None = None
    compiler: str | None = None
    python_header: bool = False
    open_files: int = 0
    locked_memory: int = 0
    infiniband: tuple[str, ...] = ()
    verbs_library: bool = False
    shared_memory: float = 0.0
    disk: float = 0.0
    nccl_torch: str | None = None
    nccl_wheel: str | None = None


@dataclass(frozen=True)
class Check:
    """A line of `doctor`; `problem` empty: as it should be."""

    name: str
    found: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}" + (f" - {self.problem}" if self.problem else "")


def checks(machine: MachineFacts) -> list[Check]:
    """Return each check in the order in which a start needs it; a CPU needs no CUDA."""
    found = [
        Check(
            "open files (ulimit -n)",
            f"{machine.open_files:,}",
            _below(machine.open_files, LEAST_OPEN_FILES, "raise it: ulimit -n 65536"),
        ),
        Check(
            "shared memory (/dev/shm)",
            f"{machine.shared_memory / _GB:.1f} GB",
            _below(
                machine.shared_memory,
                LEAST_SHARED_MEMORY,
                "Ray and NCCL want 16 GB: mount it larger (containers: --shm-size)",
            ),
        ),
        Check(
            "free disk here",
            f"{machine.disk / _GB:.0f} GB",
            _below(machine.disk, LEAST_DISK, "a checkpoint of a 7B model alone takes 91 GB"),
        ),
    ]
    if machine.cuda is None:
        return found
    built = [_driver(machine), _glibc(machine), *_build_tools(machine), _nccl(machine)]
    return [*built, *_infiniband(machine), *found]


def _below(value: float, least: float, remedy: str) -> str:
    return remedy if value < least else ""


def _driver(machine: MachineFacts) -> Check:
    if machine.driver is None:
        return Check("driver", "not found", "nvidia-smi does not answer; is this a GPU node?")
    needed = LEAST_DRIVER.get(_numbers(machine.cuda or "")[0], 0)
    have = _numbers(machine.driver)[0]
    problem = f"CUDA {machine.cuda} needs {needed} or newer" if have < needed else ""
    return Check("driver", machine.driver, problem)


def _glibc(machine: MachineFacts) -> Check:
    needed = ".".join(map(str, LEAST_GLIBC))
    old = _numbers(machine.glibc) < LEAST_GLIBC
    remedy = f"SGLang's kernels need {needed}: use a newer system or launch/Dockerfile"
    return Check("glibc", machine.glibc or "unknown", remedy if old else "")


def _build_tools(machine: MachineFacts) -> list[Check]:
    """Check what Triton, FlashInfer and torch.compile build with at the first call."""
    header = "found" if machine.python_header else None
    tools = (
        ("nvcc", machine.nvcc, "FlashInfer's kernels cannot be built: load a CUDA module"),
        ("C++ compiler", machine.compiler, "Triton cannot build its launchers: install g++"),
        ("Python.h", header, "Triton needs it: install python3-dev"),
    )
    return [Check(name, at or "not found", "" if at else remedy) for name, at, remedy in tools]


def _nccl(machine: MachineFacts) -> Check:
    """Trainer and engines load the wheel's library; torch was built with one of its own."""
    built, wheel = machine.nccl_torch, machine.nccl_wheel
    found = f"torch built with {built or 'none'}, wheel {wheel or 'none'}"
    same = built is None or wheel is None or _numbers(built)[:2] == _numbers(wheel)[:2]
    problem = "" if same else "both sides must load one NCCL: reinstall from the lock file"
    return Check("NCCL", found, problem)


def _infiniband(machine: MachineFacts) -> list[Check]:
    """Check the needs of NCCL over InfiniBand. Without libibverbs it silently uses TCP."""
    devices = ", ".join(machine.infiniband)
    library = "found" if machine.verbs_library else "not found"
    limit = "unlimited"
    enough = machine.locked_memory == resource.RLIM_INFINITY
    if not enough:
        limit = f"{machine.locked_memory // 1024:,} KiB"
        enough = machine.locked_memory >= LEAST_LOCKED_MEMORY
    if not devices:
        return [Check("InfiniBand", f"no device; libibverbs {library}; locked memory {limit}")]
    no_library = f"NCCL uses TCP instead of {devices}: install libibverbs1 (rdma-core)"
    too_little = (
        f"NCCL cannot register memory with {devices}: ulimit -l unlimited (Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK; containers: --ulimit memlock=-1)"
    )
    return [
        Check("InfiniBand", devices),
        Check("libibverbs", library, "" if machine.verbs_library else no_library),
        Check("locked memory (ulimit -l)", limit, "" if enough else too_little),
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)


def look() -> MachineFacts:
    """Return what this machine has."""
    import torch

    driver = _line(0, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    # A driver that is too old for this torch makes CUDA unavailable.
    cuda = torch.version.cuda if driver or torch.cuda.is_available() else None
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return MachineFacts(
        driver=driver,
        cuda=cuda,
        glibc=platform.libc_ver()[1],
        nvcc=_line(-1, "nvcc", "--version"),
        compiler=shutil.which("g++") or shutil.which("clang++"),
        python_header=header.is_file(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=tuple(sorted(path.name for path in _INFINIBAND.glob("*"))),
        verbs_library=_loads("libibverbs.so.1"),
        shared_memory=_free("/dev/shm"),
        disk=_free(os.getcwd()),  # noqa: PTH109 - a name, which may be gone
        nccl_torch=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        nccl_wheel=installed(f"nvidia-nccl-cu{cuda.split('.')[0]}") if cuda else None,
    )


def _loads(library: str) -> bool:
    """Return whether the dynamic loader finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _free(path: str) -> float:
    try:
        return float(shutil.disk_usage(path).free)
    except OSError:
        return 0.0


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(number: int, *command: str) -> str | None:
    """Return a line of what a command prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[number] if lines and done.returncode == 0 else None
