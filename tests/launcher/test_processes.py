"""The environment that torchrun starts with."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_async.launcher import processes


def test_torchrun_keeps_the_users_directory_of_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, str]] = []

    class Recorded:
        def __init__(self, _command: object, *, env: Mapping[str, str], **_: object) -> None:
            started.append(env)

        def end(self) -> None:
            """There is no process."""

    monkeypatch.setattr(processes, "ChildProcess", Recorded)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    with processes.torchrun(1, "a.module", log_file=tmp_path / "log", environment={"A": "1"}):
        [environment] = started
    assert environment["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert environment["SGLANG_CACHE_DIR"] == f"/tmp/megatron-async-compiled-{os.getuid()}/sglang"
    assert environment["A"] == "1"
