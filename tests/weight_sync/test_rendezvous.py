"""Tests that the sender and SGLang's engines construct the weight group in the same way, on CPU and
on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.weight_sync.nccl_errors import WEIGHT_GROUP_VARIABLES


@pytest.fixture(scope="module")
def observed() -> dict[str, dict[str, object]]:
    """Return the output of `sglang_rendezvous` for each kind of device."""
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
def test_sglang_joins_in_the_senders_store_and_without_an_nccl_watchdog(
    device: str, observed: dict[str, dict[str, object]]
) -> None:
    keys = {"cpu": device == "cpu", "cuda": device == "cuda"}
    assert observed[device] == {**keys, "variables": WEIGHT_GROUP_VARIABLES}
