"""Tests `megatron-async eval` on the config of a run that was launched on several nodes.

The engine is a simulated engine in a separate process, as a real engine would be.
"""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.commands.evaluation import evaluate_checkpoints
from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.config import RunConfig, load_config
from megatron_async.engines.nodes import NODE_HOST
from megatron_async.errors import ComponentFailure
from megatron_async.models.save import write_model_directory
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.rollout.evaluate import Evaluation
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, call

SETTINGS = """
name: launched
parallel: {nodes: 2, ranks: 2, tensor: 2}
engines: {kind: simulated}
weights: {transport: tensor, verify: never}
schedule: {preset: copris, groups_per_batch: 2, group_size: 2, concurrency: 8}
sampling: {max_new_tokens: 16}
eval: {prompts: 3}
"""


@pytest.fixture
def launched(tmp_path: Path) -> tuple[RunConfig, Path]:
    """Return the config that `launch` wrote, and the directory of the run's model."""
    model = tmp_path / "model"
    build_tiny_model(model, seed=1)
    (tmp_path / "c.yaml").write_text(SETTINGS)
    overrides = [f"root={tmp_path}", f"model.path={model}"]
    nodes = Cluster(0, None, "")
    launch_run(tmp_path / "c.yaml", None, overrides, nodes, slurm=False, dry_run=False)
    config = load_config(tmp_path / "launched" / "config.yaml")
    assert config.engines.host == NODE_HOST and config.engines.api_key
    return config, model


def engines_of_this_process() -> dict[psutil.Process, list[tuple[str, int]]]:
    """Return the child processes that listen on a port, with their addresses."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        listening = [
            (entry.laddr.ip, entry.laddr.port)
            for entry in child.net_connections(kind="inet")
            if entry.status == psutil.CONN_LISTEN
        ]
        if listening:
            found[child] = listening
    return found


def test_eval_engine_listens_on_loopback_and_requires_the_key_of_the_run(
    launched: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, model = launched
    hosts: list[str] = []

    def check_engine(path: Path, result: Evaluation) -> None:
        ((host, port),) = next(iter(engines_of_this_process().values()))
        hosts.append(host)
        engine = EngineAddress("eval", f"http://{host}:{port}")
        assert call(engine, "GET", "model_info", None, 10, config.engines.api_key)
        with pytest.raises(EngineCallError, match="401"):
            call(engine, "GET", "model_info", None, 10)

    results = evaluate_checkpoints(config, [model, model], tmp_path, check_engine)
    assert [result.results[0].responses for result in results] == [3, 3]
    assert hosts == ["127.0.0.1"] * 2
    assert not engines_of_this_process(), "no engine may be left running"


def test_eval_names_the_policy_version_when_the_model_is_an_export(
    launched: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    """A model that no run has exported has no policy version. `convert` exports checkpoints with a
    version too."""
    _, model = launched
    export = tmp_path / "hf"
    tensors = list(load_file(model / "model.safetensors").items())
    write_model_directory(iter([tensors]), export, model, "1.40")
    samples = tmp_path / "samples.jsonl"
    arguments = ["--config", str(tmp_path / "launched" / "config.yaml"), "--samples", str(samples)]
    arguments += ["--model", str(export), "--model", str(model), "eval.save_samples=1"]
    done = CliRunner().invoke(app, ["eval", *arguments])
    assert done.exit_code == 0, done.output
    first, second = (line for line in done.output.splitlines() if "heldout: " in line)
    assert first.startswith(f"{export} (version 1.40): heldout: ")
    assert second.startswith(f"{model}: heldout: ")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(row["model"], row["versions"]) for row in rows] == [
        (str(export), ["1.40"]),
        (str(model), []),
    ]


def test_eval_fails_with_one_message_when_its_engine_dies(
    launched: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, model = launched

    def kill(path: Path, result: Evaluation) -> None:
        for engine in engines_of_this_process():
            engine.kill()

    with pytest.raises(ComponentFailure, match=r"evaluation of .*model failed: eval \(http"):
        evaluate_checkpoints(config, [model, model], tmp_path, kill)
