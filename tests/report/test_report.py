"""Tests that the report is one file that loads nothing, escapes text, and is drawn by a browser."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import build_config
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.report.data import ReportSample, read_run
from megatron_async.report.page import report_page
from megatron_async.report.panels import (
    PANELS,
    accuracy,
    episode_endings,
    evaluation_reward,
    event_timeline,
    importance_weights,
)
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    Prompt,
)
from tests.browser import drawn, flaws, needs_browser
from tests.store import test_episodes as episodes
from tests.telemetry.evaluation_lines import set_metrics

HOSTILE = "<script>alert('x')</script>"


def make_run(root: Path, name: str, steps: int = 6) -> Path:
    """Create a run of two lineages with metrics, warnings, evaluations and one resumed
    trajectory."""
    config = build_config({"name": name, "root": str(root), "model": {"path": str(root / "model")}})
    directory = RunDirectory.create(config)
    for lineage, begin in ((0, 0), (1, steps // 2)):
        with MetricsWriter(directory.metrics_file, lineage=lineage) as metrics:
            metrics.write(begin, set_metrics(0.5), kind="eval", scored_by="task")
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
        "rollout/lag_before_queue_mean": 0.3,
        "rollout/lag_in_queue_mean": 0.2,
        "rollout/lag_max": 1.0,
        "rollout/wait_for_trainer_seconds": 0.25,
        "rollout/tokens": 100.0,
        "rollout/seconds": 2.0,
        "rollout/seconds_since_last_batch": 3.0,
        "rollout/update_pause_seconds": 0.5,
        "rollout/resumed_share": 0.2,
        "rollout/truncated_share": 0.1,
        "reward/uninformative_groups": 0.3,
        "actor/clip_fraction": 0.05,
        "staleness/lag_share_0": 0.6,
        "staleness/lag_share_1": 0.4,
        "time/train": 1.0,
        "time/wait_for_batch": 2.0,
        "rollout/scores": 10.0,
        "rollout/scorer_errors": float(step == 3),
        "rollout/scorer_timeouts": 0.0,
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


OBSERVED = "higher\n"
ANSWERED = "<b>50</b>"


async def _three_games(directory: RunDirectory) -> None:
    """Store two episodes that were played to the end, with one and three turns, and one dropped
    episode."""
    tokenizer = write_character_tokenizer(directory.path.parent / "model")
    observed, wrote = (tokenizer.encode(text) for text in (OBSERVED, ANSWERED))
    store = await asyncio.to_thread(TrajectoryStore.open, directory.store_file)
    for turns, reward in ((1, 1.0), (3, 0.25)):
        i = store.add_group(episodes.NO_PROMPT, 1).trajectories[0].trajectory_id
        for turn in range(turns):
            version = PolicyVersion(0, turn)
            before = episodes.outcome("50", 0.25) if turn == 1 else None
            parent = turn - 1 if turn else None
            await episodes.play(
                store, i, observed, wrote, parent=parent, before=before, version=version
            )
        await episodes.end(store, i, episodes.outcome("50"), reward)
    i = store.add_group(episodes.NO_PROMPT, 1).trajectories[0].trajectory_id
    await episodes.play(store, i, observed, wrote, parent=None)
    store.drop(i, DropReason.ENVIRONMENT)
    await store.close()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of episodes with an evaluation."""
    root = tmp_path_factory.mktemp("played")
    (root / "model").mkdir()
    settings = {"name": "played", "root": str(root), "model": {"path": str(root / "model")}}
    directory = RunDirectory.create(build_config(settings))
    with MetricsWriter(directory.metrics_file, lineage=0) as metrics:
        for step in range(3):
            calls = {"": 0.01, "_max": 0.5}
            more = {f"rollout/environment_seconds{end}": s for end, s in calls.items()}
            more |= {"rollout/turns_mean": 3.5, "rollout/turns_max": 7.0}
            metrics.write(step, {**step_metrics(step), **more})
    asyncio.run(_three_games(directory))
    conversation = [
        {"role": "user", "content": "Guess my number."},
        {"role": "assistant", "content": "fifty"},
    ]
    row = {"question": "", "response": "fifty", "reward": 0.0, "messages": conversation}
    (directory.path / "evaluations").mkdir()
    (directory.path / "evaluations" / "held-out-2.jsonl").write_text(json.dumps(row) + "\n")
    return directory.path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report"), "one")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return report_page([read_run(run)])


def body(page: str) -> str:
    return page.partition("<body>")[2]


