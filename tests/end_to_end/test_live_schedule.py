"""Reports of a live run about its schedule: N' that `concurrency: auto` moves, named signatures.

Everything is the real thing but the engine's tokens: its server and all requests to it, the store,
the trainer, the loop. (`auto` on SGLang: test_recipes_on_engine.py; how good the N' is that it
finds: tests/simulate/test_auto_concurrency.py.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.run_directory import RunDirectory
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import read_record, replay
from megatron_async.tasks.tiny_model import TinyModel, build_tiny_model
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing.local import train_locally
from tests.end_to_end.test_recipes_on_engine import LengthParity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHAPE = TinyModel(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)
FIRST = 8
"""Two batches' worth of requests: the KV cache would hold more."""


def most_in_flight(record: Path) -> int:
    """The most requests that ran at once, counted from a run's recorded events."""
    running: set[int] = set()
    most = 0
    _, exchanges = read_record(record)
    for exchange in exchanges:
        match exchange.event:
            case ev.Finished() | ev.Aborted():
                running.discard(exchange.event.trajectory_id)
        running |= {a.trajectory_id for a in exchange.actions if isinstance(a, ev.Submit)}
        most = max(most, len(running))
    return most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "model"
    build_tiny_model(path, seed=1, shape=SHAPE)
    return path


def settings(name: str, root: Path, model: Path, changes: dict[str, Any]) -> RunConfig:
    base = {
        "name": name,
        "root": str(root),
        "model": {"path": str(model)},
        "parallel": {"ranks": 1, "tensor": 1},
        "schedule": {"groups_per_batch": 2, "group_size": 2},
        "sampling": {"max_new_tokens": 60},
        "engines": {
            "kind": "simulated",
            "max_total_tokens": 16384,
            "health_interval_seconds": 0.02,
            "simulated": {"step_seconds": 0.002},
        },
        "weights": {"transport": "tensor", "verify": "never"},
        "eval": {"prompts": 2},
        "checkpoint": {"every_steps": 100, "export_hf": False},
    }
    return build_config(merge(merge(read_yaml(CONFIG), base), changes))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    root = tmp_path_factory.mktemp("engine")
    config = settings("engine", root, model, {})
    process = SGLangProcess(model, config.engines, root / "engine.log")
    process.start()
    yield process
    process.stop()


def test_auto_concurrency_moves_and_the_metrics_show_it(
    tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    changes = {
        "steps": 12,  # a second probe needs more
        "schedule": {"preset": "copris", "concurrency": "auto"},
        "experiment": {"forced_lengths": [20, 30, 20, 60]},
        "telemetry": {"record_steps": 100},  # all of it in one file
    }
    config = settings("auto", tmp_path, model, changes)
    directory = RunDirectory.create(config)
    train_locally(config, directory, [engine.url], LengthParity())
    lines = read_metrics(directory.metrics_file)
    limits = [int(line["rollout/concurrency"]) for line in lines]
    assert limits[0] == FIRST
    assert max(limits) == 2 * FIRST, f"the first probe doubles N': {limits}"
    assert 0 < lines[-1]["rollout/kv_usage"] <= lines[-1]["rollout/kv_usage_max"] < 1
    assert {line["rollout/preemptions"] for line in lines} == {0}
    (record,) = directory.events.iterdir()
    assert most_in_flight(record) == max(limits), "engines were given what the metrics show"
    assert replay(record) is None


def test_a_signature_is_in_the_metrics_file_though_nobody_watches(
    tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    """One batch in flight, which takes longer than to train on it: the trainer idles."""
    changes = {
        "steps": 6,
        "schedule": {"preset": "pipeline", "concurrency": 4},
        "sampling": {"max_new_tokens": 160},
        "experiment": {"forced_lengths": [160]},
    }
    config = settings("idle", tmp_path, model, changes)
    directory = RunDirectory.create(config)
    train_locally(config, directory, [engine.url], LengthParity())
    lines = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()]
    warnings = [line for line in lines if line.get("name") == "queue_underflow"]
    assert [line["kind"] for line in warnings] == ["warning"], "once, while it lasts"
    assert "schedule.concurrency" in warnings[0]["message"]
    assert 0 < warnings[0]["step"] < 6
