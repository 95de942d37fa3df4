"""Tests runs in a user's directory whose files have the names of Python modules.

Such a file does not replace a module in any child process. TMPDIR is empty after each command, even
if its name is too long for a socket, or if an earlier run was killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics
from tests.end_to_end.runs import Command

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
NAMES = ("random", "queue", "copy", "types", "enum", "tokenizers", "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, data, a reward, and files that must not be imported."""
    root = tmp_path_factory.mktemp("user")
    for name in NAMES:
        (root / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the user')\n")
    (root / "my_helper.py").write_text("VALUE = 1.0\n")
    (root / "my_reward.py").write_text(
        "from my_helper import VALUE\n\n\ndef score(sample):\n    return VALUE\n"
    )
    build_tiny_model(root / "model", seed=1)
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "response": f"{i + 1}"} for i in range(40)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / ("long-" + "x" * 90)).mkdir()
    return root


def settings(folder: Path, **changes: Any) -> str:
    config = {
        "name": "run",
        "root": str(folder / "runs"),
        "steps": 3,
        "model": {"path": str(folder / "model")},
        "task": {"path": str(folder / "rows.jsonl"), "heldout_share": 0.2},
        "reward": "my_reward.py:score",
        "schedule": {"preset": "copris", "groups_per_batch": 2, "group_size": 2, "concurrency": 4},
        "sampling": {"max_new_tokens": 8},
        "checkpoint": {"every_steps": 1},
        "eval": {"prompts": 2},
        "engines": {"count": 1, "device": "cpu", "max_total_tokens": 2048},
        "sft": {"data": str(folder / "rows.jsonl"), "batch_sequences": 4, "epochs": 1},
        "telemetry": {"trackers": [], "progress": "lines"},
        **changes,
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return "c.yaml"


class UserCommand(Command):
    """megatron-async command in the user's directory, with a TMPDIR that has a long name."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.temporary = next(folder.glob("long-*"))
        log, cli = folder / f"{arguments[0]}.log", ("-P", "-m", "megatron_async.cli")
        super().__init__(*cli, *arguments, log=log, folder=folder, TMPDIR=str(self.temporary))

    def end(self, code: int = 0) -> None:
        """Wait until the command ends with exit code `code`; then TMPDIR must be empty."""
        assert self.process.wait(200) == code, self.text()[-3000:]
        assert [file.name for file in self.temporary.iterdir()] == []


@pytest.fixture
def started(folder: Path) -> Iterator[list[UserCommand]]:
    commands: list[UserCommand] = []
    yield commands
    for command in commands:
        command.kill_everything()


def test_train_resumes_after_a_kill_next_to_files_named_like_modules(
    folder: Path, started: list[UserCommand]
) -> None:
    config = settings(folder, steps=1_000_000)
    first = UserCommand(folder, "train", "--config", config)
    started.append(first)
    metrics = RunDirectory(folder / "runs" / "run").metrics_file
    first.until(lambda: len([m for m in read_metrics(metrics) if "reward/mean" in m]) > 1, 150)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait(20)
    done = max(int(m["step"]) for m in read_metrics(metrics) if "reward/mean" in m)
    second = UserCommand(folder, "train", "--resume", "runs/run", f"steps={done + 3}")
    started.append(second)
    second.end()
    assert all(m["reward/mean"] == 1.0 for m in read_metrics(metrics) if "reward/mean" in m)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["reward", "--responses", "rows.jsonl"], "40 responses, mean score 1, 0 failed"),
        (["sft", "--out", "tuned"], "wrote a checkpoint to .*tuned"),
    ],
    ids=["reward", "sft"],
)
def test_command_works_next_to_files_named_like_modules(
    folder: Path, started: list[UserCommand], arguments: list[str], shown: str
) -> None:
    command = UserCommand(folder, arguments[0], "--config", settings(folder), *arguments[1:])
    started.append(command)
    command.end()
    assert re.search(shown, command.text()), command.text()[-3000:]


def test_gateway_works_next_to_files_named_like_modules_until_ctrl_c(
    folder: Path, started: list[UserCommand]
) -> None:
    command = UserCommand(folder, "gateway", "--config", settings(folder))
    started.append(command)
    command.until(lambda: "OPENAI_BASE_URL=" in command.text(), 150)
    found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", command.text())
    assert found is not None
    request = urllib.request.Request(
        f"{found[1]}/models", headers={"Authorization": f"Bearer {found[2]}"}
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert json.load(reply)["data"][0]["id"] == "policy"
    command.process.send_signal(signal.SIGINT)
    command.end()
