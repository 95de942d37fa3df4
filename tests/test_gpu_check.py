"""Tests `benchmarks.gpu_check` without a GPU: skipped checks, the result file, repeated runs, and
trial runs on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import check as gpu_check
from benchmarks.gpu_check.__main__ import _run, main
from benchmarks.gpu_check.check import (
    Check,
    CheckFailed,
    Figures,
    ResultFile,
    Stage,
    result_of,
    run_apart,
    run_here,
)
from benchmarks.gpu_check.checks import CHECKS, PART_SECONDS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests machines without CUDA")


def named(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


def ending_in(error: Exception) -> Callable[[Stage], Figures]:
    def run(_stage: Stage) -> Figures:
        raise error

    return run


@pytest.mark.parametrize("part", sorted({check.part for check in CHECKS}))
def test_time_limits_of_a_gpu_check_part_fit_into_nine_minutes(part: int) -> None:
    assert sum(check.limit_seconds for check in CHECKS if check.part == part) <= PART_SECONDS


@pytest.mark.slow
@pytest.mark.one_core
def test_gpu_check_prints_skip_reasons_when_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in lines] == [check.name for check in CHECKS]
    (executed,) = (line for line in lines if line["check"] == "doctor")
    others = [line for line in lines if line is not executed]
    assert (executed["check"], executed["status"]) == ("doctor", "ok")
    assert any(line.startswith("Python ") for line in executed["figures"]["lines"])
    for line in others:
        assert line["status"] == "skipped" and line["reason"].startswith("no CUDA device")
        assert line["versions"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == []  # No result file is written for a CPU.


def test_gpu_check_records_skipped_checks_when_an_import_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "device_name", lambda: "H999")
    check = Check("x", 1, 1, ending_in(ValueError()), ("no_such",), cpu_too=True)
    assert _run([check], tmp_path, again=False, trial_run=False) == 0
    line = json.loads((tmp_path / "H999.jsonl").read_text())
    assert (line["status"], line["reason"]) == ("skipped", "cannot be imported: no_such")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (CheckFailed("too far apart"), "failed", "too far apart"),
        (ModuleNotFoundError("", name="liger_kernel.x"), "skipped", "liger_kernel.x"),
        (ModuleNotFoundError("", name="megatron_async.gone"), "failed", "megatron_async.gone"),
        (RuntimeError("illegal memory access"), "failed", "illegal memory access"),
    ],
)
def test_gpu_check_status_depends_on_the_error_of_the_check(
    error: Exception, status: str, reason: str
) -> None:
    result = run_here(Check("x", 1, 1, ending_in(error)), trial_run=True)
    assert result.status == status and reason in result.reason


def test_gpu_check_result_file_lists_successful_checks_of_these_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ResultFile(tmp_path)
    file.add(result_of(named("rates"), "ok", ""))
    file.add(result_of(named("head_rates"), "failed", "slow"))
    assert file.done() == {"rates"}
    monkeypatch.setattr(gpu_check, "versions", lambda: {"torch": "2.99", "triton": "3.6"})
    assert file.done() == set()


def test_gpu_check_is_ended_when_it_exceeds_its_time_limit() -> None:
    hanging = Check("doctor", 1, 0, named("doctor").run)
    result = run_apart(hanging, trial_run=False)
    assert (result.status, result.reason) == ("failed", "had not ended after 0 s")


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize(
    "name",
    ["trainer_parity", "trainer_window", "checkpoint", "host_copies", "trainer_updates"],
)
def test_trainer_gpu_check_passes_a_trial_run(name: str) -> None:
    result = run_here(named(name), trial_run=True)
    assert (result.status, result.reason) == ("ok", "")
