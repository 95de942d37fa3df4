"""Tests that Megatron's compiled helpers, as a GPU has them, are not recompiled for every
microbatch.

The number of tokens differs between microbatches. torch compiles a function for the first length
and once more for any length. Other differences (gradients or none, strides, the rows of an expert)
need further graphs. After 8 graphs of a function, torch runs the function uncompiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LENGTHS = 12
# Number of lengths after which no new graph is compiled, and the largest permitted number of graphs
# of one function, which is half of torch's limit.
SETTLED, MAX_GRAPHS = 2, 4


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_compiled_helpers_get_no_new_graph_after_two_lengths(case: str) -> None:
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
    assert any("swiglu" in name for name in graphs[0]), "the helpers must be compiled for this test"
    assert graphs[-1] == graphs[SETTLED - 1]
    assert max(graphs[-1].values()) <= MAX_GRAPHS, graphs[-1]
