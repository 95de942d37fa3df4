"""Checks of a machine for `doctor`, each with a remedy: driver, glibc, compilers, NCCL, InfiniBand,
limits and free space. `commands/doctor.py` lists the Python packages.

Invariants
- Nothing is started except `nvidia-smi` and `nvcc --version`, with a time limit; nothing is
  written.
- `checks` is a pure function of the facts about the machine.
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
# Minimum driver version that each major version of CUDA requires, according to NVIDIA, and the
# glibc that SGLang's kernel wheels require (manylinux_2_34).
MIN_DRIVER: Final = {13: 580, 12: 525}
MIN_GLIBC: Final = (2, 34)
MIN_OPEN_FILES: Final = 65_536
MIN_SHARED_MEMORY: Final = 16 * _GB
MIN_DISK: Final = 100 * _GB
# Assumed total size of the buffers that NCCL locks for all ranks of a node.
MIN_LOCKED_MEMORY: Final = 16 * _GB
_INFINIBAND: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine. None means that something is missing. Sizes are in bytes, and
    `open_files` and `locked_memory` are limits of a process.

    Attributes:
        locked_memory: The limit that `ulimit -l` shows; `resource.RLIM_INFINITY` for no limit.
        infiniband: Names of InfiniBand and RoCE devices.
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
    """One check, which `doctor` prints as a line. `found` is what was found. `problem` is what is
    wrong, with a remedy; empty if nothing is."""

    name: str
    found: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}" + (f" - {self.problem}" if self.problem else "")


def checks(machine: MachineFacts) -> list[Check]:
    """Return all checks of a machine, in the order in which the start of a run needs what they
    check. A machine without a GPU is not checked for CUDA."""
    found = [
        Check(
            "open files (ulimit -n)",
            f"{machine.open_files:,}",
            _below(machine.open_files, MIN_OPEN_FILES, "raise it: ulimit -n 65536"),
        ),
        Check(
            "shared memory (/dev/shm)",
            f"{machine.shared_memory / _GB:.1f} GB",
            _below(
                machine.shared_memory,
                MIN_SHARED_MEMORY,
                "Ray and NCCL need 16 GB: mount it larger (containers: --shm-size)",
            ),
        ),
        Check(
            "free disk here",
            f"{machine.disk / _GB:.0f} GB",
            _below(machine.disk, MIN_DISK, "a single checkpoint of a 7B model takes 91 GB"),
        ),
    ]
    if machine.cuda is None:
        return found
    for_gpu = [_driver(machine), _glibc(machine), *_build_tools(machine), _nccl(machine)]
    return [*for_gpu, *_infiniband(machine), *found]


def _below(value: float, minimum: float, remedy: str) -> str:
    """Return `remedy` if `value` is below `minimum`, else an empty string."""
    return remedy if value < minimum else ""


def _driver(machine: MachineFacts) -> Check:
    if machine.driver is None:
        return Check("driver", "not found", "nvidia-smi failed; is this a GPU node?")
    needed = MIN_DRIVER.get(_numbers(machine.cuda or "")[0], 0)
    version = _numbers(machine.driver)[0]
    problem = f"CUDA {machine.cuda} needs {needed} or newer" if version < needed else ""
    return Check("driver", machine.driver, problem)


def _glibc(machine: MachineFacts) -> Check:
    needed = ".".join(map(str, MIN_GLIBC))
    old = _numbers(machine.glibc) < MIN_GLIBC
    remedy = f"SGLang's kernels need {needed}: use a newer system or launch/Dockerfile"
    return Check("glibc", machine.glibc or "unknown", remedy if old else "")


def _build_tools(machine: MachineFacts) -> list[Check]:
    """Check the tools with which Triton, FlashInfer and torch.compile build kernels at their first
    call."""
    header = "found" if machine.python_header else None
    tools = (
        ("nvcc", machine.nvcc, "FlashInfer's kernels cannot be built: load a CUDA module"),
        ("C++ compiler", machine.compiler, "Triton cannot build its launchers: install g++"),
        ("Python.h", header, "Triton needs it: install python3-dev"),
    )
    return [
        Check(name, path or "not found", "" if path else remedy) for name, path, remedy in tools
    ]


def _nccl(machine: MachineFacts) -> Check:
    """Check that torch was built with the version of the installed NCCL package. All processes load
    that package's library, which must fit torch."""
    built, wheel = machine.nccl_torch, machine.nccl_wheel
    found = f"torch built with {built or 'none'}, wheel {wheel or 'none'}"
    same = built is None or wheel is None or _numbers(built)[:2] == _numbers(wheel)[:2]
    problem = (
        "" if same else "trainer and engines must use the same NCCL: reinstall from the lock file"
    )
    return Check("NCCL", found, problem)


def _infiniband(machine: MachineFacts) -> list[Check]:
    """Check what NCCL needs to use InfiniBand: libibverbs, without which it silently uses slower
    TCP, and enough locked memory."""
    devices = ", ".join(machine.infiniband)
    library = "found" if machine.verbs_library else "not found"
    limit = "unlimited"
    enough = machine.locked_memory == resource.RLIM_INFINITY
    if not enough:
        limit = f"{machine.locked_memory // 1024:,} KiB"
        enough = machine.locked_memory >= MIN_LOCKED_MEMORY
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
    """Return the numbers in a version string; (0,) if it has none."""
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)


def look() -> MachineFacts:
    """Collect the facts about this machine that `checks` needs, such as its CUDA driver, compilers,
    limits, InfiniBand devices and free space."""
    import torch

    driver = _line(0, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    # If the driver is too old for this torch, CUDA is not available. The driver is found
    # nevertheless, so that the machine is checked for CUDA.
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
        disk=_free(os.getcwd()),  # noqa: PTH109 - only a name, whose directory may be deleted
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
    """Return the free bytes of the file system at `path`; 0 if unknown."""
    try:
        return float(shutil.disk_usage(path).free)
    except OSError:
        return 0.0


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(number: int, *command: str) -> str | None:
    """Run a command and return line `number` of its output; None if the command fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[number] if lines and done.returncode == 0 else None
