"""Tests the line that identifies a run's rewards: it differs if accuracies are not comparable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.config import build_config
from megatron_async.scoring.identity import reward_identity


def identity(**settings: Any) -> str:
    """Return the line that identifies the rewards of a run with these settings."""
    return reward_identity(build_config(settings))


def test_reward_identity_names_rewards_arguments_weights_and_task() -> None:
    assert identity() == "task chain_sum"
    math = {"name": "math", "weight": 0.5, "arguments": {"tolerance": 0.1}}
    assert identity(reward=["exact", math]) == 'exact + 0.5 x math {"tolerance": 0.1}'


def test_reward_identity_changes_when_content_of_reward_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample): return 1.0\n")
    before = identity(reward=f"{file}:score")
    assert before.startswith("mine.py:score (content ")
    moved = tmp_path / "moved" / "mine.py"
    moved.parent.mkdir()
    moved.write_text(file.read_text())
    assert identity(reward=f"{moved}:score") == before
    file.write_text("def score(sample): return 0.5\n")
    assert identity(reward=f"{file}:score") != before


def test_reward_identity_names_environment_and_its_arguments() -> None:
    name = "examples.guessing_game.game:Game"
    played = identity(environment={"name": name, "arguments": {"highest": 9}})
    assert played == f'{name} {{"highest": 9}}'
    assert identity(environment=name, reward="math") == f"math + {name}"


def test_reward_identity_changes_when_program_of_agent_changes(tmp_path: Path) -> None:
    file = tmp_path / "agent.js"
    file.write_text("1")
    before = identity(agent={"command": ["node", str(file)]})
    assert before.startswith("node agent.js (content ")
    file.write_text("2")
    assert identity(agent={"command": ["node", str(file)]}) != before
