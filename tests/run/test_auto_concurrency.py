"""`concurrency: auto` in a live run: N' moves by what engines and trainer really do, and is told.

Everything is the real thing but the engine's tokens: its server and all requests to it, the store,
the trainer, the loop. (On SGLang: test_recipes_on_engine.py; how good the N' is that it finds:
tests/simulate/test_auto_concurrency.py.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.config import build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.rollout.sglang_process import SGLangProcess
from megatron_async.run.directory import RunDirectory
from megatron_async.run.local import train_locally
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import read_record, replay
from megatron_async.tasks.tiny_model import TinyModel, build_tiny_model
from megatron_async.telemetry.metrics import read_metrics
from tests.run.test_recipes_on_engine import LengthParity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHAPE = TinyModel(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)
FIRST = 4
"""One batch's worth of requests."""


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


def test_n_moves_and_the_metrics_tell_it(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", seed=1, shape=SHAPE)
    config = build_config(
        merge(
            read_yaml(CONFIG),
            {
                "name": "auto",
                "root": str(tmp_path),
                "steps": 16,
                "model": {"path": str(tmp_path / "model")},
                "parallel": {"ranks": 1, "tensor": 1},
                "schedule": {
                    "preset": "copris",
                    "groups_per_batch": 2,
                    "group_size": 2,
                    "concurrency": "auto",
                },
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
                "experiment": {"forced_lengths": [20, 30, 20, 60]},
            },
        )
    )
    directory = RunDirectory.create(config)
    engine = SGLangProcess(tmp_path / "model", config.engines, tmp_path / "engine.log")
    engine.start()
    try:
        train_locally(config, directory, [engine.url], LengthParity())
    finally:
        engine.stop()
    lines = read_metrics(directory.metrics_file)
    told = [int(line["rollout/concurrency"]) for line in lines]
    assert told[0] == FIRST
    assert max(told) == 2 * FIRST, f"the first probe doubles N': {told}"
    assert 0 < lines[-1]["rollout/kv_usage"] < 1
    assert {line["rollout/preemptions"] for line in lines} == {0}
    (record,) = directory.events.iterdir()
    assert most_in_flight(record) == max(told), "engines were given what the metrics tell"
    assert replay(record) is None
