"""Tests that metrics.jsonl has complete lines, that readers get the surviving lineage, and
warnings."""

import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_async.config.run import TelemetryConfig
from megatron_async.files.disk import CannotWrite
from megatron_async.telemetry.health import (
    HealthWatch,
    engine_drift,
    entropy_growth,
)
from megatron_async.telemetry.metrics import MetricsWriter, read_metrics
from megatron_async.telemetry.progress import Progress, format_status, format_step
from megatron_async.telemetry.trackers.base import BackgroundTracker, TrackedRun
from megatron_async.telemetry.trackers.build import start_trackers
from tests.small_disk import SmallDisk
from tests.telemetry.evaluation_lines import set_metrics


def board(folder: Path) -> list[BackgroundTracker]:
    """Return the default trackers, which write TensorBoard events to `folder`."""
    return start_trackers(TelemetryConfig(), TrackedRun("run", folder, {}))


def test_metrics_writer_writes_lines_and_tensorboard_events(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", board(tmp_path), lineage=0) as writer:
        writer.write(0, {"a": np.float32(1.5)})
        writer.write(0, {"eval/accuracy": 0.25}, kind="eval", scored_by="exact")
        writer.histogram(0, "h", np.arange(5))
        writer.warn(4, "queue_overflow", "generation outruns training")
    assert read_metrics(tmp_path / "m.jsonl")[0]["a"] == 1.5
    (evaluation,) = read_metrics(tmp_path / "m.jsonl", kind="eval")
    assert (evaluation["eval/accuracy"], evaluation["scored_by"]) == (0.25, "exact")
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("events.*"))
    assert b"warning/queue_overflow" in events and b"generation outruns training" in events


def test_read_metrics_returns_only_the_surviving_lineage(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, lineage=0) as writer:
        for step in range(8):
            writer.write(step, {"x": step})
    with MetricsWriter(path, lineage=1) as writer:  # Resumed from the checkpoint of step 5.
        for step in (5, 6):
            writer.write(step, {"x": 100 + step})
    assert [line["x"] for line in read_metrics(path)] == [0, 1, 2, 3, 4, 105, 106]


def test_read_metrics_skips_lines_with_a_damaged_key(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, lineage=0) as metrics:
        for step in range(3):
            metrics.write(step, {"x": step})
    lines = path.read_text().splitlines()
    for name, odd in (("step", "stdp"), ("lineage", "linecge"), ("kind", "knid")):
        path.write_text("\n".join([lines[0], lines[1].replace(name, odd), lines[2], ""]))
        assert [line["x"] for line in read_metrics(path)] == [0, 2]


def test_progress_prints_each_step_and_each_warning_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.jsonl"
    with Progress(path, 10, "lines") as progress, MetricsWriter(path, lineage=0) as writer:
        writer.write(3, {"train/loss": 0.5, "train/tokens_per_second": 1200}, kind="sft")
        for step in range(3):
            writer.warn(step, "mean_weight", "it is 7")
        progress.update({})
        progress.update({"warnings": {"queue_underflow": "the trainer waits"}})
        progress.update({"warnings": {"queue_underflow": "the trainer waits"}})
    out = capsys.readouterr().out
    assert out.count("sft    3/9") == 1
    assert out.count("queue_underflow") == 1
    assert out.count("warning mean_weight: it is 7") == 1
    assert read_metrics(path) == [], "a warning is not a step"


def test_progress_continues_when_the_metrics_file_was_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, numbers = tmp_path / "m.jsonl", {"train/loss": 0.5, "train/tokens_per_second": 1200}
    with Progress(path, 10, "lines") as progress, MetricsWriter(path, lineage=0) as writer:
        for step in range(3):
            writer.write(step, numbers, kind="sft")
        progress.update({})
        path.unlink()
        writer.write(3, numbers, kind="sft")
        progress.update({})
    out = capsys.readouterr().out
    assert [out.count(f"sft    {step}/9") for step in range(4)] == [1, 1, 1, 1]


def test_progress_prints_phases_of_the_start_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, starting = tmp_path / "m.jsonl", "engines load the model, trainer ranks start\n"
    with Progress(path, 10, "lines") as progress, MetricsWriter(path, lineage=0) as writer:
        # None means that the status timed out. An engine is lost and returns.
        for up in (None, 0, 1, 2, 2, None, 1, None, 2):
            progress.update({} if up is None else {**STATUS, "engines_up": up})
        assert capsys.readouterr().out == starting + "engines 2/2 generate\n"
        writer.write(3, {name: value for name, value in LARGE.items() if name != "kind"})
        progress.update({**STATUS, "engines_up": 1})
        progress.update(None)
        assert capsys.readouterr().out.count("\n") == 1, "only the step"
    with Progress(tmp_path / "none.jsonl", 10, "lines") as progress:
        progress.update({})
        progress.update(None)
    assert capsys.readouterr().out == starting, "a run that ended before its first step"


def test_format_status_names_engines_weights_and_responses() -> None:
    status = {**STATUS, "engines_up": 1, "states": {"running": 7, "partial": 4, "scored": 0}}
    line = "engines 1/2, weights of step 3; responses: 7 in generation, 4 interrupted"
    assert format_status(status) == line
    restored = format_status({**status, "version": "2.3", "states": {}})
    assert restored == "engines 1/2, weights of step 3 (lineage 2); responses: none"
    assert format_status({}).startswith("engines load the model")


STATUS = {"engines": 2, "engines_up": 2, "version": "0.3", "states": {}}

LARGE = {
    "kind": "train",
    "step": 998,
    "rollout/reward_mean": 0.1234,
    "rollout/tokens_per_second": 12_345.0,
    "train/tokens_per_second": 123_456.0,
    "rollout/lag_mean": 3.21,
    "rollout/lag_max": 12.0,
    "time/step": 345.6,
}


