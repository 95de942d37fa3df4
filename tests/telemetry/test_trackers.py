"""Tests what trackers receive, and that no tracker can delay or stop a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from megatron_async.config.load import build_config
from megatron_async.config.run import TelemetryConfig
from megatron_async.errors import UserError
from megatron_async.telemetry.metrics import MetricsWriter, read_metrics
from megatron_async.telemetry.trackers.base import BackgroundTracker, TrackedRun, Tracker
from megatron_async.telemetry.trackers.build import build_trackers, start_trackers
from megatron_async.telemetry.trackers.tensorboard import TensorBoardTracker

USER_DEFINED = """
from megatron_async.telemetry.trackers.base import Tracker


class Noting(Tracker):
    def __init__(self, prefix=""):
        self.prefix, self.seen = prefix, []

    def start(self, run):
        self.seen.append(("start", run.name, run.config["steps"]))

    def metrics(self, step, values):
        self.seen.append((step, {self.prefix + name: value for name, value in values.items()}))

    def finish(self):
        self.seen.append("finish")
"""


def run_of(folder: Path, lineage: int = 0) -> TrackedRun:
    return TrackedRun("run", folder, {"steps": 3, "eval": {"prompts": 4}}, lineage)


class Hanging(Tracker):
    """A tracker whose first call hangs until the test releases it."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def start(self, run: TrackedRun) -> None:
        self.released.wait(60)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    tracker = Hanging()
    yield tracker
    tracker.released.set()


def settings(*trackers: Any) -> TelemetryConfig:
    config = build_config({"telemetry": {"trackers": list(trackers)}})
    return config.telemetry


def test_user_defined_tracker_is_loaded_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(USER_DEFINED)
    setting = {"name": f"{tmp_path}/own.py:Noting", "arguments": {"prefix": "x/"}}
    (tracker,) = start_trackers(settings(setting), run_of(tmp_path))
    with MetricsWriter(tmp_path / "m.jsonl", [tracker], lineage=0) as writer:
        writer.write(4, {"loss": 0.5})
        writer.histogram(4, "h", np.arange(3))  # This tracker ignores histograms.
    seen = tracker._tracker.seen  # type: ignore[attr-defined]
    assert seen == [("start", "run", 3), (4, {"x/loss": 0.5}), "finish"]
    assert (tracker.dropped, tracker.failed) == (0, 0)


def test_hanging_tracker_delays_nothing_and_its_calls_are_counted(
    tmp_path: Path, hanging: Hanging
) -> None:
    tracker = BackgroundTracker("hanging", hanging, run_of(tmp_path), queue_calls=4)
    writer = MetricsWriter(tmp_path / "m.jsonl", [tracker], lineage=0)
    began = time.monotonic()
    for step in range(100):
        writer.write(step, {"loss": 0.5})
    assert time.monotonic() - began < 20, "each call would have waited a minute"
    lines = read_metrics(tmp_path / "m.jsonl")
    assert len(lines) == 100 and lines[-1]["telemetry/tracker_calls_dropped"] >= 90
    warnings = [json.loads(t) for t in (tmp_path / "m.jsonl").read_text().splitlines()]
    messages = [w["message"] for w in warnings if w["kind"] == "warning"]
    assert messages == ["tracker hanging is too slow: calls are dropped"]
    assert not tracker.close(0.1), "the thread is left to the end of the process"


def test_failing_tracker_is_named_and_no_longer_called_after_ten_failures(tmp_path: Path) -> None:
    class Broken(Tracker):
        calls = 0

        def metrics(self, step: int, values: Mapping[str, float]) -> None:
            self.calls += 1
            raise RuntimeError("no such host")

    broken = Broken()
    tracker = BackgroundTracker("broken", broken, run_of(tmp_path))
    for step in range(30):
        tracker.call("metrics", step, {})
    assert tracker.close(60)
    news = tracker.take_problem()
    assert (broken.calls, tracker.failed) == (10, 10) and tracker.dropped == 21
    assert news is not None and "has failed 10 times in a row and is no longer called" in news
    assert tracker.take_problem() is None