def test_report_page_loads_nothing_and_escapes_text_of_the_run(page: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert "@import" not in body(page) and "url(" not in body(page)
    assert HOSTILE not in body(page)
    assert "engine0 has ended &lt;script&gt;" in page


def test_report_page_shows_every_panel_for_which_the_run_has_metrics(page: str) -> None:
    for title in (
        "Reward of a batch",
        "Accuracy of evaluations",
        "Time of the trainer by phase",
        "Time of the rollout side by phase",
        "Waiting for the other side",
        "rollout side",
        "from then until training",
        "Trained tokens by lag",
        "Weight updates by phase",
        "Transfer of weights by phase (phases overlap)",
        "Importance weight of a token",
        "Log-probs of engines and trainer, same weights",
        "Scores that failed",
        "Warnings and restarts",
    ):
        assert title.replace("'", "\\u0027") in page or title in page, title
    assert "KV cache in use" not in body(page), "the run has no metrics of the KV cache"
    assert "<td>failed scores</td><td>2 of 90</td>" in page
    assert "past the limit" not in body(page), "no score has failed in this way"


def test_importance_weights_band_is_their_spread_within_their_extremes(run: Path) -> None:
    figure = importance_weights("token").figure(read_run(run))
    band, mean, smallest, largest = figure.data
    assert {trace.mode for trace in figure.data} == {"lines"}, (
        "the band has no markers at its corners"
    )
    above, below = band.y[: len(mean.y)], band.y[len(mean.y) :]
    assert above[0] == pytest.approx(math.exp(0.1)), "the band ends at the largest weight"
    assert above[1:] == pytest.approx([1.5] * (len(mean.y) - 1)), "the square root of chi2"
    assert below == pytest.approx([0.5] * len(mean.y))
    extreme = replace(read_run(run), train=[{**step_metrics(0), "step": 0}])
    extreme.train[0]["off_policy/log_ratio_min"] = -700.0
    figure = importance_weights("token").figure(extreme)
    assert figure.data[2].y == pytest.approx([math.exp(-20)]), (
        "weights are shown as log ratios are clamped"
    )
    assert smallest.y == pytest.approx([math.exp(-2)] * len(mean.y)) and largest.y[1] > above[1]


def test_report_page_colors_segments_by_policy_version(page: str) -> None:
    shown = re.findall(r'background:(#\w+)55" title="policy (version \d) on engine0', page)
    assert {version for _, version in shown} == {"version 0", "version 1"}
    assert len({color for color, _ in shown}) == 2


def test_trajectory_is_shown_once_when_it_was_chosen_for_several_reasons(run: Path) -> None:
    (sample,) = read_run(run).samples
    assert sample.why == "highest reward, lowest reward, longest, most policy versions"
    assert sample.facts == "trajectory 0, reward 1, 4 tokens in 2 segments, complete"


def test_report_shows_best_worst_and_random_episode_turn_by_turn(played: Path) -> None:
    best, *others, evaluated = read_run(played).samples
    assert best.why.startswith("highest reward")
    assert best.facts == "episode 0, reward 1, 1 turn, 16 tokens, ended by the environment"
    shown = {why for sample in (best, *others) for why in sample.why.split(", ")}
    assert shown == {"highest reward", "lowest reward", "random"}
    worst = next(sample for sample in others if "lowest reward" in sample.why)
    assert worst.facts.startswith("episode 1, reward 0.25, 3 turns, 48 tokens")
    headings = [piece.heading for piece in worst.pieces]
    assert headings == ["turn 0, reward 0.25", "", "turn 1", "", "turn 2", ""]
    assert [piece.text for piece in worst.pieces] == [OBSERVED, ANSWERED] * 3
    authors = [piece.version for piece in worst.pieces]
    assert authors == [None, "version 0", None, "version 1", None, "version 2"]
    assert [piece.heading for piece in evaluated.pieces] == ["user", "assistant"]
    text = body(report_page([read_run(played)]))
    assert "<h2>Episodes</h2>" in text and "turn 0, reward 0.25" in text
    assert ANSWERED not in text and "&lt;b&gt;50&lt;/b&gt;" in text


def test_report_of_episodes_shows_turns_reply_times_and_endings(played: Path) -> None:
    read = read_run(played)
    figure = episode_endings(read)
    assert figure is not None
    drawn_ = {trace.name: (tuple(trace.x), tuple(trace.y)) for trace in figure.data}
    assert drawn_ == {
        "by the environment": ((1, 3), (1, 1)),
        "dropped: environment": ((1,), (1,)),
    }
    text = report_page([read])
    for title in ("Turns of an episode", "Episodes by number of turns and end"):
        assert title in body(text), title
    assert re.search("Reply time of the environment", body(text))


def evaluated(folder: Path, rows_by_step: dict[int, list[dict[str, Any]]]) -> Path:
    """Create a run whose evaluations have stored these responses."""
    run = make_run(folder, "evaluated")
    (run / "evaluations").mkdir()
    for step, rows in rows_by_step.items():
        text = "\n".join(map(json.dumps, rows))
        (run / "evaluations" / f"held-out-{step}.jsonl").write_text(text)
    return run


def of_evaluation(run: Path) -> list[ReportSample]:
    """Return the samples of evaluations that the report shows."""
    return [sample for sample in read_run(run).samples if sample.why == "evaluation held-out"]


def test_report_shows_responses_of_the_newest_evaluation(tmp_path: Path) -> None:
    row = {"question": "7+12=", "answer": "19", "reward": 1.0}
    responses = ((0, "old"), (12, "nineteen"), (3, "older"))
    run = evaluated(tmp_path, {step: [{**row, "response": text}] for step, text in responses})
    text = body(report_page([read_run(run)]))
    assert "evaluation held-out" in text and "nineteen" in text and "policy version 12" in text
    assert ">old<" not in text and ">older<" not in text, "only the newest evaluation is shown"


def test_report_shows_the_worst_response_of_an_evaluation_first(
    tmp_path: Path,
) -> None:
    rows = [
        {"question": f"{i}=", "response": f"#{i}", "reward": float(i != 7), "parts": {"form": 1.0}}
        for i in range(9)
    ]
    shown = of_evaluation(evaluated(tmp_path, {3: rows}))
    assert [sample.pieces[0].text for sample in shown] == ["#7", "#0", "#1"]
    assert [sample.facts for sample in shown] == ["reward 0, form 1"] + ["reward 1, form 1"] * 2


def test_report_sample_has_the_models_prompt_and_facts_in_words(tmp_path: Path) -> None:
    row = {
        "question": "2+2?",
        "prompt": "user: 2+2? Think.",
        "answer": "4",
        "response": "5",
        "reward": 0.0,
        "parts": {"scorer_error": 1.0, "form": 0.25},
        "tokens": 7,
        "truncated": True,
        "versions": ["0.16", "1.17"],
    }
    scored = {"parts": {"score": 0.0, "answered": 0.0}, "versions": ["0.17"]}
    rows = [row, {**row, "truncated": False, **scored}]
    first, second = of_evaluation(evaluated(tmp_path, {17: rows}))
    assert first.prompt == "user: 2+2? Think."
    facts = "reward 0, scorer error, form 0.25, right answer 4, cut at the length limit"
    assert (first.facts, second.facts) == (facts, "reward 0, no answer found, right answer 4")
    assert first.pieces[0].version == "version 16 and version 17 (lineage 1)"
    assert second.pieces[0].version == "version 17" and second.pieces[0].tokens == 7


def test_report_ranks_response_without_a_score_as_worst(tmp_path: Path) -> None:
    rows = [{"question": "1=", "response": "#1", "reward": reward} for reward in (1.0, None)]
    shown = of_evaluation(evaluated(tmp_path, {3: rows}))
    assert [sample.facts for sample in shown] == ["no score", "reward 1"]


def test_report_of_two_runs_uses_the_same_axes(run: Path) -> None:
    other = make_run(run.parent, "other", steps=9)
    text = body(report_page([read_run(run), read_run(other)]))
    ranges = re.findall(r'"range":\[([\d.,-]+)\]', text)
    assert ranges and all(ranges.count(found) % 2 == 0 for found in ranges)
    assert "one and other" in text


def test_report_page_exists_for_a_run_without_steps(tmp_path: Path) -> None:
    missing = {"path": str(tmp_path / "missing")}
    directory = RunDirectory.create(
        build_config({"name": "new", "root": str(tmp_path), "model": missing})
    )
    assert "no trajectory has a reward yet" in report_page([read_run(directory.path)])


def test_event_timeline_gives_resumes_and_warnings_separate_rows(run: Path) -> None:
    figure = event_timeline(read_run(run))
    (points,) = figure.data
    assert points.y == ("engine_failed", "engine_failed", "resume")
    assert points.text[2] == "lineage 1 from step 3" and min(points.x) >= 0
    assert not figure.layout.annotations


def test_report_page_shows_commands_in_warnings_as_code(tmp_path: Path) -> None:
    run = make_run(tmp_path, "warned")
    with MetricsWriter(run / "metrics.jsonl", lineage=1) as metrics:
        metrics.warn(5, "zero_reward", "run `megatron-async sft <b>`")
    assert "run <code>megatron-async sft &lt;b&gt;</code>" in body(report_page([read_run(run)]))


def test_accuracy_figure_has_the_interval_that_the_evaluation_measured(run: Path) -> None:
    measured = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.625}
    old = {"eval/accuracy": 0.75, "eval/responses": 64.0}
    read = replace(read_run(run), evaluations=[{"step": 0, **measured}, {"step": 1, **old}])
    figure = accuracy(read)
    assert figure is not None
    bars = figure.data[0].error_y
    assert (bars.array, bars.arrayminus) == ((12.5, 0.0), (25.0, 0.0))


