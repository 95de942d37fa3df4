"""Tests the machine checks of `doctor`, which report each problem with its remedy."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.commands import doctor, machine_checks
from megatron_async.commands.machine_checks import MachineFacts, checks, look
from megatron_async.errors import UserError

FILE = str(Path(__file__).parents[2] / "configs" / "smollm2.yaml")
GOOD = MachineFacts(
    driver="580.95.05",
    cuda="13.0",
    glibc="2.35",
    nvcc="Build cuda_13.0.r13.0",
    compiler="/usr/bin/g++",
    python_header=True,
    open_files=1_048_576,
    locked_memory=resource.RLIM_INFINITY,
    infiniband=("mlx5_0", "mlx5_1"),
    verbs_library=True,
    shared_memory=500e9,
    disk=5e12,
    nccl_torch="2.28.9",
    nccl_wheel="2.28.9",
)


def test_machine_checks_report_no_problem_when_the_machine_is_good() -> None:
    assert [check for check in checks(GOOD) if check.problem] == []


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        ({"driver": "570.86.15"}, "driver", "CUDA 13.0 needs 580 or newer"),
        ({"driver": None}, "driver", "nvidia-smi failed"),
        ({"glibc": "2.31"}, "glibc", "SGLang's kernels need 2.34"),
        ({"nvcc": None}, "nvcc", "load a CUDA module"),
        ({"compiler": None}, "C++ compiler", "install g++"),
        ({"python_header": False}, "Python.h", "install python3-dev"),
        ({"open_files": 1024}, "open files (ulimit -n)", "ulimit -n 65536"),
        ({"shared_memory": 64e6}, "shared memory (/dev/shm)", "--shm-size"),
        ({"disk": 20e9}, "free disk here", "checkpoint"),
        ({"verbs_library": False}, "libibverbs", "NCCL uses TCP instead of mlx5_0, mlx5_1"),
        ({"locked_memory": 2**23}, "locked memory (ulimit -l)", "--ulimit memlock=-1"),
        ({"nccl_wheel": "2.26.2"}, "NCCL", "must use the same NCCL"),
    ],
)
def test_machine_checks_report_each_problem_with_its_remedy(
    change: dict[str, Any], name: str, remedy: str
) -> None:
    [found] = [check for check in checks(replace(GOOD, **change)) if check.problem]
    assert found.name == name and remedy in found.problem


def test_machine_checks_ignore_verbs_and_locked_memory_without_infiniband() -> None:
    without_infiniband = replace(GOOD, infiniband=(), verbs_library=False, locked_memory=2**23)
    [line] = [check for check in checks(without_infiniband) if check.name == "InfiniBand"]
    assert str(line) == "InfiniBand: no device; libibverbs not found; locked memory 8,192 KiB"


def test_machine_checks_accept_an_older_driver_when_cuda_is_older() -> None:
    older = replace(GOOD, driver="535.183.01", cuda="12.8")
    assert [check for check in checks(older) if check.problem] == []


def test_machine_checks_skip_cuda_items_when_torch_has_no_cuda() -> None:
    names = {check.name for check in checks(replace(GOOD, cuda=None, driver=None, nvcc=None))}
    assert not names & {"driver", "nvcc", "NCCL", "glibc"}


def test_machine_checks_report_a_driver_too_old_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a driver torch reports no GPU at all."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_checks, "_line", lambda *_: "570.86.15")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    found = {check.name: check.problem for check in checks(look())}
    assert found["driver"] == "CUDA 13.0 needs 580 or newer"


def test_doctor_prints_every_machine_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: replace(GOOD, driver="570.86.15"))
    lines = [line.strip() for line in doctor.report_lines()]
    for check in checks(replace(GOOD, driver="570.86.15")):
        assert str(check) in lines, check.name


@pytest.mark.parametrize(
    "command",
    [["doctor"], ["doctor", "--config", FILE], ["settings"], ["settings", "--of", FILE]],
    ids=" ".join,
)
def test_command_output_fits_eighty_columns(command: list[str]) -> None:
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    refused = FILE in command and command[0] == "doctor"  # The config's model does not exist here.
    assert isinstance(done.exception, UserError) if refused else done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
