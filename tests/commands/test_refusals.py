"""Bad input: one clear sentence that names the setting and its value, exit code 2, nothing made."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.models.architecture import served_context
from megatron_async.models.tiny_model import build_tiny_model

SETTINGS = "name: refused\nroot: {root}\nmodel: {{path: {model}}}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refusals") / "model"
    build_tiny_model(path, seed=1)
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("schedule.concurency=4", "unknown setting schedule.concurency (value 4)"),
        ("optimizer.lr=-1", "optimizer.lr is -1"),
        ("parallel.tensor=3", "parallel.ranks 1 is not divisible by tensor 3"),
        ("model.path=/nowhere", "model.path '/nowhere' is no directory here"),
        ("task.name=no_such_task", "task.name"),
        ("engines.count=0", "engines.count is 0"),
        ("weights.transport=pigeon", "weights.transport is 'pigeon'"),
        ("engines.host=0.0.0.0", "engines.host is '0.0.0.0', which other hosts can reach"),
        ("store.directory=scratch", "store.directory is 'scratch'"),
        ("store.directory=/proc/none", "sqlite cannot be made in /proc: No such file"),
        ("model.trust_remote_code=true", "unknown setting model.trust_remote_code"),
        ("engines.context_length=1026", "an engine takes 1020 tokens of prompt and response"),
    ],
)
def test_a_bad_setting_is_refused(
    override: str, sentence: str, tmp_path: Path, model: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(SETTINGS.format(root=tmp_path / "runs", model=model))
    code, message = run("train", "--config", str(config), override)
    assert code == 2
    assert message.startswith("error: ")
    assert sentence in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "nothing may be half-written"


def test_a_layout_that_the_model_cannot_have_is_refused(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(SETTINGS.format(root=tmp_path / "runs", model=model))
    heads = json.loads((model / "config.json").read_text())["num_attention_heads"]
    code, message = run(
        "train",
        *("--config", str(config)),
        *(f"parallel.tensor={heads + 1}", f"parallel.ranks={heads + 1}"),
    )
    assert code == 2
    assert str(heads + 1) in message
    assert not (tmp_path / "runs").exists()


def test_resuming_nothing_and_missing_files_are_refused(tmp_path: Path) -> None:
    code, message = run("train", "--resume", str(tmp_path / "no-run"))
    assert (code, "there is no run" in message) == (2, True)
    code, message = run("train", "--config", str(tmp_path / "none.yaml"))
    assert (code, "cannot be read" in message) == (2, True)
    code, message = run("train")
    assert (code, "needs --config" in message) == (2, True)
    code, message = run("train", "--from-step", "4")
    assert (code, "--from-step is 4, and there is no --resume" in message) == (2, True)
    code, message = run("report", str(tmp_path / "no-run"))
    assert code == 2


def test_every_command_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async.cli", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "--resume" in done.stdout


YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0}
OF_8192 = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"max_position_embeddings": 32768, "rope_scaling": {"factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "rope_type": "llama3"},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": {**YARN, **OF_8192}}, 40960),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"model_max_length": 512, "max_position_embeddings": 1024}, 512),
        ({}, None),
    ],
)
def test_the_context_of_a_model_is_what_sglang_reads(
    model: dict[str, Any], context: int | None
) -> None:
    assert served_context(model) == context


def test_interrupt_is_named_when_it_comes_before_anything_has_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_async.commands.settings.settings_command", interrupted)
    monkeypatch.setattr(sys, "argv", ["megatron-async", "settings"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    assert (ended.value.code, capsys.readouterr().err) == (130, "ended by Ctrl-C\n")
