"""Tests what a live run reports about its schedule: N' that `concurrency: auto` changes, and named
warnings.

Only the engine's tokens are simulated. The engine's server and all requests, the store, the trainer
and the loop are real. (test_recipes_on_engine.py tests `auto` on SGLang;
tests/simulate/test_auto_concurrency.py tests how good the chosen N' is.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megatron_async.commands.evaluation import evaluate_checkpoints
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.models.tiny_model import TinyModel, build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import read_record, replay
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing.local import train_locally
from megatron_async.trajectory.types import Prompt
from tests.documented_metrics import undocumented_in
from tests.end_to_end.test_recipes_on_engine import LengthParity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHAPE = TinyModel(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)
FIRST = 8
"""Requests of two batches, which is less than the KV cache could contain."""


def most_in_flight(record: Path) -> int:
    """Return the largest number of requests that ran at once, counted from the recorded events of a
    run."""
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


@pytest.fixture(autouse=True)
def frequent_load_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask engines for their load every 20 ms, because the runs of these tests are short."""
    monkeypatch.setattr(EngineConfig, "health_interval_seconds", 0.02)


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


def test_auto_concurrency_changes_and_is_in_the_metrics(
    tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    changes = {
        "steps": 12,  # A second trial would need more steps.
        "schedule": {"preset": "copris", "concurrency": "auto"},
        "experiment": {"forced_lengths": [20, 30, 20, 60]},
    }
    config = settings("auto", tmp_path, model, changes)
    directory = RunDirectory.create(config)
    train_locally(config, directory, [engine.url], LengthParity())
    lines = read_metrics(directory.metrics_file)
    limits = [int(line["rollout/concurrency"]) for line in lines]
    assert limits[0] == FIRST
    assert max(limits) == 2 * FIRST, f"the first trial must double N': {limits}"
    used = [(line["rollout/kv_usage"], line["rollout/kv_usage_max"]) for line in lines]
    assert all(0 <= mean <= largest < 1 for mean, largest in used)
    # Only the largest step mean, because a short step may have only one report of an empty engine.
    assert max(mean for mean, _ in used) > 0
    assert {line["rollout/preemptions"] for line in lines} == {0}
    (record,) = directory.events.iterdir()
    assert most_in_flight(record) == max(limits), (
        "metrics must show the number of requests in flight"
    )
    assert replay(record) is None


def test_queue_underflow_warning_is_in_the_metrics_file_once(
    tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    """Generating the only batch in flight takes longer than training it, so that the trainer is
    idle."""
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
    assert [line["kind"] for line in warnings] == ["warning"], (
        "the warning must be emitted only once"
    )
    assert "schedule.concurrency" in warnings[0]["message"]
    assert 0 < warnings[0]["step"] < 6


class ScorerByAnswer:
    """Scorer by which some problems are never solved, some always, and the remaining ones at every
    other attempt."""

    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> tuple[float, Any]:
        kind, question = prompt.payload["answer"], prompt.payload["question"]
        self._tries[question] += 1
        right = {"never": False, "always": True}.get(kind, self._tries[question] % 2 == 1)
        return float(right), {"length": float(len(response_ids))}


def test_pools_length_penalties_and_background_evaluations_are_recorded(
    tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    kinds = ["never", "always", "sometimes"] * 4
    rows = [{"prompt": f"{n}+{n}=", "answer": kind} for n, kind in enumerate(kinds)]
    for name, problems in (("train", rows), ("eval", [{"prompt": "99+1=", "answer": "sometimes"}])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    pools = [
        {"up_to": 0.0, "share": 0.0},
        {"up_to": 0.99, "share": 1.0},
        {"up_to": 1.0, "share": 0.0},
    ]
    changes = {
        "steps": 14,
        "task": {
            "kind": "files",
            "name": "exact",
            "path": str(tmp_path / "train.jsonl"),
            "prompt_template": "{question}",
            "heldout_share": 0,
            "difficulty": {"min_attempts": 2, "pools": pools},
        },
        "eval": {
            "sets": {"own": {"path": str(tmp_path / "eval.jsonl")}},
            "samples": 4,
            "temperature": 1.0,
            "every_steps": 1,
        },
        "schedule": {"preset": "copris", "concurrency": 4},
        "experiment": {"forced_lengths": [10, 20, 30, 60]},
        "algorithm": {"overlong": {"buffer_share": 1.0, "penalty": 0.5}},
    }
    config = settings("pools", tmp_path, model, changes)
    directory = RunDirectory.create(config)
    train_locally(config, directory, [engine.url], ScorerByAnswer())

    lines = read_metrics(directory.metrics_file)
    found = undocumented_in(directory.metrics_file)
    assert [name for name in found if not name.startswith("warning/")] == []
    for line in lines:  # The penalty is proportional to the length of every response.
        penalty = 0.5 * line["rollout/response_length_mean"] / 60
        assert line["reward/mean"] == pytest.approx(line["rollout/reward_mean"] - penalty, abs=1e-6)
        assert line["reward/length"] == line["rollout/response_length_mean"]
    assert sum(line["difficulty/skipped"] for line in lines) > 0
    last = lines[-1]
    assert last["difficulty/prompts"] == 12
    assert [last[f"difficulty/pool_{n}"] for n in range(3)] == [pytest.approx(1 / 3)] * 3
    assert last["difficulty/pass_rate"] == pytest.approx(0.5, abs=0.05)

    requested: dict[int, str] = {}
    scored: Counter[tuple[str, float]] = Counter()
    with closing(StoreReader(directory.store_file)) as reader:
        for entry in reader.summaries():
            trajectory = reader.trajectory(entry.trajectory_id)
            requested[trajectory.group_id] = trajectory.prompt.payload["answer"]
            if trajectory.reward is not None:
                scored[trajectory.prompt.payload["question"], trajectory.reward] += 1
                assert trajectory.reward_detail["length"] in config.experiment.forced_lengths
    # The first epoch requests all problems, and so do requests before the scores have arrived.
    assert Counter(requested[group] for group in range(12)) == dict.fromkeys(set(kinds), 4)
    assert {kind for group, kind in requested.items() if group >= 12 + 6} == {"sometimes"}
    kept = [json.loads(text) for text in (directory.path / "difficulty.jsonl").open()]
    tally = Counter(line["right"] for line in kept if "right" in line)
    stored = Counter(reward == 1.0 for (_, reward), n in scored.items() for _ in range(n))
    for right in (False, True):  # The last requests have no reward in the store.
        assert 0 <= tally[right] - stored[right] <= 4

    evaluations = read_metrics(directory.metrics_file, kind="eval")
    ends = evaluations[0], evaluations[-1]
    assert [line["step"] for line in ends] == [0, config.steps]
    for line in evaluations:
        assert line["eval/own/version_oldest"] >= line["step"] and line["eval/own/responses"] == 4
        kept = (directory.path / "evaluations" / f"own-{line['step']:.0f}.jsonl").open()
        newest = max(int(json.loads(text)["versions"][-1].split(".")[1]) for text in kept)
        assert newest == line["eval/own/version_newest"]
    assert {line["eval/own/version_newest"] - line["step"] for line in ends} == {0}
    assert len(evaluations) > 2, "some evaluations must run during training"

    # The eval command must give the same responses. tests/commands/test_quickstart.py compares the
    # responses of exported weights.
    (again,) = evaluate_checkpoints(config, [model], tmp_path, lambda *_: None)
    kept = (directory.path / "evaluations" / f"own-{config.steps}.jsonl").open()
    assert [s["response"] for s in again.samples()] == [json.loads(s)["response"] for s in kept]