def test_format_step_fits_eighty_columns_and_has_the_steps_number() -> None:
    text = format_step(LARGE, 1000)
    assert text.startswith("step  998/999  reward 0.123  gen 12,345 train 123,456 tok/s")
    assert len(text) <= 80
    ready = {k: v for k, v in LARGE.items() if k != "rollout/tokens_per_second"}
    assert "gen - train" in format_step(ready, 1000)


def test_progress_panel_shows_totals_and_warnings_in_eighty_columns(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    progress = Progress(path, 1000, "live")
    screen = Console(width=80, height=40, file=StringIO(), force_terminal=True)
    progress._console = screen
    with progress, MetricsWriter(path, lineage=0) as writer:
        writer.write(998, {k: v for k, v in LARGE.items() if k not in ("kind", "step")})
        writer.write(998, set_metrics(0.5, reward_mean=0.625), kind="eval", scored_by="task")
        writer.warn(3, "zero_reward", "no response has a reward above 0")
        progress.update({**STATUS, "version": "0.998", "states": {"running": 64}})
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    words = ("999 of 1000 steps", "accuracy 50.0 %, reward 0.625 (greedy)", "left", "zero_reward")
    assert all(text in shown for text in (*words, "64 in generation"))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert max(len(line) for line in plain.splitlines() if "│" in line) <= 80


def test_entropy_growth_warns_only_when_the_rise_is_steady_and_large() -> None:
    rising = [1.0 + 0.1 * i for i in range(10)]
    warning = entropy_growth(rising)
    assert warning is not None and "entropy rose" in warning
    assert entropy_growth(rising[:9]) is None
    assert entropy_growth(rising[::-1]) is None
    assert entropy_growth([1.0 + 0.01 * i for i in range(10)]) is None
    assert entropy_growth([*rising[:9], float("nan")]) is None


def _probe_errors(first: float, last: float, steps: int, seed: int = 1) -> list[float]:
    """Return errors on a straight line with noise of a third, as few tokens per step give."""
    random = np.random.default_rng(seed)
    return list(np.linspace(first, last, steps) * random.uniform(0.67, 1.33, steps))


def test_engine_drift_is_emitted_once_while_it_lasts() -> None:
    """The errors, 0.011 to 0.036 in 30 steps, are those that a user of this pair of engines
    reported."""
    watch = HealthWatch()
    found = [watch.step({"weights/probe_mean_error": e}) for e in _probe_errors(0.011, 0.036, 30)]
    named = [(step, name) for step, warnings in enumerate(found) for name, _ in warnings]
    assert [name for _, name in named] == ["engine_drift"]
    assert 10 <= named[0][0] < 30
    assert "engine_drift" in watch.active


@pytest.mark.parametrize("seed", range(20))
def test_engine_drift_is_silent_when_errors_are_noise_or_float32_rounding(seed: int) -> None:
    steady = _probe_errors(0.02, 0.02, 200, seed)
    assert not any(engine_drift(steady[:n]) for n in range(200))
    float32 = _probe_errors(1e-7, 1e-5, 200, seed)
    assert not any(engine_drift(float32[:n]) for n in range(200))


def test_engine_drift_is_detected_across_a_resume() -> None:
    errors = _probe_errors(0.011, 0.036, 300)
    lines = [{"weights/probe_mean_error": error} for error in errors]
    resumed = HealthWatch(before=lines[:290])
    found = [name for line in lines[290:] for name, _ in resumed.step(line)]
    assert found == ["engine_drift"]
    assert engine_drift([0.01] * 4 + [0.05] * 5) is None  # There are too few steps.


def test_format_step_gives_each_evaluation_set_a_line() -> None:
    aime = set_metrics(0.25, "eval/aime", reward_mean=0.5, temperature=0.6, length_mean=900.5)
    line = {"kind": "eval", "step": 4, **set_metrics(0.5), **aime}
    assert format_step(line, 10).splitlines() == [
        "held-out, step 4: accuracy 50.0 %, reward 0.500 (64 responses, greedy, 7.0 tokens)",
        "aime, step 4: accuracy 25.0 %, reward 0.500 (64 responses, temperature 0.6, 900.5 tokens)",
    ]


def test_metrics_writer_removes_torn_line_when_it_opens_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, lineage=0) as writer:
        writer.write(0, {"x": 1})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    with MetricsWriter(path, lineage=1) as writer:
        writer.write(1, {"x": 2})
    assert [line["x"] for line in read_metrics(path)] == [1, 2]


def test_progress_shows_the_line_that_replaces_a_torn_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "train", "st' + 200 * "x")
    with Progress(path, 10, "lines") as progress:
        progress.update({})
        with MetricsWriter(path, lineage=0) as writer:
            writer.write(3, {"train/loss": 0.5, "train/tokens_per_second": 1200}, kind="sft")
        progress.update({})
    assert capsys.readouterr().out.count("sft    3/9") == 1


def test_metrics_writer_raises_and_keeps_lines_complete_when_disk_is_full(disk: SmallDisk) -> None:
    path = disk.path / "m.jsonl"
    writer = MetricsWriter(path, lineage=0)
    disk.fill(leave=2 * 4096)
    metrics = {f"metric/{n}": float(n) for n in range(40)}
    step = 0
    with pytest.raises(CannotWrite, match=f"^{path} cannot be written: No space left on device;"):
        for step in range(100):
            writer.write(step, metrics)
    writer.close()
    assert step > 2
    assert len(read_metrics(path)) == step
    disk.make_room()
    with MetricsWriter(path, lineage=1) as again:
        again.write(step, metrics)
    assert len(read_metrics(path)) == step + 1
