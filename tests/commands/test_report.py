"""Tests that the closing table of a run agrees with its metrics file, with the documented weighting
of means."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_async.commands.report import closing_table, where_things_are
from megatron_async.config import build_config
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.telemetry.summary import summarize
from tests.telemetry.evaluation_lines import set_metrics


def test_closing_table_shows_totals_and_token_weighted_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as writer:
        writer.write(0, set_metrics(0.25), kind="eval", scored_by="task")
        for step, (tokens, lag) in enumerate([(100, 1.0), (300, 2.0)]):
            writer.write(
                step,
                {
                    "train/trained_tokens": tokens,
                    "train/tokens": 2 * tokens,
                    "rollout/tokens": tokens,
                    "rollout/seconds": 2.0,
                    "rollout/trajectories": 8.0,
                    "rollout/resumed_share": 0.5 * step,
                    "rollout/lag_mean": lag,
                    "rollout/lag_max": 3 * lag,
                    "off_policy/ess": 0.9,
                    "rollout/reward_mean": 0.25 * lag,
                    "rollout/scores": 575,
                    "rollout/scorer_errors": 60,
                    "rollout/scorer_timeouts": step,
                    "time/wait_for_batch": 1.0,
                    "time/train": 4.0,
                    "time/publish": 0.5,
                    "time/checkpoint": 0.0,
                },
            )
        writer.write(2, set_metrics(0.75), kind="eval", scored_by="task")
    summary = summarize(directory)
    (held_out,) = summary.evaluated
    assert held_out.last is not None
    assert (held_out.first.accuracy, held_out.last.accuracy) == (0.25, 0.75)
    assert summary.steps == 2
    assert summary.lag_mean == (100 * 1.0 + 300 * 2.0) / 400
    assert summary.lag_max == 6
    assert summary.resumed_share == 0.25, "the share counts trajectories, not tokens"
    assert summary.generation_tokens_per_second == 100
    assert summary.training_tokens_per_second == 100
    console = Console(width=100, record=True)
    before: Any = SimpleNamespace(accuracy=0.0, temperature=0.0)
    console.print(closing_table(summary, directory, before_sft=before, extra_phases=[("SFT", 9.0)]))
    text = console.export_text()
    for expected in (
        "0.250 / 0.500",
        "121 of 1,150",
        "0.0 %",
        "25.0 %",
        "75.0 %",
        "1.75 / 6",
        "0.900",
        "9.0 s",
    ):
        assert expected in text
    monkeypatch.chdir(directory.path)
    assert where_things_are(directory) == "metrics      metrics.jsonl"
    directory.hf_export.mkdir()
    assert "checkpoint   hf (Hugging Face format)" in where_things_are(directory)


def test_summary_rewards_are_means_of_the_first_and_last_steps(
    tmp_path: Path,
) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as writer:
        for step in range(40):
            lags = {"rollout/lag_max": 0.0, "train/trained_tokens": 1.0, "rollout/lag_mean": 0.0}
            writer.write(step, {**lags, "rollout/resumed_share": 0.0, "rollout/reward_mean": step})
    assert summarize(directory).rewards == (2.0, 37.0)
    assert summarize(directory).failures == "not measured", (
        "runs of earlier versions have no count of failures"
    )


def facts_of(root: Path, *evaluations: tuple[dict[str, float], str]) -> dict[str, str]:
    """Return the closing table of a run whose evaluations have these metrics and these sources of
    the rewards."""
    directory = RunDirectory.create(build_config({"name": "r", "root": str(root)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as writer:
        for step, (metrics, scored_by) in enumerate(evaluations):
            writer.write(step, metrics, kind="eval", scored_by=scored_by)
    return dict(summarize(directory).facts())


def test_closing_table_shows_accuracy_and_mean_reward_of_each_set(tmp_path: Path) -> None:
    hard = set_metrics(0.0, "eval/hard", reward_mean=0.31, temperature=1.0)
    later = set_metrics(0.0, "eval/hard", reward_mean=0.76, temperature=1.0)
    facts = facts_of(
        tmp_path, ({**set_metrics(0.5), **hard}, "task"), ({**set_metrics(0.75), **later}, "task")
    )
    assert facts["held-out accuracy at the start (greedy)"] == "50.0 %"
    assert facts["held-out accuracy after RL (greedy)"] == "75.0 %"
    assert facts["hard accuracy after RL (temperature 1)"] == "0.0 %"
    assert facts["hard mean reward at the start / after RL"] == "0.310 / 0.760"


def test_closing_table_compares_no_accuracies_of_different_definitions(tmp_path: Path) -> None:
    first = (set_metrics(0.25, solved_at=0.5), "my.py:score (content 12345678)")
    last = (set_metrics(0.75, reward_mean=0.7, temperature=1.0), "my.py:score (content 87654321)")
    facts = facts_of(tmp_path, first, last)
    assert facts["held-out accuracy at the start (greedy)"] == (
        "not comparable: eval.solved_at was 0.5, is 1; sampling was greedy, is temperature 1; "
        "reward was my.py:score (content 12345678), is my.py:score (content 87654321)"
    )
    assert facts["held-out accuracy after RL (temperature 1)"] == "75.0 %"
    assert facts["held-out mean reward at the start / after RL"] == "not comparable / 0.700"


def test_closing_table_explains_zero_accuracy_when_no_reward_is_a_solution(tmp_path: Path) -> None:
    shaped = (set_metrics(0.0, reward_mean=0.7, reward_max=0.9), "my.py:score")
    facts = facts_of(tmp_path, shaped, shaped)
    reason = "0.0 %: no reward reached eval.solved_at 1"
    assert facts["held-out accuracy at the start (greedy)"] == reason
    assert facts["held-out accuracy after RL (greedy)"] == reason


def test_summary_counts_tokens_of_repeated_steps_too(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    for lineage, tokens in ((0, 1000.0), (1, 10.0)):
        with MetricsWriter(directory.metrics_file, lineage=lineage) as metrics:
            metrics.write(0, {"rollout/tokens": tokens, "rollout/lag_max": 1.0})
    summary = summarize(directory)
    assert (summary.steps, summary.generated_tokens) == (1, 1010)


def test_closing_table_is_printed_when_the_run_has_no_step(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    assert summarize(directory).steps == 0
    Console(record=True).print(closing_table(summarize(directory), directory))
