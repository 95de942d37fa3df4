"""Tests files as sources of problems: formats, columns, weights, order, and excluded problems."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.data import DataConfig, FileConfig
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.tasks import build_task
from megatron_async.tasks.base import Problem
from megatron_async.tasks.files import FileProblems, ProblemFile, file_for_turn
from megatron_async.tasks.layouts import Columns

Rows = list[dict[str, Any]]
SUMS: Rows = [
    {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(90)
]


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=40)
    return path


def write_saved_dataset(path: Path, rows: Rows) -> Path:
    """Write `train` in two shards as `datasets.DatasetDict.save_to_disk` does (version 5.2.0)."""
    arrow = pytest.importorskip("pyarrow")
    train = path / "train"
    train.mkdir(parents=True)
    (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    table = arrow.Table.from_pylist(rows)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, 50), table.slice(50)), strict=True):
        with arrow.ipc.new_stream(str(train / name), table.schema) as writer:
            writer.write_table(part, max_chunksize=20)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (train / "state.json").write_text(json.dumps(state))
    return path


def write_folder(path: Path, rows: Rows) -> Path:
    path.mkdir()
    write_jsonl(path / "train-00000-of-00002.jsonl", rows[:50])
    write_jsonl(path / "train-00001-of-00002.jsonl", rows[50:])
    return path


def config(path: Path | str = "", **changes: Any) -> TaskConfig:
    return TaskConfig.model_validate({"name": "exact", "path": str(path), **changes})


def questions(problems: FileProblems, begin: int, count: int) -> list[str]:
    return [problems.train(i).question for i in range(begin, begin + count)]


@pytest.mark.parametrize(
    "write",
    [write_jsonl, write_parquet, write_saved_dataset, write_folder],
    ids=lambda f: f.__name__,
)
def test_file_problems_are_the_same_in_every_format(
    tmp_path: Path, write: Callable[[Path, Rows], Path]
) -> None:
    plain = FileProblems(config(write_jsonl(tmp_path / "plain.jsonl", SUMS)))
    problems = FileProblems(config(write(tmp_path / "written", SUMS)))
    assert [problems.train(i) for i in range(200)] == [plain.train(i) for i in range(200)]
    assert problems.heldout(5) == plain.heldout(5)
    assert problems.train(0).payload["metadata"] == {
        "level": plain.train(0).payload["metadata"]["level"]
    }


def test_saved_dataset_is_read_without_the_datasets_library() -> None:
    """Read `tests/data/saved_dataset`, which datasets 5.2.0 wrote with `train` shuffled in two
    shards.
    """
    pytest.importorskip("pyarrow")
    folder = Path(__file__).parents[1] / "data" / "saved_dataset"
    train = ProblemFile(FileConfig(path=str(folder), split="train"), "task.path")
    test = ProblemFile(FileConfig(path=str(folder), split="test"), "eval.sets.held.path")
    found = [file[i].payload["answer"] for file in (train, test) for i in range(len(file))]
    assert sorted(map(int, found)) == list(range(1, 91)) and found[:80] != sorted(found[:80])
    assert train.where(45).endswith("train/data-00001-of-00002.arrow, row 6")


def test_index_of_a_large_file_is_cached_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.tasks.files.MIN_CACHED_ROWS", 90)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[str] = []
    problem = Columns.problem

    def noted(columns: Columns, row: Any, where: str, **more: Any) -> Problem:
        read.append(where)
        return problem(columns, row, where, **more)

    monkeypatch.setattr(Columns, "problem", noted)

    def rows_read(**changes: Any) -> int:
        read.clear()
        FileProblems(config(path, **changes))
        return len(read)

    path = write_jsonl(tmp_path / "large.jsonl", SUMS)
    assert [rows_read(), rows_read()] == [90, 0]
    again = FileProblems(config(path))
    assert questions(again, 0, 90) == questions(FileProblems(config(path)), 0, 90)
    assert rows_read(filter={"level": 1}) == 30, "other settings have a separate index"
    write_jsonl(path, [*SUMS, {"prompt": "one more", "answer": "1"}])
    assert [rows_read(), rows_read()] == [91, 0]
    (kept, _) = sorted((tmp_path / "cache" / "megatron_async").iterdir())
    for damaged in (b"", kept.read_bytes()[:-8], b"x" * 40):
        for file in (tmp_path / "cache" / "megatron_async").iterdir():
            file.write_bytes(damaged)
        assert [rows_read(), rows_read()] == [91, 0]
    # The cache folder cannot be created, because a file has its path.
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert [rows_read(), rows_read()] == [91, 91]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=lambda f: f.__name__)
def test_file_problems_do_not_keep_rows_in_memory(
    tmp_path: Path, write: Callable[[Path, Rows], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.tasks.rows._IN_MEMORY_BYTES", 0)
    text = "Explain every step of the way. " * 64
    written = [f"{i} {text}" for i in range(4000)]
    rows = [{"prompt": question, "answer": i} for i, question in enumerate(written)]
    path = write(tmp_path / "long", rows)
    del rows
    arrow = pytest.importorskip("pyarrow")
    before = arrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        problems = FileProblems(config(path))
        questions(problems, 0, 100)
        used = tracemalloc.get_traced_memory()[0] + arrow.total_allocated_bytes() - before
    finally:
        tracemalloc.stop()
    assert used < 1_000_000, "4,000 rows of 2 KB are 8 MB"
    found = set(questions(problems, 0, 4000))
    assert found <= set(written) and len(found) > 3000, "some rows are held out"


def test_problem_file_reads_the_split_that_is_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", SUMS[:40])
    write_jsonl(tmp_path / "test.jsonl", SUMS[40:])
    assert len(ProblemFile(FileConfig(path=str(tmp_path), split="test"), "eval.sets.x.path")) == 50
    for split, message in [("", "has several splits"), ("dev", "has no split 'dev'")]:
        with pytest.raises(UserError, match=f"{message}: set split to one of test, train"):
            ProblemFile(FileConfig(path=str(tmp_path), split=split), "eval.sets.held.path")


def test_training_and_held_out_problems_partition_the_file(tmp_path: Path) -> None:
    problems = FileProblems(config(write_jsonl(tmp_path / "s.jsonl", SUMS), heldout_share=0.3))
    train = set(questions(problems, 0, 300))
    with pytest.raises(UserError, match="has only") as caught:
        problems.heldout(101)
    heldout_size = int(str(caught.value).partition("has only ")[2].split()[0])
    assert len(train) + heldout_size == len(SUMS)
    assert not train & {p.question for p in problems.heldout(heldout_size)}


def test_file_problems_are_refused_when_file_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.path .*nowhere.* cannot be read"):
        FileProblems(config(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UserError, match="holds no lines"):
        FileProblems(config(tmp_path / "empty"))


def test_problem_file_keeps_only_rows_that_match_the_filter(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", SUMS)
    nested = write_jsonl(
        tmp_path / "nested.jsonl", [{**row, "of": {"level": row["level"]}} for row in SUMS]
    )
    for rows, name in ((path, "level"), (nested, "of.level")):
        file = ProblemFile(FileConfig(path=str(rows), filter={name: 2}), "task.path")
        assert {file[i].payload["metadata"]["level"] for i in range(len(file))} == {2}
    with pytest.raises(UserError, match=r"no row that matches the filter \{'level': 7\}"):
        ProblemFile(FileConfig(path=str(path), filter={"level": 7}), "task.path")


GSM8K = {
    "question": "Tom has 3.",
    "answer": "He gets 1,197.\n3+1197=<<3+1197=1200>>1200\n#### 1,200",
}
MATH = {
    "problem": "Half?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"So $\boxed{\frac{1}{2}}$.",
}
AIME = {"ID": "2024-I-1", "Problem": "Walk?", "Solution": "long", "Answer": 204}
DEEPSCALER = {"problem": "Root?", "answer": "-\\frac{2}{3}", "solution": "because"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
MBPP = {
    "task_id": 2,
    "code": "def f(a): return a",
    "prompt": "Write f.",
    "source_file": "x.ipynb",
    "test_imports": [],
    "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
    "test": "assert f(3) == 3",
}
MINIF2F = {
    "name": "mathd_algebra_1",
    "split": "valid",
    "informal_prefix": "/-- One. -/",
    "formal_statement": "theorem a : 1 = 1 := by",
    "goal": "⊢ 1 = 1",
    "header": "import Mathlib\n\n",
}


@pytest.mark.parametrize(
    ("layout", "row", "question", "answer"),
    [
        ("gsm8k", GSM8K, "Tom has 3.", "1200"),
        ("math", MATH, "Half?", r"\frac{1}{2}"),
        ("math", {**DEEPSCALER, "unique_id": "MATH-500"}, "Root?", "-\\frac{2}{3}"),
        ("aime", AIME, "Walk?", "204"),
        ("aime", {"problem": "Walk?", "answer": "070", "id": 1}, "Walk?", "070"),
        ("deepscaler", DEEPSCALER, "Root?", "-\\frac{2}{3}"),
        ("dapo_math", DAPO, "Solve it.", "34"),
        ("mbpp_plus", MBPP, "Write f.", ""),
        ("minif2f", MINIF2F, "theorem a : 1 = 1 := by", ""),
    ],
)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=lambda f: f.__name__)
def test_layout_reads_question_and_answer_of_a_published_data_set(
    tmp_path: Path,
    layout: str,
    row: dict[str, Any],
    question: str,
    answer: str,
    write: Callable[[Path, Rows], Path],
) -> None:
    if write is write_parquet and row is MBPP:
        # In Arrow, a column of empty lists has no element type.
        row = {**row, "test_imports": ["import math"]}
    path = write(tmp_path / "file", [row])
    problem = FileProblems(config(path, layout=layout, heldout_share=0)).train(0)
    assert (problem.question, problem.payload["answer"]) == (question, answer)


PIECES = r"\left\{\begin{array}{ll}2x & x>0\\ -x & x\le 0\end{array}\right."


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (rf"First some work. Then $f=\boxed{{{PIECES}}}$, as we wanted.", PIECES),
        (r"So $\boxed{\{1, 2\}}$.", r"\{1, 2\}"),
        (r"So $\boxed{(0, 1\}}$.", r"(0, 1\}"),
        (r"$\boxed{1}$, no, $\boxed{2}$ and not \boxed{", "2"),
        (r"So $\boxed {\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"So $\fbox{3}$.", "3"),
        (r"So $\\boxed{9}$.", "9"),
        (r"So \boxed{a \\{b} c}.", r"a \\{b} c"),
    ],
)
def test_math_layout_reads_answer_from_last_closed_box(
    tmp_path: Path, solution: str, answer: str
) -> None:
    path = write_jsonl(tmp_path / "math.jsonl", [{"problem": "Give f.", "solution": solution}])
    problem = FileProblems(config(path, layout="math", heldout_share=0)).train(0)
    assert problem.payload["answer"] == answer


@pytest.mark.parametrize("solution", [r"So \boxed{1.", r"\boxed{1\}", r"\boxed{ }", "So 1."])
def test_math_layout_refuses_row_when_solution_has_no_closed_box(
    tmp_path: Path, solution: str
) -> None:
    path = write_jsonl(tmp_path / "math.jsonl", [{"problem": "Give f.", "solution": solution}])
    with pytest.raises(
        UserError, match=r"math\.jsonl:1: column 'solution' contains no final answer"
    ):
        FileProblems(config(path, layout="math", heldout_share=0))


def test_columns_settings_name_other_columns(tmp_path: Path) -> None:
    row = {"q": "1+1", "gold": {"value": 2, "level": 3}, "p": 5}
    path = write_jsonl(tmp_path / "own.jsonl", [row])
    columns = {"prompt": "q", "answer": "gold.value", "priority": "p"}
    problem = FileProblems(config(path, columns=columns, heldout_share=0)).train(0)
    assert (problem.question, problem.payload["answer"], problem.priority) == ("1+1", "2", 5)
    assert problem.payload["metadata"] == {"gold": row["gold"]}, (
        "a reward may need the other values"
    )
    free = FileProblems(config(path, columns={**columns, "answer": ""}, heldout_share=0)).train(0)
    assert free.payload == {"question": "1+1", "answer": "", "metadata": {"gold": row["gold"]}}


def asked(role: str, content: Any) -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": content}], "answer": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "answer": "1"}, r"there is no column `prompt` among \['answer', 'quest"),
        ({"prompt": ["x"], "answer": "1"}, "`prompt` must be a text or a number"),
        ({"prompt": "x", "answer": True}, "`answer` must be a text or a number, got True"),
        ({"prompt": "x", "answer": " "}, "`answer` is empty"),
        ({**SUMS[0], "priority": "high"}, "`priority` must be a whole number, got 'high'"),
        ({**SUMS[0], "priority": True}, "`priority` must be a whole number, got True"),
        ({**SUMS[0], "priority": 1.5}, "`priority` must be a whole number, got 1.5"),
        (
            {**SUMS[0], "priority": 1000001},
            "`priority` must be between -1000000 and 1000000, got 1000001",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "image": "a"}]}],
                "answer": 1,
            },
            "column 'prompt', message 1 holds a part of type 'image'; only text can be trained on",
        ),
        (
            {"prompt": [{"role": "ai", "content": "a"}], "answer": 1},
            "message 1: `role` must be one",
        ),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}, "the role 'user'"),
    ],
)
@pytest.mark.parametrize(
    ("write", "location"),
    [(write_jsonl, ":1"), (write_parquet, ", row 1")],
    ids=["jsonl", "parquet"],
)
def test_invalid_row_is_refused_with_its_location_and_column(
    tmp_path: Path,
    write: Callable[[Path, Rows], Path],
    location: str,
    row: dict[str, Any],
    message: str,
) -> None:
    path = write(tmp_path / "bad", [row])
    with pytest.raises(UserError, match=message) as caught:
        FileProblems(config(path))
    assert f"task.path {path}{location}" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"is_binary": True},
        {"binary": {"binary_op": ["binary"]}},
        {"scores": [{"binary": 0.5}]},
    ],
)
def test_columns_are_read_when_their_names_contain_binary(tmp_path: Path, extra: Any) -> None:
    row = {"prompt": "x", "answer": "y", "extra": extra}
    path = write_parquet(tmp_path / "rows.parquet", [row])
    problem = FileProblems(config(path, heldout_share=0)).train(0)
    assert problem.payload["metadata"] == {"extra": extra}


@pytest.mark.parametrize(
    "column",
    [b"x", [b"x"], {"bytes": b"x"}, {"a": [{"b": b"x"}]}],
    ids=["flat", "list", "struct", "deep"],
)
def test_parquet_file_is_refused_when_a_column_holds_bytes_at_any_depth(
    tmp_path: Path, column: Any
) -> None:
    path = write_parquet(tmp_path / "b.parquet", [{"prompt": "x", "answer": "y", "z": column}])
    with pytest.raises(UserError, match=r"column 'z' has the type .*binary"):
        FileProblems(config(path))


def test_damaged_parquet_file_is_refused_with_its_setting_and_path(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "whole.parquet", SUMS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"task.path .*whole.parquet cannot be read"):
        FileProblems(config(path))


# ------------------------------------------------------------ several files


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 400))
def test_turn_alternates_between_files_by_weight(weights: list[int], position: int) -> None:
    shares = [Fraction(weight) for weight in weights]
    counts = Counter[int]()
    for at in range(position):
        number, before = file_for_turn(at, shares)
        assert before == counts[number], "no row is skipped and none is repeated"
        counts[number] += 1
    for number, weight in enumerate(weights):
        assert abs(counts[number] - position * weight / sum(weights)) < len(weights)


def test_file_problems_ask_each_row_once_per_epoch_when_a_run_is_restored(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", SUMS[:20])
    large = write_jsonl(tmp_path / "large.jsonl", SUMS[20:])
    sources = [{"path": str(small), "weight": 0.3}, {"path": str(large), "weight": 0.7}]
    settings = config(sources=sources, heldout_share=0)
    whole = questions(FileProblems(settings), 0, 300)
    restored = [FileProblems(settings).train(i).question for i in range(137, 300)]
    assert restored == whole[137:]
    of_small = [q for q in whole if q in {row["prompt"] for row in SUMS[:20]}]
    assert len(of_small) == 90
    for epoch in range(4):
        assert len(set(of_small[20 * epoch : 20 * epoch + 20])) == 20
    assert of_small[:20] != of_small[20:40]


def test_file_problems_do_not_train_on_problems_of_eval_sets(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", SUMS)
    copies = [{"prompt": f" {row['prompt'].upper()}", "answer": 0} for row in SUMS[:30]]
    file = ProblemFile(
        FileConfig(path=str(write_jsonl(tmp_path / "t.jsonl", copies))), "eval.sets.held.path"
    )
    problems = FileProblems(config(train, heldout_share=0), file.keys)
    assert set(questions(problems, 0, 60)) == {row["prompt"] for row in SUMS[30:]}


def test_file_problems_raise_when_file_changes_after_indexing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", SUMS)
    problems = FileProblems(config(path, heldout_share=0))
    path.write_text(path.read_text().replace("What", "Whut"))
    with pytest.raises(UserError, match=r"sums.jsonl:\d+ has changed since the file was indexed"):
        problems.train(0)


# ------------------------------------------------------------ lengths


def test_check_lengths_removes_and_counts_long_prompts_when_filter_is_set(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    rows = [{"prompt": "1" * length, "answer": 1} for length in (5, 60, 30, 70)]
    path = write_jsonl(tmp_path / "lengths.jsonl", rows)
    settings = config(path, heldout_share=0, long_prompts="filter")
    task = build_task(settings, str(tmp_path))
    assert task.check_lengths(150, 100) == 2
    asked = task.train_prompts(0, 8)
    assert sorted(len(prompt.token_ids) for prompt in asked) == [5] * 4 + [30] * 4
    again = build_task(settings, str(tmp_path))
    again.check_lengths(150, 100)
    pairs = zip(again.train_prompts(0, 8), asked, strict=True)
    assert all(one.payload == two.payload for one, two in pairs)
    with pytest.raises(UserError, match="no training problem left"):
        build_task(settings, str(tmp_path)).check_lengths(102, 100)


def test_data_config_is_refused_when_settings_exclude_each_other() -> None:
    for given_, message in [
        ({"path": "a", "sources": [{"path": "b"}]}, "task.path and task.sources are both set"),
        ({"kind": "reasoning_gym", "path": "a"}, "task.kind .* which reads no files"),
        ({"heldout_share": 0}, "task.heldout_share is 0, which requires task.kind files"),
    ]:
        with pytest.raises(ValueError, match=message):
            DataConfig.model_validate(given_)
