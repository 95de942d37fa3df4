"""User files: clear refusals, a fixed order, disjoint sides, exact and mathematical comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.files import FileProblems


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture
def hundred(tmp_path: Path) -> str:
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(100)]
    return _write(tmp_path / "hundred.jsonl", rows)


def _config(path: str, **changes: Any) -> TaskConfig:
    settings = {"kind": "files", "name": "exact", "path": path, **changes}
    return TaskConfig.model_validate(settings)


def test_every_training_problem_comes_once_an_epoch(hundred: str) -> None:
    problems = FileProblems(_config(hundred, heldout_share=0.3))
    heldout = {p.question for p in problems.heldout(1)}
    sizes = set()
    for size in range(1, 100):
        if len({problems.train(i).question for i in range(size)}) < size:
            break
        sizes.add(size)
    epoch = max(sizes)
    first = [problems.train(i).question for i in range(epoch)]
    second = [problems.train(epoch + i).question for i in range(epoch)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert not heldout & set(first)


def test_both_sides_together_are_the_file(hundred: str) -> None:
    problems = FileProblems(_config(hundred, heldout_share=0.3))
    train = {problems.train(i).question for i in range(300)}
    with pytest.raises(UserError, match="has only") as caught:
        problems.heldout(101)
    heldout_size = int(str(caught.value).partition("has only ")[2].split()[0])
    assert len(train) + heldout_size == 100
    assert not train & {p.question for p in problems.heldout(heldout_size)}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{not json", ":2 is not valid JSON"),
        ("[1]", ":2 must be an object, got list"),
        ('{"prompt": "x"}', ":2: there is no column `answer` among"),
        ('{"prompt": ["x"], "answer": "1"}', ":2: `prompt` must be a text or a number"),
        ('{"prompt": "x", "answer": " "}', ":2: `answer` is empty"),
        (
            '{"prompt": "x", "answer": "1", "priority": "high"}',
            ":2: `priority` must be a whole number, got 'high'",
        ),
        ('{"prompt": "x", "answer": "1", "priority": 1.5}', "a whole number, got 1.5"),
        ('{"prompt": "x", "answer": "1", "priority": true}', "a whole number, got True"),
        ('{"prompt": "x", "answer": "1", "priority": null}', "a whole number, got None"),
        (
            '{"prompt": "x", "answer": "1", "priority": 1000001}',
            ":2: `priority` must be between -1000000 and 1000000, got 1000001",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=sentence) as caught:
        FileProblems(_config(str(path)))
    assert str(path) in str(caught.value)


def test_a_row_may_set_the_priority_of_its_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1, "priority": i} for i in range(9)]
    path = _write(tmp_path / "ranked.jsonl", [*rows, {"prompt": "What is 2 x 3?", "answer": 6}])
    problems = FileProblems(_config(path, heldout_share=0.001))
    found = {p.question: p.priority for p in (problems.train(i) for i in range(10))}
    assert found == {f"What is {i} + 1?": i for i in range(9)} | {"What is 2 x 3?": 0}


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.path .*nowhere.* cannot be read"):
        FileProblems(_config(str(tmp_path / "nowhere")))
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UserError, match="holds no lines"):
        FileProblems(_config(str(tmp_path / "empty")))


def test_a_row_reaches_its_scorer_with_its_other_columns(tmp_path: Path) -> None:
    row = {"prompt": "2+2", "answer": 4, "level": "easy", "tests": ["assert f() == 4"]}
    problems = FileProblems(_config(_write(tmp_path / "one.jsonl", [row]), heldout_share=1e-9))
    assert problems.train(0).payload == {
        "question": "2+2",
        "answer": "4",
        "metadata": {"level": "easy", "tests": ["assert f() == 4"]},
    }
