"""Tests `megatron-async reward`, which scores the responses of a file as a run would, and refuses
invalid lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
OWN = """
def score(sample):
    print("looks at", sample.response)
    right = float(str(sample.answer) in sample.response)
    return right, {"right": right, "level": float(sample.metadata["level"])}


async def waits(sample):
    return 0.5


def rank(samples):
    return [float(len(sample.response)) for sample in samples]
"""


def call(
    folder: Path, lines: list[Any], *overrides: str, rewards: Any = "own.py:score", **task: Any
) -> Result:
    (folder / "own.py").write_text(OWN)
    settings: dict[str, Any] = {"reward": rewards, "task": task}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    (folder / "r.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = ["--config", str(folder / "run.yaml"), "--responses", str(folder / "r.jsonl")]
    return CliRunner().invoke(app, ["reward", *files, *overrides])


def without_times(text: str) -> str:
    return re.sub(r"\d+\.\d{3} s$", "T s", text, flags=re.M)


def test_reward_command_prints_the_documented_output(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Try a reward without a run")[2]
    lines, printed = re.findall(r"```(?:json|text)\n(.*?)```", section, re.S)[:2]
    done = call(tmp_path, [json.loads(line) for line in lines.splitlines()])
    assert done.exit_code == 1, "one of the four scores has failed"
    shown = printed.replace("/home/me", str(tmp_path))
    assert without_times(done.stdout) == without_times(shown)
    assert "looks at So it is 4." in done.stderr
    assert f'File "{tmp_path / "own.py"}", line 5, in score' in done.stderr


def test_reward_command_reads_data_columns_and_weights_several_rewards(
    tmp_path: Path,
) -> None:
    row = {"problem": "2+2?", "key": {"value": 4}, "level": 3}
    rewards = [
        "own.py:score",
        {"name": "own.py:waits", "weight": 2.0},
        {"name": "own.py:rank", "group": True, "weight": 0.0},
    ]
    columns = {"prompt": "problem", "answer": "key.value"}
    task = {"kind": "files", "path": "elsewhere.jsonl", "columns": columns}
    done = call(tmp_path, [{**row, "response": ["4", "five"]}], rewards=rewards, **task)
    assert without_times(done.stdout).splitlines()[:2] == [
        "line 1: 2 (score.right 1, score.level 3, score 1, waits 0.5, rank 1), T s",
        "line 1: 1 (score.right 0, score.level 3, score 0, waits 0.5, rank 4), T s",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p", "answer": 1}, "r.jsonl:2: `response` must be a text.*, got None"),
        ({"response": [], "index": 0}, r":2: `response` must be .* got \[\]"),
        ({"response": ["a", 1], "index": 0}, r":2: `response` must be .* got \['a', 1\]"),
        ({"response": "a", "index": -1}, ":2: `index` must be an integer of at least 0, got -1"),
        ({"response": "a", "index": True}, ":2: `index` must be .* got True"),
        ({"response": "a"}, ":2: there is no column `prompt`"),
        ({"response": "a", "prompt": "p"}, ":2: there is no column `answer`"),
        ([1], ":2 must be a JSON object, got list"),
    ],
)
def test_reward_command_scores_no_response_when_a_line_is_invalid(
    tmp_path: Path, line: Any, message: str
) -> None:
    done = call(tmp_path, [{"response": "a", "index": 0}, line])
    assert isinstance(done.exception, UserError) and done.stdout == ""
    assert re.search(message, str(done.exception))


def test_reward_command_names_responses_by_their_line_in_the_file(tmp_path: Path) -> None:
    call(tmp_path, [], rewards="exact")  # Writes the settings file.
    line = '{"response": "4", "prompt": "2+2?", "answer": 4}\n'
    (tmp_path / "r.jsonl").write_text(f"\n{line}\n{line}")
    files = ["--config", str(tmp_path / "run.yaml"), "--responses", str(tmp_path / "r.jsonl")]
    done = CliRunner().invoke(app, ["reward", *files])
    assert [text[:6] for text in done.stdout.splitlines()[:2]] == ["line 2", "line 4"]


def test_reward_command_refuses_missing_file_and_missing_function(tmp_path: Path) -> None:
    done = call(tmp_path, [{"response": "a", "index": 0}], rewards="own.py:nothing")
    assert re.search("has no 'nothing'", str(done.exception))
    files = ["--config", str(tmp_path / "run.yaml"), "--responses", str(tmp_path / "none.jsonl")]
    found = CliRunner().invoke(app, ["reward", *files]).exception
    assert isinstance(found, UserError)
    assert re.search(r"--responses '.*none\.jsonl' cannot be read: there is no such", str(found))
