"""The lock file of the GPU environment holds every pin of its requirements, and far more."""

from __future__ import annotations

import importlib.metadata
import re

from packaging.requirements import Requirement

from megatron_async.files.package_files import ROOT
from tests.launcher.test_requirements import pins


def test_every_requirement_is_locked_at_its_version() -> None:
    lock = pins("requirements-gpu-lock.txt")
    for name, version in pins("requirements-gpu.txt").items():
        assert lock[name] == version, name


def test_what_decides_numbers_is_locked() -> None:
    lock = pins("requirements-gpu-lock.txt")
    wanted = {"torch", "triton", "numpy", "transformers", "sglang-kernel", "flashinfer-python"}
    assert wanted <= set(lock) and any(name.startswith("nvidia-nccl-cu") for name in lock)
    assert len(lock) > 150


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
