"""Tests that a Ray cluster which does not start or cannot be joined causes an error of one sentence
and no other output."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.errors import ComponentFailure

ray = pytest.importorskip("ray")

from megatron_async.process_backends import ray_cluster  # noqa: E402

HOST = socket.gethostname()
SLOW = "The current node timed out during startup. This could happen because ..."


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a temporary folder Ray's directory, and return the folder."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_IGNORE_UNHANDLED_ERRORS"):
        # A variable that was set here is restored by monkeypatch after the test.
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray_cluster, "ray_directory", lambda: tmp_path)
    return tmp_path


def of_session(files: Path, name: str, **logs: str) -> Path:
    directory = files / name / "logs"
    directory.mkdir(parents=True)
    for log, text in logs.items():
        (directory / log).write_text(text)
    return directory.parent


def start(files: Path, monkeypatch: pytest.MonkeyPatch, failures: int) -> tuple[str, int]:
    """Start a Ray that fails `failures` times; return its address or error, and the attempts."""
    tried = []

    def init(**arguments: object) -> Any:
        tried.append(arguments)
        if len(tried) <= failures:
            raise Exception(SLOW)
        return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:7"})

    monkeypatch.setattr(ray, "init", init)
    try:
        return ray_cluster.start_ray(files / "token"), len(tried)
    except ComponentFailure as error:
        return str(error), len(tried)


def test_ray_start_is_retried_once_when_it_fails(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(files, monkeypatch, 0) == ("127.0.0.1:7", 1)
    assert start(files, monkeypatch, 1) == ("127.0.0.1:7", 2)


def test_ray_start_error_has_the_last_log_line_when_it_fails_twice(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_session(files, "session_2025_4711", raylet="of another process\n")
    own = of_session(files, f"session_2026_{os.getpid()}", gcs="it listens\nno more memory\n\n")
    sentence, tried = start(files, monkeypatch, 2)
    assert tried == 2
    assert sentence == (
        "Ray did not start in 2 attempts (Exception: The current node timed out during startup. "
        f"This could happen because ...): its last line is 'no more memory' ({own}/logs/gcs)"
    )


def test_ray_start_removes_files_of_ended_sessions_except_the_newest(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [of_session(files, f"session_{number}") for number in range(3)]
    found = [SimpleNamespace(info={"cmdline": ["raylet", f"--session={sessions[1].name}"]})]
    monkeypatch.setattr(ray_cluster.psutil, "process_iter", lambda _: found)
    start(files, monkeypatch, 0)
    assert [session.exists() for session in sessions] == [False, True, True]


def test_join_ray_error_is_one_message_when_the_cluster_is_missing(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**arguments: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setattr(ray, "init", init)
    why = rf"^the Ray cluster at 10.0.0.1:6379 cannot be joined from {HOST} \(ConnectionError: Fai"
    with pytest.raises(ComponentFailure, match=why):
        ray_cluster.join_ray("10.0.0.1:6379")


def test_ray_prints_no_traceback_when_a_reply_is_not_awaited(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private.worker import Worker

    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS")
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    failed: Any = SimpleNamespace(deserialize_objects=lambda *_: [ValueError("a wall")])
    Worker.raise_errors(failed, [], [])
    assert "a wall" in caplog.text
    caplog.clear()
    start(files, monkeypatch, 0)
    Worker.raise_errors(failed, [], [])
    assert caplog.text == ""