@pytest.mark.slow
@pytest.mark.one_core
@needs_browser
def test_browser_draws_every_figure_without_a_network(page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page)
    document, console = drawn(file)
    assert "Uncaught" not in console
    figures = document.count('class="plotly-graph-div')
    assert figures == len(re.findall(r"Plotly\.newPlot\(", body(page)))
    assert document.count("main-svg") >= figures > 8


@pytest.mark.slow
@pytest.mark.one_core
@needs_browser
def test_report_page_has_no_layout_flaws_on_screens_and_telephones(
    run: Path, played: Path, tmp_path: Path
) -> None:
    one, long, game = (tmp_path / f"{name}.html" for name in ("one", "long", "game"))
    other = make_run(tmp_path, f"other_{'x' * 90}", steps=30)
    with MetricsWriter(RunDirectory(other).metrics_file, lineage=1) as metrics:
        metrics.warn(5, "scorer_errors", f"at /home/{'rewards_of_mine' * 9}.py:41")
    one.write_text(report_page([read_run(run)]))
    long.write_text(report_page([read_run(run), read_run(other)]))
    game.write_text(report_page([read_run(played)]))
    found = [
        flaw
        for flaw in flaws([one, long, game], tmp_path)
        if not re.match(r"\S*long.html at .* a broken word", flaw)  # A word too long for any line.
    ]
    assert not found, "\n".join(found)


