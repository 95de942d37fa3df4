"""The report: one file that loads nothing, escapes what runs wrote, and that a browser can draw."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from megatron_async.config import build_config
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.tasks.tiny_model import write_character_tokenizer
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.telemetry.report_data import read_run
from megatron_async.telemetry.report_page import report_page
from megatron_async.telemetry.report_panels import ImportanceWeights, _logarithmic, interval
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Prompt

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
HOSTILE = "<script>alert('x')</script>"


def make_run(root: Path, name: str, steps: int = 6) -> Path:
    """A run of two lineages with metrics, warnings, evaluations and one resumed trajectory."""
    config = build_config({"name": name, "root": str(root), "model": {"path": str(root / "model")}})
    directory = RunDirectory.create(config)
    for lineage, begin in ((0, 0), (1, steps // 2)):
        with MetricsWriter(directory.metrics_file, lineage=lineage) as metrics:
            metrics.write(begin, {"eval/accuracy": 0.5, "eval/answers": 64}, kind="eval")
            for step in range(begin, steps):
                metrics.write(step, step_metrics(step))
            metrics.warn(begin, "engine_failed", f"engine0 has ended {HOSTILE}")
    asyncio.run(_one_trajectory(directory))
    return directory.path


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 * step,
        "reward/std": 0.3,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "rollout/lag_mean": 0.5,
        "rollout/lag_max": 1.0,
        "rollout/tokens": 100.0,
        "rollout/seconds": 2.0,
        "rollout/seconds_since_last_batch": 3.0,
        "rollout/update_pause_seconds": 0.5,
        "rollout/resumed_share": 0.2,
        "staleness/lag_share_0": 0.6,
        "staleness/lag_share_1": 0.4,
        "time/train": 1.0,
        "time/wait_for_batch": 2.0,
        "train/tokens": 50.0,
        "train/trained_tokens": 40.0,
        "train/loss": -0.1,
        "weights/ready_seconds": 0.1,
        "weights/transfer_seconds": 0.2,
        "weights/transfer_gather_seconds": 0.15,
        "weights/probe_mean_error": 0.011 + 0.001 * step,
        "weights/probe_max_error": 0.2,
        "off_policy/weight": 1.0,
        "off_policy/chi2_token": 0.25,
        "off_policy/log_ratio_min": -2.0,
        "off_policy/log_ratio_max": 0.1 + step,
    }


async def _one_trajectory(directory: RunDirectory) -> None:
    model = directory.path.parent / "model"
    model.mkdir(exist_ok=True)
    write_character_tokenizer(model)
    store = await asyncio.to_thread(TrajectoryStore.open, directory.store_file)
    group = store.add_group(Prompt(np.array([5, 6], np.int32), "sum"), 1)
    trajectory_id = group.trajectories[0].trajectory_id
    for number, end in ((0, None), (1, FinishReason.STOP)):
        key = store.begin_request(trajectory_id)
        tokens = np.array([7, 8], np.int32)
        logprobs = np.zeros(2, np.float32)
        store.append(key, tokens, logprobs, PolicyVersion(0, number), "engine0", end=end)
        store.end_request(key) if end is None else None
    await store.set_reward(trajectory_id, 1.0, {})
    await store.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report"), "one")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return report_page([read_run(run)])


def body(page: str) -> str:
    return page.partition("<body>")[2]


def test_the_page_loads_nothing_and_escapes_what_the_run_wrote(page: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert "@import" not in body(page) and "url(" not in body(page)
    assert HOSTILE not in body(page)
    assert "engine0 has ended &lt;script&gt;" in page


def test_it_shows_every_kind_of_panel_that_the_run_has_data_for(page: str) -> None:
    for title in (
        "Reward of a batch",
        "Accuracy of evaluations",
        "Where the trainer's seconds went",
        "Where the rollout side's seconds went",
        "Trained tokens by lag",
        "Weight updates by phase",
        "Inside the transfer of weights (phases overlap)",
        "Importance weight of a token",
        "Engines against the trainer, same weights",
        "Warnings and restarts",
    ):
        assert title.replace("'", "\\u0027") in page or title in page, title
    assert "KV cache in use" not in body(page), "the run has no such metrics"


def test_the_band_of_importance_weights_is_their_spread_within_their_extremes(run: Path) -> None:
    figure = ImportanceWeights("token", "weight", "chi2_token", "log_ratio").figure(read_run(run))
    band, mean, smallest, largest = figure.data
    assert {trace.mode for trace in figure.data} == {"lines"}, "no points at the band's corners"
    above, below = band.y[: len(mean.y)], band.y[len(mean.y) :]
    assert above[0] == pytest.approx(math.exp(0.1)), "no further than the largest weight"
    assert above[1:] == pytest.approx([1.5] * (len(mean.y) - 1)), "the square root of chi2"
    assert below == pytest.approx([0.5] * len(mean.y))
    assert smallest.y == pytest.approx([math.exp(-2)] * len(mean.y)) and largest.y[1] > above[1]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.9, 1.2, []),  # left to the library
        (0.5, 5.0, ["0.5", "1", "2", "5"]),
        (1.0, 5000.0, ["1", "10", "100", "1000"]),
    ],
)
def test_labels_of_a_logarithmic_axis_leave_each_other_room(
    low: float, high: float, labels: list[str]
) -> None:
    figure = go.Figure(go.Scatter(x=[0, 1], y=[low, high]))
    _logarithmic(figure)
    axis = figure.layout.yaxis
    ticks = zip(axis.tickvals or (), axis.ticktext or (), strict=True)
    assert [text for value, text in ticks if low <= value <= high] == labels


def test_segments_are_coloured_by_policy_version(page: str) -> None:
    shown = re.findall(r'<span style="background:(#\w+)" title="policy (0\.\d) on engine0', page)
    assert {version for _, version in shown} == {"0.0", "0.1"}
    assert len({colour for colour, _ in shown}) == 2


def test_responses_that_an_evaluation_has_kept_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path, "evaluated")
    folder = run / "evaluations"
    folder.mkdir()
    for step, response in ((0, "old"), (12, "nineteen"), (3, "older")):
        row = {"question": "7+12=", "answer": "19", "response": response, "reward": 1.0}
        (folder / f"held-out-{step}.jsonl").write_text(json.dumps(row) + "\n")
    text = body(report_page([read_run(run)]))
    assert "evaluation held-out" in text and "nineteen" in text and "policy version 12" in text
    assert ">old<" not in text and ">older<" not in text, "the newest alone"


def test_the_worst_response_of_an_evaluation_is_shown_with_its_facts_in_words(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, "evaluated")
    (run / "evaluations").mkdir()
    rows = [
        {"question": f"{i}=", "response": f"#{i}", "reward": float(i != 7), "parts": {"form": 1.0}}
        for i in range(9)
    ]
    (run / "evaluations" / "held-out-3.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = [sample for sample in read_run(run).samples if sample.why == "evaluation held-out"]
    assert [sample.pieces[0].text for sample in shown] == ["#7", "#0", "#1"]
    assert [sample.facts for sample in shown] == ["reward 0, parts form 1"] + [
        "reward 1, parts form 1"
    ] * 2


def test_a_response_without_a_score_counts_as_wrong_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, "evaluated")
    (run / "evaluations").mkdir()
    rows = [{"question": "1=", "response": "#1", "reward": reward} for reward in (1.0, None)]
    (run / "evaluations" / "held-out-3.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = [sample for sample in read_run(run).samples if sample.why == "evaluation held-out"]
    assert [sample.facts for sample in shown] == ["reward none", "reward 1"]


def test_runs_stand_side_by_side_with_the_same_axes(run: Path) -> None:
    other = make_run(run.parent, "other", steps=9)
    text = body(report_page([read_run(run), read_run(other)]))
    ranges = re.findall(r'"range":\[([\d.,-]+)\]', text)
    assert ranges and all(ranges.count(found) % 2 == 0 for found in ranges)
    assert "one and other" in text


def test_a_run_without_any_step_has_a_page_too(tmp_path: Path) -> None:
    gone = {"path": str(tmp_path / "gone")}
    directory = RunDirectory.create(
        build_config({"name": "new", "root": str(tmp_path), "model": gone})
    )
    assert "no trajectory has a reward yet" in report_page([read_run(directory.path)])


def test_the_interval_of_an_accuracy_is_wilsons() -> None:
    low, high = interval(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert interval(0.0, 10)[0] == 0.0 and interval(0.0, 10)[1] == pytest.approx(0.2775, abs=1e-4)
    assert interval(0.3, 0) == (0.0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: chromium-headless-shell)")
def test_a_browser_draws_every_figure_without_a_network(page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page)
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"),
            *("--window-size=1280,2000", "--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    dom = done.stdout
    assert 'data-ready="yes"' in dom, done.stderr[-2000:]
    assert dom.count('class="plotly-graph-div') == len(re.findall(r"Plotly\.newPlot\(", body(page)))
    assert dom.count("main-svg") >= dom.count('class="plotly-graph-div') > 8
    assert "Uncaught" not in done.stderr
