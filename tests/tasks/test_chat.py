"""Tests how templates render chat prompts and conversations, and which tokens are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from megatron_async.config.data import ColumnsConfig, FileConfig
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import EOS_ID, character_tokenizer, write_character_tokenizer
from megatron_async.tasks import build_task
from megatron_async.tasks.layouts import Columns
from megatron_async.tasks.text_task import TextTask

TOKENIZER = character_tokenizer()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking is defined and not thinking %}"
    "[]{% endif %}{% endif %}"
)
# Like the templates of thinking models, it removes the thoughts of earlier messages.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split(')')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model(folder: Path, template: str | None = TEMPLATE) -> str:
    write_character_tokenizer(folder)
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(str(folder))
    return str(folder)


def task_of(
    folder: Path, template: str | None = TEMPLATE, heldout: float = 0, **changes: Any
) -> TextTask:
    path = folder / "rows.jsonl"
    lines = [{"prompt": f"{i}+1", "answer": 2} for i in ([1] if not heldout else range(20))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"name": "exact", "path": str(path), "heldout_share": heldout, **changes}
    task = build_task(TaskConfig.model_validate(settings), model(folder, template))
    assert isinstance(task, TextTask)
    return task


def prompt_of(task: TextTask) -> str:
    return str(TOKENIZER.decode(task.train_prompts(0, 1)[0].token_ids.tolist()))


def test_chat_template_receives_system_prompt_and_arguments(tmp_path: Path) -> None:
    task = task_of(tmp_path, system_prompt="Be brief.", chat_template_kwargs={"thinking": False})
    assert prompt_of(task) == "<system>Be brief.<eos>\n<user>1+1<eos>\n<assistant>[]"


def test_system_message_of_a_row_replaces_the_system_prompt_setting(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Own."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}],
        },
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": 2}) + "\n")
    task = task_of(tmp_path, path=str(path), system_prompt="Be brief.")
    assert prompt_of(task) == "<system>Own.<eos>\n<user>1+1<eos>\n<assistant>"
    payload = task.train_prompts(0, 1)[0].payload
    assert payload["question"] == "1+1"
    assert payload["metadata"] == {"prompt": messages}, "a reward may need earlier messages"


def test_summary_shows_first_prompt_as_rendered(tmp_path: Path) -> None:
    summary = task_of(tmp_path).summary()
    assert "1 of 1 rows of task.path" in summary and "0 different ones held out" in summary
    assert "first prompt, 22 tokens (chat template):\n<user>1+1<eos>\n<assistant>" in summary


@pytest.mark.parametrize(
    ("changes", "template", "message"),
    [
        (
            {"system_prompt": "Be brief."},
            None,
            "task.system_prompt is 'Be brief.'; it needs a chat",
        ),
        ({"chat_template_kwargs": {"a": 1}}, None, "task.chat_template_kwargs"),
        ({}, "{{ raise_exception('no') }}", "the chat template of model.path fails"),
        ({"prompt_template": "{level}: {question}"}, None, "does not fit the task; it may name"),
    ],
)
def test_build_task_is_refused_when_a_template_setting_does_not_fit(
    tmp_path: Path, changes: dict[str, Any], template: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        task_of(tmp_path, template, **changes)


def test_chat_messages_are_refused_when_model_has_no_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], "answer": 2}))
    with pytest.raises(UserError, match=r"the prompts are chat messages, .* no chat template"):
        task_of(tmp_path, None, path=str(path))


def sft(folder: Path, *rows: dict[str, Any]) -> FileConfig:
    """Write a file with these rows for supervised fine-tuning; return its settings."""
    path = folder / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileConfig(path=str(path))


TALK = [
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "(hm)4"},
    {"role": "user", "content": "and 1"},
    {"role": "assistant", "content": "5"},
]


def learned(task: TextTask, file: FileConfig) -> list[tuple[str, str]]:
    """Return the whole text and the text that is trained on, for each example of the file."""
    found = []
    for example in task.worked_examples(10, file):
        ids = np.concatenate([example.prompt_ids, example.response_ids])
        trained = example.trained
        if trained is None:
            trained = np.ones(len(example.response_ids), np.bool_)
        kept = example.response_ids[trained]
        found.append((TOKENIZER.decode(ids.tolist()), TOKENIZER.decode(kept.tolist())))
    return found


def test_sft_trains_on_assistant_messages_of_a_conversation(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    file = sft(tmp_path, {"messages": TALK})
    ((text, kept),) = learned(task, file)
    assert kept == "(hm)4<eos>5<eos>"
    assert text == ("<user>2+2<eos>\n<assistant>(hm)4<eos>\n<user>and 1<eos>\n<assistant>5<eos>")
    (example,) = task.worked_examples(10, file)
    assert example.response_ids[-1] == EOS_ID


SHOWS_ALL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for t in m.tool_calls or [] %}[{{ t.function.name }} {{ t.function.arguments | tojson }}]"
    "{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": {"a": 2}}}
AS_TEXT = {**CALL, "function": {"name": "mul", "arguments": '{"a": 2}'}}
BARE = {"name": "mul", "arguments": {"a": 2}}


def calling(call: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return a conversation in which the assistant calls a tool."""
    return [
        {"role": "user", "content": "2*2"},
        {"role": "assistant", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "reasoning_content": "so", "content": "4"},
    ]


