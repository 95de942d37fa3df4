"""Tests that every assumed constant is in the output of `simulate` and `plan`, and in the docs."""

from __future__ import annotations

from pathlib import Path

from megatron_async.config.simulate import SimulateConfig
from megatron_async.simulate.assumptions import (
    CODE_CONSTANTS,
    Constant,
    assumptions,
    assumptions_of_all,
    setting_constants,
)
from tests.simulate.test_world import config

DOCS = Path(__file__).parents[2] / "docs" / "simulator.md"
HEADING = "## Assumed constants"


def row(constant: Constant) -> str:
    return f"| `{constant.name}` | {constant.value} | {constant.meaning} |"


def test_docs_list_every_assumed_constant_with_its_default() -> None:
    section = DOCS.read_text().split(HEADING)[1].split("\n## ")[0]
    written = [line for line in section.splitlines() if line.startswith("| `")]
    now = [row(constant) for constant in (*setting_constants(SimulateConfig()), *CODE_CONSTANTS)]
    assert written == now, "the rows must be:\n" + "\n".join(now)


def test_assumptions_show_the_values_of_the_run() -> None:
    assert "simulate.load_report_seconds: 0.5" in assumptions(
        config("copris", load_report_seconds=0.5)
    )


def test_assumptions_of_all_label_those_that_differ() -> None:
    small, large = config("copris"), config("copris", model="qwen2.5-7b")
    lines = assumptions_of_all([("small", small), ("large", large)])
    for label, point in (("small", small), ("large", large)):
        model = next(line for line in assumptions(point) if line.startswith("model: "))
        assert f"{label}: {model}" in lines
    # The line appears once, because both systems share the value.
    assert "simulate.efficiency.links: 0.7" in lines
    assert len(lines) == len(set(lines)) < 2 * len(assumptions(small))
