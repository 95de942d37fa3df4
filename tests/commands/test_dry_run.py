"""Settings that a start derives, and its refusals: `train`, `--dry-run` and `doctor`.

Bad input ends in one sentence that names the setting and its value, with exit code 2, and nothing
is made. Layout and memory need a model's config.json, or the name of a shape, and none of its
weights.
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

SEVENTY = ROOT / "tests" / "data" / "llama-3.3-70b.config.json"
CONFIG = ROOT / "configs" / "llama3.3-70b.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model", "llama")
    file = tmp_path / "c.yaml"
    file.write_text(f"name: dry\nroot: {tmp_path}/runs\nmodel: {{path: {model}}}\n")
    return file


@pytest.fixture
def seventy(tmp_path: Path) -> Path:
    """A directory with the config.json of a model of 140 GB alone."""
    folder = tmp_path / "llama"
    folder.mkdir()
    shutil.copy(SEVENTY, folder / "config.json")
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Exit code of `megatron-async ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["megatron-async", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("words", [("train", "--dry-run"), ("doctor",)], ids=" ".join)
def test_it_shows_the_run_without_any_command_and_makes_nothing(
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


@pytest.mark.parametrize("what", [*REFUSED, "a name that is taken"])
@pytest.mark.parametrize("words", [("train", "--dry-run"), ("doctor",)], ids=" ".join)
def test_where_train_refuses_they_end_with_the_same_sentence_and_exit_code_2(
    file: Path,
    words: tuple[str, ...],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, sentence = REFUSED.get(what, ([], "exists already: choose another name"))
    if what not in REFUSED:
        taken = file.parent / "runs" / "dry"
        taken.mkdir(parents=True)
        (taken / "config.yaml").write_text("name: dry\n")
    assert command(monkeypatch, "train", "--config", file, *overrides) == 2
    refused = capsys.readouterr().err
    assert sentence in refused
    assert command(monkeypatch, *words, "--config", file, *overrides) == 2
    shown = capsys.readouterr()
    assert shown.err == refused
    assert "trainer: " in shown.out, "the layout is shown all the same"


def test_memory_and_layout_need_no_weights(
    seventy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--config", CONFIG, f"model.path={seventy}"]
    assert command(monkeypatch, "launch", "--dry-run", *settings) == 2
    shown = capsys.readouterr()
    assert "memory of a trainer GPU, estimated: state " in shown.out
    assert "memory of an engine GPU, estimated: weights 17.6 GB" in shown.out
    assert "contains no *.safetensors weights" in shown.err, "what a start lacks"
    assert command(monkeypatch, "settings", "parallel", "--of", *settings[1:]) == 0
    assert command(monkeypatch, "doctor", *settings) == 2
    assert "trainer: 96 " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [("plan", "--top=1"), ("simulate",)], ids=" ".join)
@pytest.mark.parametrize("source", ["config.json", "name"])
def test_plan_and_simulate_need_config_json_or_a_name(
    seventy: Path, words: tuple[str, ...], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["simulate.model=llama-3-70b", "model.path=/nowhere"]
    if source == "config.json":
        model = [f"model.path={seventy}"]
    short = ["simulate.steps=2", "simulate.warmup_steps=0"]
    assert command(monkeypatch, *words, "--config", CONFIG, *model, *short) == 0


def test_a_shape_that_is_not_known_names_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "plan", "--config", CONFIG, "model.path=models/llama") == 2
    sentence = capsys.readouterr().err
    assert "model.path 'models/llama' has no config.json (which is enough, without" in sentence
    assert "a simulation may set simulate.model to one of them" in sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
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
def test_what_cannot_start_ends_in_one_sentence_and_makes_nothing(
    words: tuple[str, ...],
    sentence: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(file.parent)
    assert command(monkeypatch, *words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and sentence in message
    assert len(message.splitlines()) == 1
    assert not (file.parent / "runs").exists(), "nothing may be half-written"


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
