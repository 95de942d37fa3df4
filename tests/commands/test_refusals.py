"""Bad input: one clear sentence that names the setting and its value, exit code 2, nothing made."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.models.architecture import served_context
from megatron_async.models.tiny_model import build_tiny_model
from tests.commands.test_dry_run import command


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("schedule.concurency=4", "unknown setting schedule.concurency (value 4)"),
        ("optimizer.lr=-1", "optimizer.lr is -1"),
        ("weights.transport=pigeon", "weights.transport is 'pigeon'"),
        ("store.directory=scratch", "store.directory is 'scratch'"),
        ("model.trust_remote_code=true", "unknown setting model.trust_remote_code"),
        ("engines.context_length=1026", "an engine takes 1020 tokens of prompt and response"),
    ],
)
def test_a_bad_setting_is_refused(
    override: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build_tiny_model(tmp_path / "model", seed=1)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"name: refused\nroot: {tmp_path / 'runs'}\nmodel: {{path: {tmp_path / 'model'}}}\n"
    )
    assert command(monkeypatch, "train", "--config", config, override) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and sentence in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "nothing may be half-written"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "--resume", "no-run"), "there is no run"),
        (("train", "--config", "none.yaml"), "cannot be read"),
        (("train",), "needs --config"),
        (("train", "--from-step", "4"), "--from-step is 4, and there is no --resume"),
        (("report", "no-run"), "no-run"),
    ],
    ids=" ".join,
)
def test_resuming_nothing_and_missing_files_are_refused(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words) == 2
    assert sentence in capsys.readouterr().err


YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0}
OF_8192 = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": {"factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
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
