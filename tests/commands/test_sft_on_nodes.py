"""Tests supervised fine-tuning on two nodes (both are this machine), whose torchrun agents connect
to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import load_config
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.train_loop.sft_rank import train

SETTINGS = """
name: tuned
root: {root}
model: {{path: {root}/model}}
parallel: {{nodes: 2, ranks: 2, tensor: 2}}
sft: {{steps: 3, batch_sequences: 4, examples: 16, optimizer: {{lr: 1.0e-3}}}}
telemetry: {{progress: lines, trackers: []}}
"""
SECONDS = 180


@pytest.fixture
def config(tmp_path: Path) -> Path:
    build_tiny_model(tmp_path / "model", seed=1)
    path = tmp_path / "c.yaml"
    path.write_text(SETTINGS.format(root=tmp_path))
    return path


def sft(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the `sft` command of one node."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron_async.cli",
            "sft",
            "--config",
            str(config),
            "--out",
            str(config.parent / "out"),
            *arguments,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_nodes(*nodes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Wait for the commands of all nodes; return the exit code and the output of each."""
    try:
        outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.mark.slow
def test_sft_on_two_nodes_gives_the_losses_and_weights_of_one_rank(
    config: Path, tmp_path: Path
) -> None:
    session = ("--session", "monday")
    second = sft(config, *session, "--index", "1")  # Nodes may start in any order.
    first = sft(config, *session, "--index", "0")
    (code, shown), (other_code, other_shown) = wait_for_nodes(first, second)
    assert (code, other_code) == (0, 0), shown + other_shown
    assert "wrote a checkpoint to" in shown
    assert other_shown == "", "only the first node may show the progress"
    directory = RunDirectory(tmp_path / "tuned-sft")
    assert {path.name for path in directory.logs.iterdir()} == {"sft-0.log", "sft-1.log"}
    # The same training in this process, by one rank that has the complete model.
    one_rank = load_config(config, ["parallel.nodes=1", "parallel.ranks=1", "parallel.tensor=1"])
    reference = RunDirectory.create(one_rank.model_copy(update={"name": "alone"}))
    train(one_rank, reference, tmp_path / "alone-out")
    losses, expected = (
        [line["train/loss"] for line in read_metrics(d.metrics_file, kind="sft")]
        for d in (directory, reference)
    )
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(losses) == 2, "metrics must have the first and the last step"
    on_nodes, alone = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "alone-out"))
    assert on_nodes.keys() == alone.keys()
    worst = max(float((on_nodes[name] - tensor).abs().max()) for name, tensor in alone.items())
    assert worst < 1e-4, "the limit is a tenth of a weight's change in one step"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "parallel.nodes is 2, but this command uses one machine"),
        (("--index", "1"), "--index is 1, which requires --session"),
        (
            ("--session", "s", "--index", "2"),
            "--index is 2; parallel.nodes is 2, so it must be 0 to 1",
        ),
        (("--session", "a/b"), "--session is 'a/b'; it must be a plain file name"),
    ],
)
def test_sft_job_writes_no_file_when_settings_are_refused(
    config: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    command = ["sft", "--config", str(config), "--out", str(tmp_path / "out"), *arguments]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert not (tmp_path / "tuned-sft").exists()
