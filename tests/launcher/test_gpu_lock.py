"""The lock file of the GPU environment holds every pin of its requirements, and far more."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_async.files.package_files import ROOT
from tests.launcher.test_requirements import pins, project

PYTHONS = ("3.11", "3.12")  # outlines-core, which SGLang pins, has no wheel for 3.13


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_locked_at_its_version(python: str) -> None:
    lock = pins("requirements-gpu-lock.txt", python)
    for name, version in pins("requirements-gpu.txt", python).items():
        assert lock[name] == version, name


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_satisfies_every_dependency_of_the_project(python: str) -> None:
    lock = pins("requirements-gpu-lock.txt", python)
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    for requirement in map(Requirement, dependencies):
        if requirement.name != "megatron-async-kernels":
            assert requirement.specifier.contains(lock[canonicalize_name(requirement.name)])


def test_the_image_compiles_for_the_cuda_of_the_locked_torch() -> None:
    """Apex refuses another minor version than torch was built with."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    image = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-", text, re.MULTILINE)
    lock = pins("requirements-gpu-lock.txt")
    assert image is not None and lock["nvidia-cuda-runtime"].startswith(f"{image[1]}.")
    assert f"core_cu{image[1].split('.')[0]}]" in text


def test_the_image_has_a_transformer_engine_that_megatron_takes() -> None:
    """Its extra `dev` has the range, which an installation without that extra does not check."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    version = re.search(r"^ARG TRANSFORMER_ENGINE=(.+)$", text, re.MULTILINE)
    wanted = map(Requirement, importlib.metadata.requires("megatron-core") or [])
    [engine] = [r for r in wanted if r.name == "transformer-engine"]
    assert version is not None and engine.specifier.contains(version[1])
