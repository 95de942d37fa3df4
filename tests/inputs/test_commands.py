"""Tests that commands refuse damaged inputs: exit code 2, a message of one line, and no file
written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_async import cli
from megatron_async.errors import UserError
from tests.inputs.model_directories import CONFIGS, write_model

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("commands") / "undamaged", "llama")


def _config(**changes: Any) -> Damage:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIGS["llama"], **changes}))

    return write


def _bytes(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def _truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def _weights(name: str, value: float, *, all_values: bool = False) -> Damage:
    """Return a damage that sets one value, or all values, of a tensor to `value`."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[slice(None) if all_values else slice(7, 8)] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


DAMAGES: dict[str, tuple[Damage, str]] = {
    "wrong hidden size": (_config(hidden_size=16, head_dim=4), "config.json requires (128, 16)"),
    "layers as text": (_config(num_hidden_layers="two"), "num_hidden_layers is 'two'"),
    "not UTF-8": (_bytes("config.json", b'{"\xff": 1}'), "is not UTF-8 text"),
    "cut weights": (_truncate_weights, "model.safetensors cannot be read"),
    "damaged tokenizer": (_bytes("tokenizer.json", b"[1"), "has no readable tokenizer"),
    "invalid generation config": (
        _bytes("generation_config.json", b'{"eos_token_id": ["x"]}'),
        "eos_token_id is ['x']; it must be a token",
    ),
    **{
        f"end of text {value!r}": (
            _bytes(file, json.dumps({"eos_token_id": value}).encode()),
            f"eos_token_id is {value!r}; it must be a token or a list of tokens, from 0 to",
        )
        for file, value in (("generation_config.json", 1000000), ("generation_config.json", [-3]))
    },
    "end of text as text in config.json": (_config(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "end of text of another model": (_config(eos_token_id=128), "eos_token_id is 128; it must"),
    "a NaN": (
        _weights("model.norm.weight", np.nan),
        "tensor model.norm.weight contains NaN or inf",
    ),
    "an infinity": (
        _weights("model.layers.1.mlp.down_proj.weight", -np.inf),
        "tensor model.layers.1.mlp.down_proj.weight contains NaN or infinity",
    ),
    "zeros": (_weights("model.embed_tokens.weight", 0.0, all_values=True), "weight is all zero"),
    "a norm of zeros": (
        _weights("model.norm.weight", 0.0, all_values=True),
        "norm.weight is all zero",
    ),
    "deeply nested run file": (_bytes("run.yaml", b"[" * 2000), "is nested too deeply"),
    "line separators and a bad line": (
        _bytes("data.jsonl", '{"prompt": "a\u2028b", "answer": 1}\n{"prompt": 1}\n'.encode()),
        "data.jsonl:2: there is no column `answer` among ['prompt']",
    ),
}


def _damaged(undamaged: Path, folder: Path, damage: Damage) -> list[str]:
    """Write a model, a run file and problems to `folder`, and damage one of them; return the
    arguments that name the run file."""
    shutil.copytree(undamaged, folder, dirs_exist_ok=True)
    settings = {
        "root": str(folder / "runs"),
        "model": {"path": str(folder)},
        "task": {"kind": "files", "name": "exact", "path": str(folder / "data.jsonl")},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    damage(folder)
    return ["--config", str(folder / "run.yaml")]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((["train"], name) for name in DAMAGES),
        (["sft", "--out", "out"], "line separators and a bad line"),
        (["eval"], "a NaN"),
        (["simulate"], "not UTF-8"),
        (["plan"], "layers as text"),
        (["launch", "--dry-run"], "deeply nested run file"),
    ],
)
def test_command_refuses_damaged_input_before_anything_starts(
    command: list[str],
    name: str,
    undamaged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, sentence = DAMAGES[name]
    arguments = _damaged(undamaged, tmp_path, damage)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megatron-async", *command, *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and sentence in line
    assert not (tmp_path / "runs").exists(), "a refused command must write nothing"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cut weights", "a NaN"])
@pytest.mark.parametrize("role", ["eval", "a teacher", "a checkpoint to start from"])
def test_command_checks_the_weights_of_every_model_that_it_reads(
    name: str, role: str, undamaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, sentence = DAMAGES[name]
    good = _damaged(undamaged, tmp_path / "good", lambda _: None)
    bad = shutil.copytree(undamaged, tmp_path / "bad")
    damage(bad)
    made = ["--src", str(bad), "--dst", str(tmp_path / "to")]
    command = {
        "eval": ["eval", *good, "--model", str(bad)],
        "a teacher": ["sft", *good, "--from-teacher", str(bad)],
        "a checkpoint to start from": ["convert", "hf-to-megatron", *made],
    }[role]
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **__: pytest.fail("the command started a process")
    )
    done = CliRunner().invoke(cli.app, command)
    assert isinstance(done.exception, UserError) and sentence in str(done.exception)
    assert not (tmp_path / "to").exists() and not (tmp_path / "good/runs").exists()


@pytest.mark.slow
@pytest.mark.one_core
def test_command_process_exits_with_code_2_when_its_input_is_damaged(
    undamaged: Path, tmp_path: Path
) -> None:
    damage, sentence = DAMAGES["cut weights"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron_async.cli",
            "train",
            *_damaged(undamaged, tmp_path, damage),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and sentence in done.stderr


def test_command_is_refused_when_the_file_system_encoding_is_ascii() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async.cli", "train", "--config", "x.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **ascii_only},
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: Python's file-system encoding is ascii"
    )
    assert done.stderr.endswith("Set LC_ALL=C.UTF-8, or PYTHONUTF8=1.\n")
