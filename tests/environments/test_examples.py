"""Two environments' games and conversations to imitate are what their environments would show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.config import load_config
from megatron_async.config.data import FileConfig
from megatron_async.environments.conversation import Conversation
from megatron_async.environments.player import environment_builder
from megatron_async.environments.tools import described, tools_of
from megatron_async.tasks.build import build_task
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens

EXAMPLES = Path(__file__).parent


@pytest.mark.parametrize(
    ("example", "data"), [("guessing_game", "games"), ("calculator", "conversations")]
)
def test_what_is_imitated_is_a_conversation(tmp_path: Path, example: str, data: str) -> None:
    folder = EXAMPLES / example
    command = [sys.executable, str(folder / "prepare.py"), str(tmp_path), f"--{data}", "60"]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    model = str(tmp_path / "model")
    overrides = [f"model.path={model}", f"sft.data={tmp_path / f'{data}.jsonl'}"]
    if example == "calculator":
        overrides.append(f"task.path={tmp_path / 'products.jsonl'}")
    config = load_config(folder / "config.yaml", overrides)
    name = config.environment.name
    made = environment_builder(name, config.environment.arguments)()
    schemas = described(tools_of(made, name), name)
    tokenizer = load_tokenizer(model)
    turns = Conversation(config.task, tokenizer, stop_tokens(model, tokenizer), schemas)
    rows = [json.loads(line) for line in (tmp_path / f"{data}.jsonl").read_text().splitlines()]
    branches = set()
    for row in rows:
        first, *rest = row["messages"]
        turns.check([first], {"tool"} if schemas else {"user"})
        branch = turns.opening([first]).tolist()
        for message in rest:
            if message["role"] == "assistant":
                text = message["content"] + tokenizer.eos_token
                branch += tokenizer.encode(text, add_special_tokens=False)
            else:
                branch += turns.next([message], ended=True).tolist()
        branches.add(tuple(branch))
    task = build_task(config.task, model)
    examples = task.worked_examples(60, FileConfig(path=str(tmp_path / f"{data}.jsonl")))
    assert 40 <= len(examples) < 60, "some are held out"
    for worked in examples:
        assert (*worked.prompt_ids.tolist(), *worked.response_ids.tolist()) in branches
