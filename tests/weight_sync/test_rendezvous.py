"""Our sender and SGLang's engines meet under the same keys of the store, on CPU and on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, bool]]:
    """By the device of the group: the devices under whose keys SGLang has met."""
    pytest.importorskip("sglang")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.weight_sync.sglang_rendezvous"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cpu, cuda = map(json.loads, done.stdout.strip().splitlines()[-2:])
    return {**cpu, **cuda}


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sglangs_group_builder_meets_where_the_sender_waits(
    device: str, seen: dict[str, dict[str, bool]]
) -> None:
    assert seen[device] == {"cpu": device == "cpu", "cuda": device == "cuda"}
