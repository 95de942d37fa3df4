"""Tests that `train --dry-run` and `doctor` show the derived settings of a run and refuse the same
input as `train`.

For bad input, a command prints one line that names the setting and its value, exits with code 2 and
writes no file. Layout and memory estimates need the model's config.json, or the name of a model
shape, but no weights.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.models.architecture import served_context
from tests.inputs.model_directories import write_model
from tests.test_docs import ROOT

CONFIG_JSON_70B = ROOT / "tests" / "data" / "llama-3.3-70b.config.json"
CONFIG = ROOT / "configs" / "llama3.3-70b.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model", "llama")
    file = tmp_path / "c.yaml"
    file.write_text(f"name: dry\nroot: {tmp_path}/runs\nmodel: {{path: {model}}}\n")
    return file


@pytest.fixture
def seventy_b(tmp_path: Path) -> Path:
    """Return a directory that contains only the config.json of a model of 140 GB."""
    folder = tmp_path / "llama"
    folder.mkdir()
    shutil.copy(CONFIG_JSON_70B, folder / "config.json")
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run `megatron-async ARGUMENTS` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["megatron-async", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("words", [("train", "--dry-run"), ("doctor",)], ids=" ".join)
def test_dry_run_and_doctor_show_the_run_and_write_no_file(
    file: Path,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(file.parent.rglob("*"))
    assert command(monkeypatch, *words, "--config", file) == 0
    shown = capsys.readouterr()
    for part in ("dry on CPU", "trainer: 1 ranks", "scorer_workers = ", "first prompt, "):
        assert part in shown.out
    assert shown.out.endswith(
        "all checks passed, including those of the reward; nothing was started\n"
    )
    assert "torchrun" not in shown.out and "srun" not in shown.out
    assert (set(file.parent.rglob("*")), shown.err) == (before, "")


REFUSED = {
    "a setting": (["engines.host=0.0.0.0"], "engines.host is '0.0.0.0'"),
    "a layout": (["parallel.tensor=3", "parallel.ranks=3"], "parallel.tensor is 3"),
    "several nodes": (["parallel.nodes=2", "parallel.ranks=2"], "parallel.nodes is 2"),
    "a store": (["store.directory=/proc/none"], "cannot be made in /proc"),
    "a tolerance": (
        ["engines.dtype=bfloat16", "weights.probe_tolerance=1e-5"],
        "weights.probe_tolerance is 1e-05",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, "the name of an existing run"])
@pytest.mark.parametrize("words", [("train", "--dry-run"), ("doctor",)], ids=" ".join)
def test_dry_run_and_doctor_show_the_error_of_train_when_train_refuses(
    file: Path,
    words: tuple[str, ...],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, message = REFUSED.get(case, ([], "exists already: choose another name"))
    if case not in REFUSED:
        existing = file.parent / "runs" / "dry"
        existing.mkdir(parents=True)
        (existing / "config.yaml").write_text("name: dry\n")
    assert command(monkeypatch, "train", "--config", file, *overrides) == 2
    refused = capsys.readouterr().err
    assert message in refused
    assert command(monkeypatch, *words, "--config", file, *overrides) == 2
    shown = capsys.readouterr()
    assert shown.err == refused
    assert "trainer: " in shown.out, "the layout must be shown even for a refused run"


def test_dry_run_shows_memory_and_layout_when_the_model_has_no_weights(
    seventy_b: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--config", CONFIG, f"model.path={seventy_b}"]
    assert command(monkeypatch, "launch", "--dry-run", *settings) == 2
    shown = capsys.readouterr()
    assert "memory of a trainer GPU, estimated: state " in shown.out
    assert "memory of an engine GPU, estimated: weights 17.6 GB" in shown.out
    assert "contains no *.safetensors weights" in shown.err, (
        "the error must name the missing weights"
    )
    assert command(monkeypatch, "settings", "parallel", "--of", *settings[1:]) == 0
    assert command(monkeypatch, "doctor", *settings) == 2
    assert "trainer: 96 " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [("plan", "--top=1"), ("simulate",)], ids=" ".join)
@pytest.mark.parametrize("source", ["config.json", "name"])
def test_plan_and_simulate_need_config_json_or_a_name(
    seventy_b: Path, words: tuple[str, ...], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["simulate.model=llama-3-70b", "model.path=/nowhere"]
    if source == "config.json":
        model = [f"model.path={seventy_b}"]
    short = ["simulate.steps=2", "simulate.warmup_steps=0"]
    assert command(monkeypatch, *words, "--config", CONFIG, *model, *short) == 0


def test_plan_error_names_both_remedies_when_the_model_shape_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "plan", "--config", CONFIG, "model.path=models/llama") == 2
    message = capsys.readouterr().err
    assert "model.path 'models/llama' has no config.json (which is enough, without" in message
    assert "a simulation may set simulate.model to one of them" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--resume", "no-run"), "there is no run"),
        (("train", "--config", "none.yaml"), "cannot be read"),
        (("train",), "requires --config"),
        (("train", "--from-step", "4"), "--from-step is 4; it requires --resume"),
        (("report", "no-run"), "no-run"),
        (("train", "--config", "c.yaml", "engines.counts=2"), "unknown setting engines.counts"),
        (
            ("train", "--config", "c.yaml", "store.directory=scratch"),
            "store.directory is 'scratch'",
        ),
    ],
    ids=" ".join,
)
def test_command_with_bad_input_prints_one_line_and_writes_no_file(
    words: tuple[str, ...],
    expected: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(file.parent)
    assert command(monkeypatch, *words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and expected in message
    assert len(message.splitlines()) == 1
    assert not (file.parent / "runs").exists(), "a refused command must not create a run"


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
def test_served_context_equals_the_context_that_sglang_derives(
    model: dict[str, Any], context: int | None
) -> None:
    assert served_context(model) == context


def test_cli_reports_ctrl_c_when_interrupted_before_a_run_starts(
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
