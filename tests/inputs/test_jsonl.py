"""Tests that any JSONL file of problems either gives its rows, line by line, or is refused with a
message of one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.files import FileProblems
from megatron_async.tasks.rows import open_rows
from tests.fuzz import accepted, damaged, fuzzed, json_texts

_texts = st.text(max_size=8) | st.sampled_from(["a\u2028b", "a\u2029b", "a\x85b", "\x0b", "\x1c"])
_rows = st.fixed_dictionaries(
    {"prompt": _texts | st.integers(), "answer": _texts | st.floats(allow_nan=False)},
    optional={"priority": st.integers(), "more": _texts},
)
_good_lines = st.builds(
    lambda row, raw: json.dumps(row, ensure_ascii=not raw), _rows, st.booleans()
)
_damaged_lines = st.builds(
    lambda key, text: '{"prompt": "a", "answer": "b", ' + f'"{key}": {text}' + "}",
    st.sampled_from(["prompt", "answer", "priority", "more"]),
    json_texts,
)
_lines = (_good_lines | _damaged_lines | json_texts).map(
    lambda line: line.encode("utf-8", "surrogatepass")
)
_files = st.builds(
    lambda lines, end, last: end.join(lines) + last,
    st.lists(_lines | st.binary(max_size=6) | st.just(b""), max_size=4),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n", b"\r\n"]),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jsonl") / "problems.jsonl"


def _problems(file: Path) -> FileProblems:
    return FileProblems(TaskConfig(kind="files", name="exact", path=str(file), heldout_share=1e-12))


def _expected(content: bytes) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
            if line.strip()]  # fmt: skip
    return [(str(row["prompt"]), str(row["answer"])) for row in rows]


def _assert_equals_file(file: Path) -> None:
    problems = accepted(lambda: _problems(file))
    if problems is not None:
        expected = _expected(file.read_bytes())
        found = [problems.train(index) for index in range(len(expected))]
        assert sorted((p.question, p.payload["answer"]) for p in found) == sorted(expected)
        for problem in found:
            json.dumps(problem.payload).encode()
            problem.question.encode()


@fuzzed(400)
@given(_files)
def test_fuzzed_problem_file_is_read_or_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _assert_equals_file(file)


@fuzzed(150)
@given(st.data())
def test_fuzzed_problem_file_is_read_or_refused_when_bytes_change(
    file: Path, data: st.DataObject
) -> None:
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1, "priority": i} for i in range(3)]
    undamaged = "\n".join(json.dumps(row) for row in rows) + "\n"
    file.write_bytes(data.draw(damaged(undamaged.encode())))
    _assert_equals_file(file)


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_jsonl_lines_end_only_at_a_newline(file: Path, inside: str) -> None:
    row = {"prompt": f"a{inside}b", "answer": f"c{inside}d"}
    text = json.dumps(row, ensure_ascii=inside < " ")
    file.write_bytes(f'{text}\r\n\n{{"prompt": "last", "answer": 1}}'.encode())
    problems = _problems(file)
    found = {p.question: p.payload["answer"] for p in (problems.train(i) for i in range(2))}
    assert found == {f"a{inside}b": f"c{inside}d", "last": "1"}
    assert len(open_rows(str(file), "", "sft.data")) == 2


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (rb'{"prompt": "\ud800", "answer": "b"}', "`prompt` holds half of a surrogate pair"),
        (rb'{"prompt": "a", "answer": "\udfff"}', "`answer` holds half of a surrogate pair"),
        (b'{"prompt": "a", "answer": NaN}', "is not valid JSON: NaN is not a JSON number"),
        (b'{"prompt": "a", "answer": 1e999}', "`answer` must be a text or a number, got inf"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "is not valid JSON: it holds a number of thousands"),
        (b"[" * 200_000, "is not valid JSON: it is nested too deeply"),
        (b'{"prompt": "\xff", "answer": "b"}', r"is not UTF-8 text \(byte 12\)"),
    ],
)
def test_file_problems_name_the_line_that_cannot_be_read(
    file: Path, line: bytes, sentence: str
) -> None:
    file.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line + b"\n")
    with pytest.raises(UserError, match=sentence) as caught:
        _problems(file)
    assert f"{file}:2" in str(caught.value)


def test_file_problems_refuse_a_path_that_is_not_a_file() -> None:
    settings: dict[str, Any] = {"kind": "files", "name": "exact"}
    for path in ("", "a\0b"):
        with pytest.raises(UserError, match="cannot be read"):
            FileProblems(TaskConfig(**settings, path=path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", {"_data_files": 3}),
        ("state.json", {"_data_files": [[]]}),
        ("dataset_dict.json", {"splits": None}),
        ("dataset_dict.json", {"splits": ["."]}),
        ("dataset_dict.json", {"splits": [{}]}),
    ],
)
def test_open_rows_refuses_a_directory_that_datasets_has_not_saved(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"in {file} is .* it is a list of names"):
        open_rows(str(tmp_path), "", "task.path")


def test_open_rows_refuses_a_pipe_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="is not a regular file"):
        open_rows(str(tmp_path / "rows.jsonl"), "", "task.path")