def test_trackers_first_failure_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        USER_DEFINED.replace('self.seen.append(("start"', '1 / 0 ; (("s"')
    )
    (tracker,) = start_trackers(settings(f"{tmp_path}/own.py:Noting"), run_of(tmp_path))
    assert tracker.close(60)
    news = tracker.take_problem()
    assert news is not None and f"ZeroDivisionError: division by zero at {tmp_path}/own.py:" in news


@pytest.mark.parametrize(
    ("tracker", "sentence"),
    [
        ("wandbb", "telemetry.trackers has 'wandbb'; a tracker is one of tensorboard, wandb, ml"),
        ("nowhere.at_all:Tracker", "there is no module 'nowhere.at_all'"),
        ("pathlib:Path", "is not a megatron_async.telemetry.trackers.base.Tracker"),
        ({"name": "tensorboard", "arguments": {"color": 1}}, "refuses its arguments"),
    ],
)
def test_build_trackers_refuses_tracker_that_cannot_be_created(tracker: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_trackers(settings(tracker))


@pytest.mark.parametrize("arguments", [{"tracking_uri": "sqlite:///mlflow.db"}, {}])
def test_mlflow_tracker_requires_a_server_when_only_mlflow_skinny_is_installed(
    tmp_path: Path, arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    if find_spec("sqlalchemy"):
        pytest.skip("all of mlflow is installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    message = "tracking_uri is 'sqlite:///.*mlflow.db', which is not a .* `pip install mlflow`$"
    with pytest.raises(UserError, match=message):
        build_trackers(settings({"name": "mlflow", "arguments": arguments}))
    assert list(
        build_trackers(
            settings({"name": "mlflow", "arguments": {"tracking_uri": "http://localhost:5000"}})
        )
    )


def test_trackers_setting_accepts_a_single_name() -> None:
    config = build_config({"telemetry": {"trackers": "tensorboard"}}).telemetry
    assert list(build_trackers(config)) == ["tensorboard"]


def test_samples_are_written_to_the_run_directory_and_to_tensorboard(tmp_path: Path) -> None:
    trackers = start_trackers(TelemetryConfig(), run_of(tmp_path))
    rows = [{"question": "2+2?", "response": "it is four", "reward": 1.0}]
    with MetricsWriter(tmp_path / "m.jsonl", trackers, lineage=0) as writer:
        writer.samples(3, "heldout", rows)
        writer.samples(3, "heldout", rows)  # A restored run repeats it.
        writer.checkpoint(3, tmp_path / "checkpoints" / "step_3")
        writer.report(3, "steps in all 3")
    lines = (tmp_path / "evaluations" / "heldout-3.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("events.*"))
    for text in (b"samples/heldout", b"it is four", b"checkpoints/step_3", b"steps in all 3"):
        assert text in events


def steps_shown(folder: Path) -> dict[str, list[int]]:
    """Return the steps of each tag that TensorBoard shows."""
    shown = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0, "text": 0})
    shown.Reload()
    return {tag: [event.step for event in shown.Tensors(tag)] for tag in shown.Tags()["tensors"]}


@pytest.mark.parametrize("restored", [[5], [0], [3, 3, 1], [9, 7, 8]])
@pytest.mark.parametrize("stage", ["", "sft"])
def test_tensorboard_shows_each_step_once_when_a_run_is_restored(
    restored: list[int], stage: str, tmp_path: Path
) -> None:
    other = TensorBoardTracker()
    other.start(TrackedRun("run", tmp_path, {}, stage="sft" if not stage else ""))
    other.metrics(9, {"train/loss": 0.5})
    other.finish()
    for lineage, step in enumerate([0, *restored]):
        tracker = TensorBoardTracker()
        tracker.start(TrackedRun("run", tmp_path, {}, lineage, stage, step))
        for number in range(step, 10):
            tracker.metrics(number, {"train/loss": lineage})
            if number % 2 == 0:
                tracker.metrics(number, {"eval/accuracy": lineage})
                tracker.text(number, "warning/slow", "slow")
        tracker.finish()
    folder = tmp_path / "tensorboard"
    shown = steps_shown(folder / stage)
    assert shown["train/loss"] == list(range(10))
    assert shown["eval/accuracy"] == [0, 2, 4, 6, 8]
    assert shown["warning/slow/text_summary"] == [0, 2, 4, 6, 8]
    assert steps_shown(folder / ("" if stage else "sft"))["train/loss"] == [9], (
        "the other stage is unchanged"
    )


def test_wandb_id_belongs_to_the_run_when_directories_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from megatron_async.telemetry.trackers.weights_and_biases import WandbTracker

    calls: list[dict[str, Any]] = []

    class Run:
        def define_metric(self, *_: object, **__: object) -> None: ...

    def init(**arguments: Any) -> Run:
        calls.append(arguments)
        return Run()

    monkeypatch.setattr(wandb, "init", init)

    def start(folder: Path, lineage: int = 0, stage: str = "", **arguments: Any) -> str:
        folder.mkdir(exist_ok=True)
        WandbTracker(**arguments).start(TrackedRun("run", folder, {}, lineage, stage))
        assert calls[-1]["resume"] == "allow"
        return str(calls[-1]["id"])

    folder = tmp_path / "run"
    first, tuning = start(folder), start(folder, stage="sft")
    assert first == start(folder, 1) and len({first, tuning}) == 2
    folder.rename(tmp_path / "run.failed-1")
    second = start(folder)
    assert second != first, "another run at the same path"
    assert start(tmp_path / "run.failed-1", 2) == first, "the run that was moved"
    assert start(tmp_path / "run.failed-1", 2, stage="sft") == tuning
    assert start(folder, 1) == second
    assert start(folder, 1, id="own") == "own", "the user's argument wins"


def everything(tracker: BackgroundTracker, folder: Path, step: int) -> None:
    """Call each method of a tracker once."""
    tracker.call("metrics", step, {"train/loss": 0.5, "eval/aime/pass_at_4": 0.25})
    tracker.call("histogram", step, "rollout/lag", np.arange(5))
    tracker.call("samples", step, "aime", [{"question": "2+2?", "reward": 1.0}])
    tracker.call("text", step, "report", "3 steps")
    tracker.call("checkpoint", step, folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.one_core
def test_wandb_tracker_continues_one_offline_run_after_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for lineage in (0, 1):  # The restored run repeats a step.
        (tracker,) = start_trackers(settings("wandb"), run_of(tmp_path, lineage))
        everything(tracker, tmp_path, 3)
        assert tracker.close(300)
        assert (tracker.failed, tracker.dropped, tracker.take_problem()) == (0, 0, None)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    # A name is offline-run-TIME-ID; wandb appends a number if two runs start in the same second.
    assert len({run.name.split("-")[3] for run in runs}) == 1, "both are one W&B run"
    for run in runs:
        expected = (b"eval/aime/pass_at_4", b"rollout/lag", b"3 steps", b"prompts")
        file, end = next(run.glob("*.wandb")), time.monotonic() + 60
        # A separate process of W&B writes the file, maybe after `finish` has returned.
        while not all(text in file.read_bytes() for text in expected):
            assert time.monotonic() < end, file.read_bytes()
            time.sleep(0.1)
        assert list(run.glob("files/media/table/samples/*.json"))


@pytest.mark.slow
@pytest.mark.one_core
def test_mlflow_tracker_continues_one_run_in_files_after_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    for lineage in (0, 1):
        setting = {"name": "mlflow", "arguments": {"tracking_uri": uri, "experiment": "tests"}}
        (tracker,) = start_trackers(settings(setting), run_of(tmp_path, lineage))
        everything(tracker, tmp_path, 3 + lineage)
        assert tracker.close(300)
        assert (tracker.failed, tracker.dropped, tracker.take_problem()) == (0, 0, None)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/aime/pass_at_4")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.25), (4, 0.25)]
    assert run.data.params == {"steps": "3", "eval.prompts": "4"}
    assert run.data.tags["checkpoint"] == str(tmp_path / "checkpoints")
    assert run.info.status == "FINISHED"
    found = {file.path for file in client.list_artifacts(run.info.run_id, "samples")}
    assert found == {"samples/aime-3.jsonl", "samples/aime-4.jsonl"}
