"""Tests tasks for a model: prompt tokens, templates, stop tokens, tokenizers and long prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_async.config.evaluation import EvalConfig
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import EOS_ID, character_tokenizer, write_character_tokenizer
from megatron_async.tasks import build_task
from megatron_async.tasks.text_task import load_tokenizer, response_text

TOKENIZER = character_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_character_tokenizer(directory)
    return str(directory)


def _config(**changes: Any) -> TaskConfig:
    settings = {
        "params": {"min_digits": 1, "max_digits": 1},
        "prompt_template": "{compact}=",
        "answer_marker": "#",
        **changes,
    }
    return TaskConfig.model_validate(settings)


def test_prompt_tokens_decode_to_the_filled_template(model: str) -> None:
    task = build_task(_config(), model)
    for prompt in task.train_prompts(0, 20):
        expression = prompt.payload["question"].removesuffix(" =").rpartition(": ")[2]
        assert TOKENIZER.decode(prompt.token_ids.tolist()) == expression.replace(" ", "") + "="
        assert prompt.token_ids.dtype == np.int32
    assert task.stop_token_ids == (EOS_ID,)


def test_worked_examples_have_a_right_answer_and_end_of_text(model: str) -> None:
    task = build_task(_config(), model)
    for example in task.worked_examples(20):
        prompt = TOKENIZER.decode(example.prompt_ids.tolist())
        response = TOKENIZER.decode(example.response_ids[:-1].tolist())
        assert example.response_ids[-1] == EOS_ID
        assert int(response.rpartition("#")[2]) == eval(prompt.rstrip("="))


def test_chat_template_is_applied_when_the_tokenizer_has_one(model: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    chat = build_task(_config(), str(tmp_path))
    text = TOKENIZER.decode(chat.train_prompts(0, 1)[0].token_ids.tolist())
    assert text.startswith("<user>")
    assert text.endswith("=<assistant>")
    assert chat.stop_token_ids == (EOS_ID, 5)
    plain = build_task(_config(chat_template="never"), str(tmp_path))
    assert "<user>" not in TOKENIZER.decode(plain.train_prompts(0, 1)[0].token_ids.tolist())


def test_load_tokenizer_never_executes_code_of_the_model_folder(tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    (tmp_path / "code.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}})
    )
    with pytest.raises(UserError, match=r"model\.path .* has no readable tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not marker.exists()


def test_load_tokenizer_does_not_import_torch_when_class_is_generic(tmp_path: Path) -> None:
    """The rollout manager does not otherwise need torch, whose import takes seconds."""
    write_character_tokenizer(tmp_path)
    assert type(load_tokenizer(str(tmp_path))) is type(AutoTokenizer.from_pretrained(tmp_path))
    script = (
        "import sys\n"
        "from megatron_async.tasks.text_task import load_tokenizer\n"
        "print(load_tokenizer(sys.argv[1]).encode('1+2='), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"{TOKENIZER.encode('1+2=')} False", done.stderr


def test_load_tokenizer_is_refused_when_there_is_no_end_of_text_token(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (tmp_path / name).exists():
            settings = json.loads((tmp_path / name).read_text())
            settings.pop("eos_token", None)
            (tmp_path / name).write_text(json.dumps(settings))
    with pytest.raises(UserError, match="the tokenizer has no end-of-text token"):
        load_tokenizer(str(tmp_path))


def _file_of(folder: Path, questions: list[str], **changes: Any) -> TaskConfig:
    path = folder / "questions.jsonl"
    rows = [json.dumps({"prompt": question, "answer": 1}) for question in questions]
    path.write_text("\n".join(rows) + "\n")
    settings = {"kind": "files", "name": "exact", "path": str(path), **changes}
    return TaskConfig.model_validate(settings)


def test_training_prompt_is_refused_by_line_when_too_long_for_engines(
    tmp_path: Path, model: str
) -> None:
    task = build_task(_file_of(tmp_path, ["1+1=", "2" * 70, "3" * 50, "4" * 80]), model)
    task.check_lengths(180, 100)
    with pytest.raises(UserError) as refused:
        task.check_lengths(160, 100)
    assert "questions.jsonl:2: the prompt has 70 tokens" in str(refused.value)
    assert "sampling.max_new_tokens 100 is more than the 160" in str(refused.value)


def test_check_lengths_accepts_long_prompts_when_they_are_dropped_later(
    tmp_path: Path, model: str
) -> None:
    config = _file_of(tmp_path, ["1+1=", "2" * 70], long_prompts="drop")
    build_task(config, model).check_lengths(160, 100)


def test_eval_prompt_is_refused_by_line_when_too_long_for_engines(
    tmp_path: Path, model: str
) -> None:
    held = tmp_path / "held.jsonl"
    rows = [{"prompt": question, "answer": 1} for question in ("9+9=", "2" * 70)]
    held.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = EvalConfig.model_validate({"sets": {"held": {"path": str(held)}}})
    task = build_task(_file_of(tmp_path, ["1+1="], heldout_share=0), model, evaluation)
    task.check_evaluation(0, "held", 70)
    with pytest.raises(UserError, match=r"held: eval\..*held\.jsonl:2: the prompt has 70 "):
        task.check_evaluation(0, "held", 69)
    config = _file_of(tmp_path, ["1+1="], heldout_share=0, long_prompts="drop")
    build_task(config, model, evaluation).check_evaluation(0, "held", 69)


def test_check_lengths_checks_only_first_problem_when_source_is_endless(model: str) -> None:
    task = build_task(_config(), model)
    task.check_lengths(160, 100)
    with pytest.raises(UserError, match="problem 0: the prompt has"):
        task.check_lengths(101, 100)


MARKS = ["<think>", "</think>", "<tool_call>"]


@pytest.mark.parametrize("marks", [MARKS, []], ids=["special tokens", "plain text"])
def test_response_text_removes_only_trailing_stop_and_padding_tokens(
    tmp_path: Path, marks: list[str]
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    written = "<think>3</think>4<tool_call>5"
    ids = tokenizer.encode(written, add_special_tokens=False)
    pad = tokenizer.pad_token_id
    for end in ([], [EOS_ID], [EOS_ID, pad, pad], [pad]):
        assert response_text(tokenizer, [*ids, *end], (EOS_ID,)) == written
    skipped = response_text(tokenizer, [*ids, EOS_ID], (EOS_ID,), skip_special=True)
    assert skipped == ("345" if marks else written)


def test_task_text_omits_special_tokens_when_skip_special_tokens_is_set(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.encode("<think>3</think>4", add_special_tokens=False)
    assert build_task(_config(), str(tmp_path)).text(ids) == "<think>3</think>4"
    assert build_task(_config(skip_special_tokens=True), str(tmp_path)).text(ids) == "34"
