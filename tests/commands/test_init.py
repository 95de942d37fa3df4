"""Tests that `megatron-async init` writes projects that a dry run accepts and that train without
changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.commands.init import PROJECTS
from megatron_async.config import load_config
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory, RunOutcome

SIMULATED = ("engines.kind=simulated", "weights.transport=disk", "weights.verify=never")
SMALL = ("steps=1", "schedule.groups_per_batch=2", "schedule.group_size=2", "eval.prompts=2")


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", PROJECTS)
def test_dry_run_accepts_an_unchanged_new_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written = call("init", f"--{kind}", "mine")
    assert "wrote mine. The model has random weights" in written
    monkeypatch.chdir("mine")
    names = {"README.md", "config.yaml", "data.jsonl", "model", f"{kind}.py"}
    assert {path.name for path in Path().iterdir()} == names
    assert len(Path("README.md").read_text().splitlines()) <= 10
    checked = call("train", "--config", "config.yaml", "--dry-run")
    assert "all checks passed" in checked


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROJECTS)
def test_unchanged_new_project_trains_on_the_simulated_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call("init", f"--{kind}", "mine")
    monkeypatch.chdir("mine")
    call("train", "--config", "config.yaml", *SIMULATED, *SMALL)
    assert RunDirectory(Path("runs/first").absolute()).outcome() is RunOutcome.COMPLETE


def test_project_copies_the_model_of_the_quickstart_when_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_model(Path("runs/quickstart/sft"), seed=7)
    assert "a copy of the model that the quickstart fine-tuned" in call("init", "mine")
    weights = Path("model.safetensors")
    copied = Path("mine/model", weights).read_bytes()
    assert copied == Path("runs/quickstart/sft", weights).read_bytes()
    call("init", "other", "--model", "runs/quickstart/sft")
    config = load_config(Path("other/config.yaml"))
    assert config.model.path == str(tmp_path / "runs/quickstart/sft")
    assert "`model` the policy" not in Path("other/README.md").read_text()
    assert not Path("other/model").exists()


def test_init_refuses_existing_directory_and_invalid_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    with pytest.raises(UserError, match="mine already exists"):
        call("init", "mine")
    with pytest.raises(UserError, match="--environment and --tools cannot be combined"):
        call("init", "--tools", "--environment", "new")
    with pytest.raises(UserError, match="contains a colon"):
        call("init", "a:b")
    with pytest.raises(UserError, match=r"--model is nowhere, which has no config\.json"):
        call("init", "new", "--model", "nowhere")
    assert [path.name for path in Path().iterdir()] == ["mine"], (
        "a refused command must write no file"
    )


def test_init_accepts_names_with_spaces_and_special_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path("models of mine # \N{ROCKET}")
    build_tiny_model(model, seed=1)
    assert "cd 'sub/my project #1'" in call("init", "sub/my project #1", "--model", str(model))
    config = load_config(Path("sub/my project #1/config.yaml"))
    assert config.model.path == str(tmp_path / model)
