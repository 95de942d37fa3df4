"""The fault programme finds a defect that is planted, and finds none in the product."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.rollout.engine_slot import EngineSlot
from megatron_async.trajectory.types import PolicyVersion
from tests.crash.faults import Fault
from tests.crash.world import settings, suffer
from tests.store.disk import needs_compiler


def test_tokens_that_are_stored_before_their_weights_are_verified_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def passes(slot: EngineSlot, version: PolicyVersion) -> bool:
        return True

    monkeypatch.setattr(EngineSlot, "passes", passes)
    faults = [Fault("engine holds another version than it reports", target=i) for i in range(3)]
    result = asyncio.run(suffer(tmp_path / "run", settings("pipeline"), faults))
    assert any(sentence.startswith("wrong tokens: ") for sentence in result.broken), result.broken


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    """As many as fit into 100 s; a failure prints the command that repeats its sequence."""
    command = [sys.executable, "-m", "tests.crash.fault_programme", "--faults", "500"]
    command += ["--seed", "7", "--seconds", "100", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    kept = re.findall(r"^\d+ (\w+): [1-9]\d* faults, .* 0 broken promises$", done.stdout, re.M)
    assert len(set(kept)) >= 3, done.stdout[-6000:]
