"""Megatron's compiled helpers, as a GPU has them, are not compiled anew for every microbatch.

The number of tokens changes with each of them. torch compiles a function for a first length and
once more for any length; what differs otherwise (gradients or none, strides, an expert's share)
comes on top, and past 8 graphs of a function torch gives up and runs it as it stands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LENGTHS = 12
# Lengths after which nothing new is compiled, and graphs of one function: half of torch's limit.
SETTLED, MAX_GRAPHS = 2, 4


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_twelve_lengths_are_compiled_as_two(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.recompiles", case, str(LENGTHS)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    graphs: list[dict[str, int]] = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(graphs) == LENGTHS
    assert any("swiglu" in name for name in graphs[0]), "it compiles nothing, so nothing is shown"
    assert graphs[-1] == graphs[SETTLED - 1]
    assert max(graphs[-1].values()) <= MAX_GRAPHS, graphs[-1]
