"""Tests examples/: the user's reward with its Parquet file, and the Lean check with a fake Lean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.config import load_config
from megatron_async.scoring.rewards.check import check_rewards
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import RewardScore, sample_of
from megatron_async.tasks import build_source

ROOT = Path(__file__).parents[3]


def test_example_reward_scores_rows_of_its_parquet_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("examples/own_reward/config.yaml")
    source = build_source(config.task)
    assert len(source.heldout(config.eval.prompts)) == config.eval.prompts
    problem = source.train(0)
    payload = problem.payload
    assert payload["metadata"]["terms"] == len(problem.question.replace("-", "+").split("+"))
    check_rewards(config.scorers, payload)
    reward = build_reward(config.scorers, config.reward[0])

    def score(response: str) -> RewardScore:
        """Return the example reward's score of a response to one fixed question."""
        (found,) = reward.score([sample_of({"question": "3+4-2", "answer": "5"}, response)])
        return found

    assert score("3+4=7;7-2=5#5") == RewardScore(1.0, {"right": 1.0, "steps": 1.0})
    assert score("3+4=7;7-2=6#6") == RewardScore(0.1, {"right": 0.0, "steps": 0.5})
    assert score("#5") == RewardScore(1.0, {"right": 1.0, "steps": 0.0})
    assert score("") == RewardScore(0.0, {"right": 0.0, "steps": 0.0})
    assert len((ROOT / "examples/own_reward/reward.py").read_text().splitlines()) < 30


STATEMENT = "theorem two : 1 + 1 = 2 := by\n  sorry"


@pytest.mark.parametrize(
    ("proof", "passes"),
    [
        ("theorem two :  1 + 1 = 2 := by\n  norm_num -- so it is", True),
        ("theorem two : 1 + 1 = 2 := by\n  wrong_tactic", False),
        ("theorem two : 1 + 1 = 2 := by\n  sorry", False),
        ("axiom all : False\ntheorem two : 1 + 1 = 2 := by\n  norm_num", False),
        ("theorem other : True := by\n  norm_num", False),
        ("", False),
    ],
)
def test_check_proof_passes_when_lean_accepts_proof_of_rows_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: str, passes: bool
) -> None:
    """The fake Lean accepts a text that starts with the header and contains `norm_num`."""
    lake = tmp_path / "lake"
    lake.write_text(
        "#!/bin/sh\ntest \"$*\" = 'env lean --stdin' || exit 9\n"
        "text=$(cat)\necho \"$text\" | head -1 | grep -q 'import Mathlib' || exit 1\n"
        'echo "$text" | grep -q norm_num\n'
    )
    lake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "row.json").write_text(json.dumps({"prompt": STATEMENT}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/lean/check_proof.py"), str(tmp_path)],
        cwd=tmp_path,
        input=proof,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if passes else 1)
