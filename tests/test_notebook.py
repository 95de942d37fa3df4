"""Tests that the notebook of examples/ runs cell by cell, and that its model learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
# Runs the cells like a notebook's kernel: in one namespace, while an event loop runs.
KERNEL = """
import asyncio, json, sys
from pathlib import Path

async def run_cells(names):
    for source in json.load(sys.stdin):
        exec(compile(source, "cell", "exec"), names)

asyncio.run(run_cells(names := {"__name__": "__main__"}))
found = {"rewards": names["rewards"], "accuracy": names["run"].accuracy}
Path("found.json").write_text(json.dumps(found | {"export": str(names["run"].export)}))
"""


def sources() -> list[str]:
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "the notebook must be stored without outputs"
    return ["".join(cell["source"]) for cell in cells]


def test_notebook_cells_are_valid_python_in_lines_of_100_characters() -> None:
    for source in sources():
        compile(source, "cell", "exec")
        assert max(map(len, source.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_notebook_model_learns_to_write_digits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(sources()),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert fmean(found["rewards"][-3:]) > 0.5 > 0.2 > found["rewards"][0]
    assert found["accuracy"] is not None
    assert (Path(found["export"]) / "config.json").is_file()
    assert "step   19/19" in done.stdout, "progress must be printed line by line"
