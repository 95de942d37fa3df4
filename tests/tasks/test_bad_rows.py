"""Tests that unusable rows of data files are refused and listed, or skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.data import FileConfig
from megatron_async.config.evaluation import EvalConfig, EvalSetConfig
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.launcher.preflight import check_run
from megatron_async.models.tiny_model import character_tokenizer
from megatron_async.tasks import build_task, index_cache
from megatron_async.tasks.build import build_source
from megatron_async.tasks.text_task import TextTask
from tests.inputs.model_directories import write_model

BAD = (
    "{not json",
    '{"prompt": "no answer"}',
    '{"prompt": " ", "answer": 1}',
    "[1, 2]",
    '{"prompt": "x", "answer": null}',
)


def write(file: Path, good: int, bad: int) -> Path:
    """Write `good` usable rows and `bad` unusable ones, each bad row after two good ones.

    Rows alternate in this way as long as there are good rows.
    """
    rows = [json.dumps({"prompt": f"{i}+{i}=", "answer": 2 * i}) for i in range(good)]
    for number in range(bad):
        rows.insert(min(3 * number + 1, len(rows)), BAD[number % len(BAD)])
    file.write_text("\n".join(rows) + "\n")
    return file


def settings(folder: Path, file: Path, **task: Any) -> RunConfig:
    return build_config(
        {
            "model": {"path": str(folder / "model")},
            "task": {"name": "exact", "path": str(file), "heldout_share": 0.2, **task},
            "schedule": {"groups_per_batch": 4},
            "sft": {"batch_sequences": 4},
            "eval": {"prompts": 2},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", "llama")
    return tmp_path


def test_bad_rows_are_counted_and_first_ten_listed_when_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(folder / "data.jsonl", 60, 12)
    with pytest.raises(UserError) as refused:
        check_run(settings(folder, file))
    message = str(refused.value)
    assert message.startswith(f"task.path {file}: 12 of 72 rows cannot be used; ")
    assert f"{file}:2 is not valid JSON" in message
    assert message.endswith("correct or remove such rows, or set task.bad_rows: skip")
    assert "layout" not in message, "this remedy is for a whole file, not for single rows"
    title, *lines = next(m for m in caplog.messages if "cannot be used" in m).splitlines()
    assert title == f"task.path {file}: 12 of 72 rows cannot be used:"
    listed = "\n".join(lines[:-1])
    for number in range(10):
        assert re.search(rf"({file}:| (and in )?){3 * number + 2}\b", listed)
    assert len(lines) < 10 and any("(and in " in line for line in lines)
    assert lines[-1] == "  and 2 more"
    for reason in ("no column `answer`", "`prompt` is empty", "must be a JSON object", "got None"):
        assert reason in caplog.text


def test_bad_rows_are_left_out_and_counted_when_bad_rows_is_skip(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, file = write(folder / "good.jsonl", 60, 0), write(folder / "data.jsonl", 60, 12)
    checked = check_run(settings(folder, file, bad_rows="skip"))
    assert "of 60 rows of task.path" in checked.summary
    assert f"{file}: 12 of 72 rows cannot be used and are skipped (task.bad_rows)" in caplog.text
    with_all = build_source(settings(folder, good).task)
    without = build_source(settings(folder, file, bad_rows="skip").task)
    assert [without.train(i).question for i in range(100)] == [
        with_all.train(i).question for i in range(100)
    ]
    assert without.heldout(5) == with_all.heldout(5)


def test_bad_rows_of_eval_sets_and_sft_data_follow_bad_rows_setting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(folder / "data.jsonl", 60, 0)
    held = write(folder / "held.jsonl", 9, 2)
    worked = folder / "worked.jsonl"
    rows = [{"prompt": f"{i}-{i}=", "response": "0"} for i in range(20)]
    worked.write_text("\n".join([*map(json.dumps, rows), "{", '{"prompt": "x"}']))
    held_set = EvalSetConfig(path=str(held))
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "eval": ("eval.sets.held.path", {"sets": {"held": held_set}}),
        "sft": ("sft.data", {"data": str(worked)}),
    }
    for mode, (name, changes) in cases.items():
        for skip in (False, True):
            config = settings(folder, data, **({"bad_rows": "skip"} if skip else {}))
            config = config.with_section(mode, **changes)
            caplog.clear()
            if skip:
                check_run(config, generates=mode == "eval")
                assert "2 of " in caplog.text and "skipped (task.bad_rows)" in caplog.text
                continue
            with pytest.raises(UserError, match=rf"^{name} .*: 2 of \d+ rows cannot be used; "):
                check_run(config, generates=mode == "eval")


@pytest.mark.parametrize("mode", ["refuse", "skip"])
def test_error_suggests_layout_or_columns_when_all_rows_are_bad(folder: Path, mode: str) -> None:
    file = folder / "data.jsonl"
    file.write_text("\n".join(json.dumps({"question": "1+1=", "label": 2}) for _ in range(5)))
    with pytest.raises(UserError) as refused:
        check_run(settings(folder, file, bad_rows=mode))
    message = str(refused.value)
    assert "5 of 5 rows cannot be used; " in message
    assert "there is no column `prompt` among ['label', 'question']" in message
    assert message.endswith("set `layout` or `columns` next to its path")


@pytest.mark.parametrize(
    "content",
    [
        b"prompt,answer\n1+1=,2\n",
        '{"prompt": "1+1=", "answer": 2}\n'.encode("utf-16"),
        b'[{"prompt": "1+1=", "answer": 2}]',
    ],
    ids=["CSV", "UTF-16", "one JSON array"],
)
def test_error_lists_readable_formats_when_file_has_another_format(
    folder: Path, content: bytes
) -> None:
    (folder / "data.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"the file must be Parquet, Arrow, or UTF-8 text with one"):
        check_run(settings(folder, folder / "data.jsonl"))


def test_other_parquet_rows_are_used_when_one_row_is_bad(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "at": None} for i in range(30)]
    rows[7]["answer"] = None
    file = tmp_path / "data.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    with pytest.raises(UserError, match=r"1 of 30 rows cannot be used; .*data.parquet, row 8: "):
        build_source(settings(tmp_path, file).task)
    source = build_source(settings(tmp_path, file, bad_rows="skip").task)
    assert "7+1=" not in {source.train(i).question for i in range(60)}


def test_cached_index_includes_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async.tasks.files.MIN_CACHED_ROWS", 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "data.jsonl", 60, 12)
    for _ in range(2):
        with pytest.raises(UserError, match="12 of 72 rows cannot be used"):
            build_source(settings(tmp_path, file).task)
        source = build_source(settings(tmp_path, file, bad_rows="skip").task)
        assert "of 60 rows of" in source.summary()
    (kept,) = (tmp_path / "cache" / "megatron_async").iterdir()
    assert kept.stat().st_size == 16 + 3 * 8 * 72, "the index also has the bad rows"


def test_wrong_column_is_reported_once_for_task_path_when_eval_sets_share_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, held = write(folder / "data.jsonl", 60, 0), write(folder / "held.jsonl", 9, 0)
    config = settings(folder, data, columns={"prompt": "quetsion"})
    config = config.with_section("eval", sets={"held": EvalSetConfig(path=str(held))})
    with pytest.raises(UserError, match=r"^task\.path .*: 60 of 60 rows cannot be used; ") as found:
        check_run(config)
    expected = "no column `quetsion` among ['answer', 'prompt']; columns.prompt can name"
    assert expected in str(found.value)
    assert "cannot be used" not in caplog.text


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' and 'bomb' in m.content %}"
    "{{ raise_exception('unsafe') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1"}]


def write_answered(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return str(file)


def model_of(folder: Path, *, extra: tuple[str, ...] = (), special: bool = False) -> str:
    """Write a model whose vocabulary has the tokenizer's tokens, but not its `extra` ones."""
    tokenizer = character_tokenizer()
    (folder / "model").mkdir(exist_ok=True)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({"vocab_size": len(tokenizer)}))
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    else:
        tokenizer.add_tokens(list(extra))
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def task_of(
    folder: Path, path: str, evaluation: EvalConfig | None = None, **changes: Any
) -> TextTask:
    extra = {"extra": changes.pop("extra", ()), "special": changes.pop("special", False)}
    settings = {"path": path, "name": "exact", "heldout_share": 0, **changes}
    task = build_task(TaskConfig.model_validate(settings), model_of(folder, **extra), evaluation)
    assert isinstance(task, TextTask)
    return task


