"""Rows of which no prompt can be made: found before anything starts, by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.data import FileConfig
from megatron_async.config.evaluation import EvalConfig
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import character_tokenizer
from megatron_async.tasks import build_task, kept_index
from megatron_async.tasks.text_task import TextTask

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' and 'bomb' in m.content %}"
    "{{ raise_exception('unsafe') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1"}]


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return str(file)


def model_of(folder: Path, *, extra: tuple[str, ...] = (), special: bool = False) -> str:
    """A model of as many tokens as its tokenizer had before `extra` ones were added."""
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
def test_a_row_without_a_prompt_is_refused_by_line_or_left_out(tmp_path: Path, case: str) -> None:
    row, changes, why = BAD_ROWS[case]
    good = [{"prompt": f"{i}+1", "hint": "add"} for i in range(20)]
    path = write(tmp_path / "rows.jsonl", [*good, row])
    with pytest.raises(UserError, match=rf"1 of 21 rows cannot be used; .*rows\.jsonl:21: .*{why}"):
        task_of(tmp_path, path, **changes)
    task = task_of(tmp_path, path, bad_rows="skip", **changes)
    asked = [prompt.payload["question"] for prompt in task.train_prompts(0, 40)]
    assert sorted(set(asked)) == sorted(one["prompt"] for one in good)


@pytest.mark.parametrize("case", ["role", "added token"])
def test_a_row_of_an_evaluation_set_without_a_prompt_is_refused(tmp_path: Path, case: str) -> None:
    row, changes, why = BAD_ROWS[case]
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1"} for i in range(20)])
    held = write(tmp_path / "held.jsonl", [{"prompt": "9"}, row])
    evaluation = EvalConfig.model_validate({"sets": {"held": {"path": held}}})
    with pytest.raises(UserError, match=rf"eval\.sets\.held\.path .*held\.jsonl:2: .*{why}"):
        task_of(tmp_path, path, evaluation, **changes)
    task = task_of(tmp_path, path, evaluation, bad_rows="skip", **changes)
    assert len(task.eval_prompts(0, "held")) == 1


def test_an_example_with_a_token_that_the_model_lacks_is_refused_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1"} for i in range(20)])
    task = task_of(tmp_path, path, extra=("<new>",))
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a<new>"}]
    for row in ({"prompt": "1", "response": "<new>"}, {"prompt": "<new>", "response": "1"}):
        data = FileConfig(
            path=write(tmp_path / "sft.jsonl", [{"prompt": "1", "response": "2"}, row])
        )
        with pytest.raises(UserError, match=r"sft\.jsonl:2: .*the token '<new>' \(\d+\)"):
            task.worked_examples(9, data)
    data = FileConfig(path=write(tmp_path / "sft.jsonl", [{"messages": talk}]))
    with pytest.raises(UserError, match=r"sft\.jsonl:1: .*the token '<new>'"):
        task.worked_examples(9, data)


def test_an_episode_may_start_from_a_row_of_which_no_prompt_can_be_made(tmp_path: Path) -> None:
    """An environment or an agent makes its own prompt; what fails is that episode."""
    path = write(tmp_path / "rows.jsonl", [{"prompt": SYSTEM}, {"prompt": "a<new>b"}])
    config = TaskConfig.model_validate({"path": path, "name": "exact", "heldout_share": 0})
    task = build_task(config, model_of(tmp_path, extra=("<new>",)), plays=True)
    assert [len(prompt.token_ids) for prompt in task.train_prompts(0, 4)] == [0, 0, 0, 0]


def test_a_kept_index_is_made_again_for_another_tokenizer_or_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("megatron_async.tasks.files.LEAST_ROWS", 1)
    rows = [{"prompt": f"{i}+1", "hint": "a"} for i in range(20)]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "a<new>b", "hint": "a"}])
    task_of(tmp_path, path)
    with pytest.raises(UserError, match="the token '<new>'"):
        task_of(tmp_path, path, extra=("<new>",))
    with pytest.raises(UserError, match="no system role"):
        task_of(tmp_path, path, system_prompt="Be brief.")
    assert kept_index.LEAST_ROWS > 1
