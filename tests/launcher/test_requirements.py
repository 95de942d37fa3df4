"""Tests the pinned packages: every package that a run needs installs without a compiler on every
supported Python.

The lock file of the GPU environment contains every pin of its requirements, and many more.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_async.files.package_files import ROOT

RUN = ("requirements-cpu.txt", "requirements-cpu-nodeps.txt")
GROUPS = (
    *RUN,
    "requirements-tasks.txt",
    "requirements-test.txt",
    "requirements-test-nodeps.txt",
    "requirements-docs.txt",
)
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def pins(name: str, python: str = "3.11") -> dict[str, str]:
    """Return the version of each package that `launch/name` pins for this Python."""
    found = {}
    for line in (ROOT / "launch" / name).read_text().splitlines():
        pin, _, marker = line.partition(";")
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ #]+)", pin)
        if match and (not marker or Marker(marker).evaluate({"python_version": python})):
            found[canonicalize_name(match[1])] = match[2]
    return found


def project() -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return settings


@cache
def index_is_reachable() -> bool:
    """Return whether pip reaches a package index."""
    command = [*_PIP, "--retries", "0", "--timeout", "10", "install", "--dry-run"]
    command += ["--ignore-installed", "--no-deps", "pip"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_of_a_run_has_a_wheel_for_python(python: str, tmp_path: Path) -> None:
    """pip reads `Requires-Python` and the wheels' tags for `python`, and installs nothing."""
    if "CI" not in os.environ and not index_is_reachable():
        pytest.skip("no package index is reachable")
    files = [argument for name in RUN for argument in ("-r", str(ROOT / "launch" / name))]
    command = [*_PIP, "install", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--target", str(tmp_path)]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_supported_python_versions_equal_the_checked_ones() -> None:
    supported = SpecifierSet(str(project()["requires-python"]))
    assert all(python in supported for python in PYTHONS)
    assert "3.10.0" not in supported and "3.14.0" not in supported
    script = (ROOT / "launch" / "setup_env.sh").read_text()
    assert "(3, 11) <= sys.version_info[:2]" in script and "newest=13" in script


@pytest.mark.parametrize("flavor", ["cpu", "gpu"])
def test_package_has_the_same_version_in_all_requirement_groups(flavor: str) -> None:
    """On a GPU the other groups are installed within the lock of the group `run`."""
    run = RUN if flavor == "cpu" else ("requirements-gpu-lock.txt",)
    versions: dict[str, set[str]] = {}
    for name in (*run, *(group for group in GROUPS if group not in RUN)):
        for package, version in pins(name).items():
            versions.setdefault(package, set()).add(version)
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_run_requirements_pin_all_required_and_no_optional_dependencies() -> None:
    run = {package: version for name in RUN for package, version in pins(name).items()}
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    for requirement in map(Requirement, dependencies):
        name = canonicalize_name(requirement.name)
        if name != "megatron-async-kernels":
            assert requirement.specifier.contains(run[name]), requirement
    assert not {"reasoning-gym", "pycosat", "ray", "pytest", "mkdocs", "wandb"} & run.keys()


LOCKED_PYTHONS = ("3.11", "3.12")  # SGLang pins outlines-core, which has no wheel for 3.13.


@pytest.mark.parametrize("python", LOCKED_PYTHONS)
def test_lock_has_every_requirement_and_satisfies_the_project(python: str) -> None:
    lock = pins("requirements-gpu-lock.txt", python)
    for name, version in pins("requirements-gpu.txt", python).items():
        assert lock[name] == version, name
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    for requirement in map(Requirement, dependencies):
        if requirement.name != "megatron-async-kernels":
            assert requirement.specifier.contains(lock[canonicalize_name(requirement.name)])


def test_image_has_the_cuda_version_of_the_locked_torch() -> None:
    """Apex refuses another minor version than torch was built with."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    image = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-", text, re.MULTILINE)
    lock = pins("requirements-gpu-lock.txt")
    assert image is not None and lock["nvidia-cuda-runtime"].startswith(f"{image[1]}.")
    assert f"core_cu{image[1].split('.')[0]}]" in text


def test_image_has_a_transformer_engine_that_megatron_supports() -> None:
    """Its extra `dev` has the range, which an installation without that extra does not check."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    version = re.search(r"^ARG TRANSFORMER_ENGINE=(.+)$", text, re.MULTILINE)
    required = map(Requirement, importlib.metadata.requires("megatron-core") or [])
    [engine] = [r for r in required if r.name == "transformer-engine"]
    assert version is not None and engine.specifier.contains(version[1])
