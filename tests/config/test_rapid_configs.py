"""Tests that each config configs/rapid-*.yaml reads and scores a row with its data set's published
columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, load_config
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import sample_of
from megatron_async.tasks import build_source

ROOT = Path(__file__).parents[2]
MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "The sum is $\\frac{2}{4}+\\frac{1}{4}=\\boxed{\\frac{3}{4}}$.",
}
MBPP_PLUS = {
    "task_id": 2,
    "code": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))",
    "prompt": "Write a function to find the shared elements from the given two lists.",
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "test_imports": [],
    "test_list": ["assert set(similar_elements((3, 4), (5, 4))) == set((4,))"],
    "test": (
        "inputs = [[(3, 4), (5, 4)]]\nresults = [(4,)]\n"
        "for inp, exp in zip(inputs, results):\n"
        "    assert set(similar_elements(*inp)) == set(exp)\n"
    ),
}
MINIF2F = {
    "name": "mathd_algebra_1",
    "split": "valid",
    "informal_prefix": "/-- Show that 1 + 1 = 2.-/\n",
    "formal_statement": "theorem mathd_algebra_1 : 1 + 1 = 2 := by\n  sorry",
    "header": "import Mathlib\n",
    "goal": "⊢ 1 + 1 = 2",
}


def load(name: str, row: dict[str, Any], folder: Path, *overrides: str) -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    more = (f"task.path={path}", "task.heldout_share=0", "task.scorer_timeout_seconds=40")
    return load_config(ROOT / "configs" / f"rapid-{name}.yaml", [*more, *overrides])


def scores(config: RunConfig, *responses: str) -> list[float]:
    payload = build_source(config.task).train(0).payload
    reward = build_reward(config.scorers, config.reward[0])
    return [reward.score([sample_of(payload, text)])[0].value for text in responses]


def test_rapid_math_config_scores_a_math_row(tmp_path: Path) -> None:
    config = load("math", MATH, tmp_path)
    assert scores(config, "So it is \\boxed{0.75}.", "\\boxed{\\frac{3}{5}}") == [1.0, 0.0]


def test_rapid_mbpp_config_scores_an_mbpp_plus_row(tmp_path: Path) -> None:
    config = load("mbpp", MBPP_PLUS, tmp_path)
    code = f"Sets do it:\n```python\n{MBPP_PLUS['code']}\n```"
    assert scores(config, code, code.replace("&", "|")) == [1.0, 0.0]


def test_rapid_minif2f_config_scores_a_proof_with_a_stand_in_for_lean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, lake = ROOT / "examples/lean/check_proof.py", tmp_path / "bin" / "lake"
    lake.parent.mkdir()
    lake.write_text("#!/bin/sh\ngrep -q norm_num\n")
    lake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lake.parent}:/usr/bin:/bin")
    command = json.dumps([sys.executable, str(checker), str(lake.parent)])
    readable = json.dumps([str(checker.parent), str(lake.parent)])
    reward = "{name: command, arguments: {command: %s, readable: %s, send: code}}"
    config = load("minif2f", MINIF2F, tmp_path, f"reward={reward % (command, readable)}")
    assert load("minif2f", MINIF2F, tmp_path).reward[0].arguments["send"] == "code"
    proof = "```lean4\nimport Mathlib\ntheorem mathd_algebra_1 : 1 + 1 = 2 := by\n  norm_num\n```"
    assert scores(config, proof, proof.replace("norm_num", "sorry")) == [1.0, 0.0]