@pytest.mark.parametrize("call", [CALL, AS_TEXT], ids=["object", "text"])
@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}, {"content": "I do."}])
def test_sft_trains_on_tool_calls_and_reasoning(
    tmp_path: Path, call: dict[str, Any], content: dict[str, Any]
) -> None:
    task = task_of(tmp_path, SHOWS_ALL)
    file = sft(tmp_path, {"messages": calling(call, **content)})
    ((_, kept),) = learned(task, file)
    assert kept == f'{content.get("content") or ""}[mul {{"a": 2}}]<eos>(so)4<eos>'


def test_prompt_contains_tool_calls_and_reasoning_of_its_messages(tmp_path: Path) -> None:
    messages = [*calling(AS_TEXT), {"role": "user", "content": "more"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": 2}) + "\n")
    text = prompt_of(task_of(tmp_path, SHOWS_ALL, path=str(path)))
    assert '<assistant>[mul {"a": 2}]<eos>' in text and "<assistant>(so)4<eos>" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_calls", [CALL]),
        ("function_call", BARE),
        ("reasoning_content", "so"),
        ("reasoning", "so"),
        ("thinking", "so"),
    ],
)
def test_content_field_is_refused_when_template_does_not_use_it(
    tmp_path: Path, name: str, value: Any
) -> None:
    talk = [TALK[0], {"role": "assistant", "content": "4", name: value}]
    file = sft(tmp_path, {"messages": talk})
    task = task_of(tmp_path, TEMPLATE.replace("<", "<thinking ", 1))
    with pytest.raises(UserError, match=rf"sft.jsonl:1: .*`{name}`, which the chat template of"):
        task.worked_examples(1, file)
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text(json.dumps({"prompt": [*talk, TALK[2]], "answer": 2}) + "\n")
    with pytest.raises(UserError, match=rf"chat.jsonl:1: .*`{name}`, which the chat template of"):
        task_of(tmp_path, path=str(prompts))


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("mul", "`tool_calls` is 'mul'; it must be a list of calls"),
        ([{"function": {}}], "`tool_calls` is .*; it must be a list of calls"),
        ([{"name": "mul", "arguments": "{"}], "`arguments` of mul is not valid JSON"),
        ([{"name": "mul", "arguments": "[1]"}], r"`arguments` of mul is \[1\]; it must be a JSON"),
    ],
)
def test_tool_calls_are_refused_when_malformed(tmp_path: Path, calls: Any, message: str) -> None:
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    file = sft(tmp_path, {"messages": talk})
    with pytest.raises(UserError, match=f"sft.jsonl:1, .*message 2: {message}"):
        task_of(tmp_path, SHOWS_ALL).worked_examples(1, file)


def test_parquet_mappings_lack_the_null_keys_that_arrow_adds(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    schema = [{"function": {"name": "f", "parameters": {"a": {"type": "x"}}}}]
    other = [{"function": {"name": "g", "parameters": {"b": {"type": "y"}}}}]
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + SHOWS_ALL
    rows = []
    for call, tools in zip(calls, (schema, other), strict=True):
        rows.append({"messages": calling({"function": call}), "tools": tools})
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "sft.parquet")
    file = FileConfig(path=str(tmp_path / "sft.parquet"))
    texts = [text for text, _ in learned(task_of(tmp_path, template), file)]
    assert '[f {"a": 1}]' in texts[0] and '[g {"b": 2}]' in texts[1]
    assert "null" not in "".join(texts)


