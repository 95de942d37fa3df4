"""Tests a shortened quickstart from its command to its closing table; the model must learn."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics
from tests.documented_metrics import undocumented_in

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_ci.yaml"


def test_shortened_quickstart_completes_and_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_async", "quickstart", "--config", str(CONFIG)]
    done = subprocess.run(
        [*command, f"root={tmp_path}", "name=ci"],
        capture_output=True,
        text=True,
        timeout=840,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for row in (
        "held-out accuracy before SFT",
        "held-out accuracy after SFT",
        "held-out accuracy after RL",
        "resumed trajectories",
        "token lag, mean / largest",
        "ESS",
        "wall time, SFT",
    ):
        assert row in done.stdout
    directory = RunDirectory(tmp_path / "ci")
    settings = directory.config_file.read_text()
    steps = int(re.search(r"^steps: (\d+)", settings, re.MULTILINE).group(1))  # type: ignore[union-attr]

    sft = read_metrics(directory.metrics_file, kind="sft")
    assert sft[-1]["train/loss"] < 0.5 * sft[0]["train/loss"]
    assert undocumented_in(directory.metrics_file) == []
    lines = read_metrics(directory.metrics_file)
    assert [line["step"] for line in lines] == list(range(steps))
    assert all(line["weights/probe_mean_error"] < 1e-4 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert sum(line["rollout/resumed_share"] for line in lines) > 0
    # Untrained weights solve none of these problems. After SFT, accuracy must be above zero at the
    # start and at the end of RL.
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    assert [line["step"] for line in evaluations] == [0, steps]
    assert all(line["eval/accuracy"] >= 0.1 for line in evaluations)
    assert re.search(r"^  heldout: accuracy 0\.0 % \(", done.stdout, re.MULTILINE)

    assert {"rollout/lag", "rollout/response_length", "off_policy/log_weight"} <= histograms(
        directory.tensorboard
    )
    assert list(directory.checkpoints.glob("*/manifest.json"))
    assert_exported_model_is_usable(directory.hf_export)
    samples = directory.path / "evaluations" / f"heldout-{steps}.jsonl"
    assert_eval_command_agrees(directory, samples)


def histograms(folder: Path) -> set[str]:
    """Return the names of the histograms in the TensorBoard files of `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(folder)).Reload().Tags()["histograms"])


def assert_eval_command_agrees(directory: RunDirectory, samples: Path) -> None:
    """Assert that greedy responses of the exported model equal those of the run's final weights."""
    again = directory.path / "again.jsonl"
    expected = [json.loads(line)["response"] for line in samples.read_text().splitlines()]
    command = [sys.executable, "-m", "megatron_async.cli", "eval"]
    command += ["--config", str(directory.config_file), "--model", str(directory.hf_export)]
    done = subprocess.run(
        [*command, "--samples", str(again), f"eval.prompts={len(expected)}"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "heldout: accuracy" in done.stdout
    responses = [json.loads(line)["response"] for line in again.read_text().splitlines()]
    # One response may differ, because other requests share its decode steps, which may decide a
    # near tie differently.
    assert len(responses) == len(expected) == 32
    assert sum(a != b for a, b in zip(responses, expected, strict=True)) <= 1


def assert_exported_model_is_usable(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3"
    ids = tokenizer("1+2=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