BAD_ROWS = {
    "role": ({"prompt": SYSTEM}, {}, "no system role"),
    "content": (
        {"prompt": [{"role": "user", "content": "a bomb"}, *SYSTEM[1:]]},
        {},
        "unsafe",
    ),
    "null column": ({"prompt": "1", "hint": None}, {"prompt_template": "{hint}{question}"}, "may"),
    "no column": ({"prompt": "1"}, {"prompt_template": "{hint}{question}"}, "may name question"),
    "added token": ({"prompt": "a<new>b"}, {"extra": ("<new>",)}, "the token '<new>'"),
    "special token": (
        {"prompt": "a<new>b"},
        {"extra": ("<new>",), "special": True},
        "the token '<new>'",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_training_row_is_refused_or_skipped_when_it_cannot_be_rendered(
    tmp_path: Path, case: str
) -> None:
    row, changes, why = BAD_ROWS[case]
    good = [{"prompt": f"{i}+1", "hint": "add"} for i in range(20)]
    path = write_answered(tmp_path / "rows.jsonl", [*good, row])
    with pytest.raises(UserError, match=rf"1 of 21 rows cannot be used; .*rows\.jsonl:21: .*{why}"):
        task_of(tmp_path, path, **changes)
    task = task_of(tmp_path, path, bad_rows="skip", **changes)
    asked = [prompt.payload["question"] for prompt in task.train_prompts(0, 40)]
    assert sorted(set(asked)) == sorted(one["prompt"] for one in good)


@pytest.mark.parametrize("case", ["role", "added token"])
def test_eval_set_row_is_refused_or_skipped_when_it_cannot_be_rendered(
    tmp_path: Path, case: str
) -> None:
    row, changes, why = BAD_ROWS[case]
    path = write_answered(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1"} for i in range(20)])
    held = write_answered(tmp_path / "held.jsonl", [{"prompt": "9"}, row])
    evaluation = EvalConfig.model_validate({"sets": {"held": {"path": held}}})
    with pytest.raises(UserError, match=rf"eval\.sets\.held\.path .*held\.jsonl:2: .*{why}"):
        task_of(tmp_path, path, evaluation, **changes)
    task = task_of(tmp_path, path, evaluation, bad_rows="skip", **changes)
    assert len(task.eval_prompts(0, "held")) == 1


def test_sft_row_is_refused_when_the_model_lacks_one_of_its_tokens(tmp_path: Path) -> None:
    path = write_answered(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1"} for i in range(20)])
    task = task_of(tmp_path, path, extra=("<new>",))
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a<new>"}]
    for row in ({"prompt": "1", "response": "<new>"}, {"prompt": "<new>", "response": "1"}):
        data = FileConfig(
            path=write_answered(tmp_path / "sft.jsonl", [{"prompt": "1", "response": "2"}, row])
        )
        with pytest.raises(UserError, match=r"sft\.jsonl:2: .*the token '<new>' \(\d+\)"):
            task.worked_examples(9, data)
    data = FileConfig(path=write_answered(tmp_path / "sft.jsonl", [{"messages": talk}]))
    with pytest.raises(UserError, match=r"sft\.jsonl:1: .*the token '<new>'"):
        task.worked_examples(9, data)


def test_unrenderable_rows_are_accepted_when_an_environment_opens_episodes(tmp_path: Path) -> None:
    """An environment or an agent makes its own prompt, so only the episode of such a row would
    fail.
    """
    path = write_answered(tmp_path / "rows.jsonl", [{"prompt": SYSTEM}, {"prompt": "a<new>b"}])
    config = TaskConfig.model_validate({"path": path, "name": "exact", "heldout_share": 0})
    task = build_task(config, model_of(tmp_path, extra=("<new>",)), has_episodes=True)
    assert [len(prompt.token_ids) for prompt in task.train_prompts(0, 4)] == [0, 0, 0, 0]


def test_cached_index_is_rebuilt_when_tokenizer_or_template_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("megatron_async.tasks.files.MIN_CACHED_ROWS", 1)
    rows = [{"prompt": f"{i}+1", "hint": "a"} for i in range(20)]
    path = write_answered(tmp_path / "rows.jsonl", [*rows, {"prompt": "a<new>b", "hint": "a"}])
    task_of(tmp_path, path)
    with pytest.raises(UserError, match="the token '<new>'"):
        task_of(tmp_path, path, extra=("<new>",))
    with pytest.raises(UserError, match="no system role"):
        task_of(tmp_path, path, system_prompt="Be brief.")
    assert index_cache.MIN_CACHED_ROWS > 1