def test_sft_does_not_train_on_a_message_when_its_weight_is_0(tmp_path: Path) -> None:
    talk = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]]
    file = sft(tmp_path, {"messages": talk})
    ((_, kept),) = learned(task_of(tmp_path), file)
    assert kept == "5<eos>"


def test_unused_tools_are_reported_once_when_template_ignores_tools(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": TALK[:2], "tools": [{"type": "function"}]}
    file = sft(tmp_path, row, row)
    task_of(tmp_path).worked_examples(2, file)
    assert caplog.text.count("the chat template of model.path does not use `tools`") == 1
    assert "sft.jsonl:1" in caplog.text


@pytest.mark.parametrize("as_text", [False, True])
def test_chat_template_receives_tools_as_schemas(tmp_path: Path, as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "mul"}}]
    template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + TEMPLATE
    row = {"messages": TALK[:2], "tools": json.dumps(tools) if as_text else tools}
    file = sft(tmp_path, row)
    ((text, _),) = learned(task_of(tmp_path, template), file)
    assert text.startswith("mul;<user>")
    file = sft(tmp_path, {**row, "tools": "[1]"})
    with pytest.raises(UserError, match=r"`tools` is \[1\]; it must be a list of JSON schemas"):
        task_of(tmp_path, template).worked_examples(1, file)


def test_conversation_is_refused_when_template_rewrites_earlier_messages(tmp_path: Path) -> None:
    task = task_of(tmp_path, FORGETFUL)
    file = sft(tmp_path, {"messages": TALK})
    with pytest.raises(UserError, match=r"sft.jsonl:1: .* renders message 2 differently"):
        task.worked_examples(10, file)
    assert learned(task, sft(tmp_path, {"messages": TALK[:2]}))[0][1] == "(hm)4<eos>"


def test_sft_response_is_read_from_the_column_of_its_layout(tmp_path: Path) -> None:
    file = sft(tmp_path, {"question": "2+2", "answer": "2+2=4\n#### 4"})
    task = task_of(tmp_path, None)
    assert learned(task, file.model_copy(update={"layout": "gsm8k"})) == [
        ("2+22+2=4\n#### 4<eos>", "2+2=4\n#### 4<eos>")
    ]
    with pytest.raises(UserError, match=r"sft\.data .*:1: there is no column `response`"):
        task.worked_examples(10, file)


def test_sft_does_not_train_on_held_out_questions(tmp_path: Path) -> None:
    lines = [{"prompt": f"question {i}", "response": f"answer {i}"} for i in range(200)]
    lines += [{"messages": [{"role": "user", "content": one["prompt"]}, TALK[1]]} for one in lines]
    file = sft(tmp_path, *lines)
    task = task_of(tmp_path, heldout=0.25)
    examples = task.worked_examples(400, file)
    assert 240 < len(examples) < 360
    prompts = {TOKENIZER.decode(e.prompt_ids.tolist()) for e in examples}
    # The prompt form and the messages form of a question are either both held out or neither.
    assert len(prompts) == len(examples) / 2


def test_sft_excludes_held_out_conversation_in_prompt_and_messages_form(tmp_path: Path) -> None:
    """A conversation in messages form has two questions, and is excluded if either is held out.

    So the conversations that remain in messages form also remain in prompt form.
    """
    task = task_of(tmp_path, heldout=0.25)
    talks = [[{"role": "user", "content": f"{i}+{i}"}, *TALK[1:]] for i in range(200)]
    forms = [
        [{"prompt": talk[:3], "response": talk[3]["content"]} for talk in talks],
        [{"messages": talk} for talk in talks],
    ]
    texts = []
    for rows in forms:
        file = sft(tmp_path, *rows)
        examples = task.worked_examples(200, file)
        ids = [np.concatenate([e.prompt_ids, e.response_ids]) for e in examples]
        texts.append({TOKENIZER.decode(one.tolist()) for one in ids})
    assert 60 < len(texts[1]) < len(texts[0]) < 180
    assert texts[1] <= texts[0]


def test_prompt_template_is_refused_when_it_is_not_a_valid_format() -> None:
    with pytest.raises(UserError, match=r"task\.prompt_template is '\{question', which is not"):
        Columns.of("rows", ColumnsConfig(), "{question")