def test_report_table_shows_settings_machine_and_evaluation_rewards(run: Path) -> None:
    with MetricsWriter(run / "metrics.jsonl", lineage=1) as metrics:
        metrics.start(3, "2 CPU cores; 1 trainer ranks")
    text = report_page([read_run(run)]).replace("<wbr>", "")
    cells = dict(re.findall(r"<tr><td>([^<]+)</td><td>([^<]+)</td></tr>", text))
    assert cells["model"].endswith("/model") and cells["recipe"] == "copris"
    assert cells["schedule"].startswith("copris, 64 groups of 8 a batch, ")
    assert cells["learning rate"] == "1e-06 (adam, constant)"
    assert cells["machine"] == "2 CPU cores; 1 trainer ranks"
    assert cells["held-out mean reward at the start / after RL"] == "0.500 / 0.500"


def test_reward_band_is_the_95_percent_interval_of_the_mean(run: Path) -> None:
    lines = [{**step_metrics(1), "step": 0, "reward/mean": 0.5, "reward/standard_error": 0.03}]
    figure = PANELS[0].figure(replace(read_run(run), train=lines))
    band = figure.data[0]
    assert band.name == "95 % interval"
    assert sorted(band.y) == pytest.approx([0.5 - 1.96 * 0.03, 0.5 + 1.96 * 0.03])


def test_evaluation_figures_show_reward_and_accuracy_of_each_set(run: Path) -> None:
    sets = set_metrics(0.0, reward_mean=0.7) | set_metrics(0.5, "eval/hard", reward_mean=0.25)
    read = replace(read_run(run), evaluations=[{"step": 0, **sets}])
    drawn_ = {trace.name: list(trace.y) for trace in evaluation_reward(read).data}
    assert drawn_ == {"held-out": [0.7], "hard": [0.25]}
    assert {trace.name: list(trace.y) for trace in accuracy(read).data} == {
        "held-out": [0.0],
        "hard": [50.0],
    }


def test_tokens_are_decoded_by_the_exported_model_when_model_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "moved")
    (tmp_path / "model").rename(run / "hf")
    (sample,) = read_run(run).samples
    assert sample.prompt and "tokens;" not in sample.prompt
    (run / "hf").rename(tmp_path / "elsewhere")
    (sample,) = read_run(run).samples
    assert re.match(r"\(2 tokens; no tokenizer in .*/model, seen from ", sample.prompt)
