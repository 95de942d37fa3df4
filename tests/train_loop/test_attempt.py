"""Tests attempts of the trainer: their restart count, the failures that belong to them, and the
settings that trackers get."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.errors import ATTEMPT_LINE
from megatron_async.run_directory import RunDirectory
from megatron_async.train_loop.attempt import (
    FIRST_LINEAGE_VARIABLE,
    begin_attempt,
    current_attempt,
    restarts,
)
from megatron_async.trainer.device import import_megatron


@pytest.mark.parametrize(
    ("first", "lineage", "own", "expected"),
    [
        ("3", 3, "0", 0),
        ("3", 5, "2", 2),
        ("3", 5, "0", 2),  # This node's agent counts a change of members as no restart.
        ("3", 3, "1", 1),  # The attempt before had ended before it had a lineage.
        (None, 7, "0", 0),
    ],
)
def test_restarts_are_equal_on_all_nodes_when_torchrun_counts_differ(
    first: str | None, lineage: int, own: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", own)
    if first is None:
        monkeypatch.delenv(FIRST_LINEAGE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(FIRST_LINEAGE_VARIABLE, first)
    assert restarts(lineage) == expected


def test_begin_attempt_removes_only_failures_of_earlier_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.config_file.touch()
    monkeypatch.setenv("MASTER_PORT", "1001")
    directory.report_failure("the disk was full", 1, current_attempt())
    directory.report_failure("a rank lost its connection", 1, current_attempt())
    monkeypatch.setenv("MASTER_PORT", "1002")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert begin_attempt(directory) == "" and capfd.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert begin_attempt(directory) == "the disk was full"
    assert capfd.readouterr().out == f"{ATTEMPT_LINE}\n"
    assert directory.pop_failure() is None
    directory.report_failure("the disk is full again", 1, current_attempt())
    begin_attempt(directory)
    remaining = directory.pop_failure()
    assert remaining is not None and remaining["message"] == "the disk is full again", (
        "the failure of this attempt must stay"
    )


def test_tracker_gets_all_settings_except_the_engine_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_megatron()
    from megatron_async.train_loop import assembly

    seen: list[Any] = []
    monkeypatch.setattr(assembly, "start_trackers", lambda _, run: [seen.append(run.config)][:0])
    config = build_config({"root": str(tmp_path), "engines": {"api_key": "secret"}})
    directory = RunDirectory.create(config)
    with ExitStack() as stack:
        assembly.writer(directory, config, stack, lineage=0)
    [settings] = seen
    assert settings["engines"]["count"] == config.engines.count
    assert "secret" not in repr(settings)
