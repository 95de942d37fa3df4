"""Tests the tutorial by following it as a reader would: in an empty directory, with the files as
shown and every command.

The five commands with SmolLM2 take two cores several minutes. CI runs only two steps of the same
model (tests/end_to_end/test_pretrained.py); this test runs on request:

    MEGATRON_ASYNC_SMOLLM2=1 bash launch/test.sh tests/test_tutorial.py
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml

from megatron_async.config.load import build_config, load_config
from megatron_async.environments import Answer
from megatron_async.environments.environment_runner import (
    EnvironmentRunner,
    Threads,
    environment_builder,
)
from megatron_async.environments.interface import Reply
from megatron_async.scoring.rewards import Sample
from megatron_async.telemetry.metrics import read_metrics
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?"
    r'^```(?P<language>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```',
    re.M | re.S,
)


class Step(NamedTuple):
    """A file to write, or commands to run if `file` is empty."""

    file: str
    text: str


def steps() -> list[Step]:
    blocks = [m for m in _BLOCK.finditer(PAGE.read_text()) if not m["skip"]]
    assert all(m["file"] or m["language"] == "bash" for m in blocks), "a file needs a title"
    return [Step(m["file"] or "", m["text"]) for m in blocks]


def test_tutorial_has_its_files_and_commands() -> None:
    files = [step.file for step in steps() if step.file]
    assert files == ["make_data.py", "reward.py", "shop.yaml", "ask.py", "till.py"]
    assert sum("megatron-async" in step.text for step in steps() if not step.file) >= 4


def test_tutorial_reward_accepts_the_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in steps():
        if step.file:
            Path(step.file).write_text(step.text)
    runpy.run_path("make_data.py")
    rows = pq.read_table("shop.parquet").to_pylist()
    score = runpy.run_path("reward.py")["score"]

    def scored(response: str, row: dict[str, str]) -> float:
        return float(score(Sample(response, row["prompt"], row["answer"], {}))[0])

    assert len(rows) == 500
    assert {scored(row["response"], row) for row in rows} == {1.0}
    assert [scored(text, rows[0]) for text in ("#-1", "# none", "-1", "")] == [0.1, 0.0, 0.0, 0.0]


def test_tutorial_environment_gives_a_second_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in steps():
        if step.file:
            Path(step.file).write_text(step.text)
    config = load_config("shop.yaml", ["environment.name=till.py:Till"])
    assert config.has_episodes and config.scores

    async def replies(*texts: str) -> list[Reply]:
        build = environment_builder(config.environment.name, {})
        with closing(Threads(1)) as threads:
            runner = EnvironmentRunner(build, config.environment.name, threads, 5.0)
            prompt = ({"role": "user", "content": "Her debt?"},)
            assert await runner.reset({"answer": "19", "prompt": "Her debt?"}, prompt) == prompt
            return [await runner.step(Answer(text)) for text in texts]

    first, second = asyncio.run(replies("2*5=10;7+10=17#17", "#19"))
    assert first.messages[0]["content"] == "Too little. Again."
    assert (first.done, first.reward, second.done, second.reward) == (False, 0.0, True, 1.0)
    first, second = asyncio.run(replies("nineteen", "# 20"))
    assert first.messages[0]["content"] == 'Write the result after "#".'
    assert (second.done, second.reward) == (True, 0.0)


def test_tutorial_and_smollm2_config_have_the_same_model_and_layout() -> None:
    shop = build_config(yaml.safe_load(next(s.text for s in steps() if s.file == "shop.yaml")))
    longer = load_config(ROOT / "configs" / "smollm2.yaml")
    assert longer.model.path == shop.model.path
    assert (longer.parallel.tensor, longer.parallel.pipeline) == (1, 2), (
        "two tensor ranks cannot divide nine heads"
    )
    assert longer.parallel == shop.parallel


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not os.environ.get("MEGATRON_ASYNC_SMOLLM2"), reason="runs on request: MEGATRON_ASYNC_SMOLLM2=1"
)
def test_tutorial_commands_train_a_model(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "REPOSITORY": str(ROOT),
    }
    printed, reply_of_ask = "", ""
    for step in steps():
        if step.file:
            (tmp_path / step.file).write_text(step.text)
            continue
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", step.text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        printed += done.stdout + done.stderr
        reply_of_ask = done.stdout if "ask.py" in step.text else reply_of_ask
        assert done.returncode == 0, printed[-6000:]
    assert "Traceback" not in printed
    run = tmp_path / "runs" / "shop"
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["weights/probe_mean_error"] < 1e-4 for line in lines), (
        "engine and trainer must agree"
    )
    assert "weights/transfer_broadcast_seconds" in lines[0]
    response = reply_of_ask.partition("<|im_start|>assistant")[2]
    assert response.strip(), "the exported model must respond in a program without this package"
    assert len((tmp_path / "responses.jsonl").read_text().splitlines()) == 16
    assert "turn 0 ended by" in printed
    assert "rollout/turns_mean" in read_metrics(tmp_path / "runs" / "till" / "metrics.jsonl")[-1]
