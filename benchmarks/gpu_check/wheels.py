"""Collects wheels for a GPU machine without a network: `... benchmarks.gpu_check --wheels DIR`.

The machine has Python 3.12 on x86-64 Linux, the packages of `MACHINE`, and no network.

Invariants
- Versions come from launch/requirements-gpu-lock.txt, for Python 3.12. This module pins only
  libraries that this file does not contain.
- Another collected wheel or the machine satisfies each requirement of each collected wheel.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_check.check import ROOT

LIMIT_MIB: Final = 40
MACHINE: Final = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "numpy": "2.5.2",
    "safetensors": "0.8.0",
}
# Packages for the trainer's checks, `doctor` and `head_peers`. Their requirements are added.
WANTED: Final = ("megatron-core", "einops", "pydantic", "pyyaml", "zstandard", "xxhash")
WANTED_BY_DOCTOR: Final = ("aiohttp", "msgspec", "orjson", "psutil")
PEERS: Final = {"liger-kernel": "0.8.5", "cut-cross-entropy": "25.1.1"}
PIP: Sequence[str] = (sys.executable, "-m", "pip")
_LOCK = ROOT / "launch/requirements-gpu-lock.txt"
_PYTHON = "3.12"
_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)))
_PIP_SECONDS = 300


class WheelsError(Exception):
    """Raised if wheels could not be collected; the message has the reason."""


def locked_versions() -> dict[str, str]:
    """Return the version of each package that the lock file pins for the machine's Python."""
    versions: dict[str, str] = {}
    for line in _LOCK.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text and _applies(requirement := Requirement(text)):
            versions[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    return versions


def collect_wheels(folder: Path) -> list[Path]:
    """Download the missing wheels and their requirements into `folder`.

    Args:
        folder: An empty or missing directory.

    Returns:
        The wheels, sorted by name.

    Raises:
        WheelsError: `folder` is not empty, pip failed, a requirement is not met, or the wheels take
            more than `LIMIT_MIB`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise WheelsError(f"{folder} is not empty. Name an empty or a new directory.")
    available = locked_versions() | PEERS
    missing = {*WANTED, *WANTED_BY_DOCTOR, *PEERS}
    while missing:
        if unknown := missing - available.keys():
            raise WheelsError(f"{', '.join(sorted(unknown))}: required, but {_LOCK.name} lacks it.")
        _download({name: available[name] for name in missing}, folder)
        missing = _unmet(folder)
    wheels = sorted(folder.glob("*.whl"))
    mib = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if mib > LIMIT_MIB:
        raise WheelsError(f"the wheels take {mib:.1f} MiB; the limit is {LIMIT_MIB} MiB.")
    return wheels


def main(folder: Path) -> int:
    """Collect the wheels; print their sizes and how to install them; return the exit code."""
    try:
        wheels = collect_wheels(folder)
    except WheelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in wheels}
    sizes["total"] = sum(sizes.values())
    for name, mib in sizes.items():
        print(f"{mib:6.2f} MiB  {name}")
    print(
        "Run on the machine, in the root of this repository:\n"
        f"  python3 -m pip install --no-index --no-deps --target {folder}/site {folder}/*.whl\n"
        f"  export PYTHONPATH=$PWD:$PWD/kernels:$(realpath {folder}/site)\n"
        "  python3 -m benchmarks.gpu_check"
    )
    return 0


def _applies(requirement: Requirement) -> bool:
    """Return whether the requirement's marker is true on the machine."""
    machine = {"python_version": _PYTHON, "python_full_version": f"{_PYTHON}.0", "extra": ""}
    machine |= {"platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux"}
    return requirement.marker is None or requirement.marker.evaluate(machine)


def _download(versions: Mapping[str, str], folder: Path) -> None:
    """Download wheels of exactly these versions for the machine, with pip."""
    command = [*PIP, "download", "--quiet", "--only-binary=:all:", "--no-deps", "--dest"]
    command += [str(folder), "--python-version", _PYTHON, "--implementation", "cp"]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    command += [f"{name}=={version}" for name, version in sorted(versions.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise WheelsError(f"pip download timed out after {_PIP_SECONDS} s.") from late
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()[-2000:]
        raise WheelsError(f"pip download failed with exit code {done.returncode}: {reason}")


def _unmet(folder: Path) -> set[str]:
    """Return the packages that the wheels require and that neither the wheels nor the machine have.

    Raises:
        WheelsError: The version of a package does not satisfy the requirement of a wheel.
    """
    metadata = [Parser().parsestr(text) for text in _metadata(folder)]
    present = MACHINE | {canonicalize_name(found["Name"]): found["Version"] for found in metadata}
    missing: set[str] = set()
    for wheel in metadata:
        for requirement in map(Requirement, wheel.get_all("Requires-Dist") or []):
            name = canonicalize_name(requirement.name)
            if not _applies(requirement):
                continue
            if name not in present:
                missing.add(name)
            elif not requirement.specifier.contains(present[name], prereleases=True):
                raise WheelsError(f"{wheel['Name']} requires {requirement}, not {present[name]}.")
    return missing


def _metadata(folder: Path) -> Iterator[str]:
    """Yield the METADATA of each wheel."""
    for wheel in folder.glob("*.whl"):
        with ZipFile(wheel) as archive:
            [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            yield archive.read(name).decode()
