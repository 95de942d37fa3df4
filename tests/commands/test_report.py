"""The closing table agrees with the metrics file, weighted as it states."""

from pathlib import Path

import pytest
from rich.console import Console

from megatron_async.commands.report import closing_table, where_things_are
from megatron_async.config import build_config
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.telemetry.summary import summarise


def test_totals_and_token_weighted_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as writer:
        writer.write(0, {"eval/accuracy": 0.25}, kind="eval")
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
        writer.write(2, {"eval/accuracy": 0.75}, kind="eval")
    summary = summarise(directory)
    assert (summary.accuracy_first, summary.accuracy_last) == (0.25, 0.75)
    assert summary.steps == 2
    assert summary.lag_mean == (100 * 1.0 + 300 * 2.0) / 400
    assert summary.lag_max == 6
    assert summary.resumed_share == 0.25, "of trajectories, however long they are"
    assert summary.generation_tokens_per_second == 100
    assert summary.training_tokens_per_second == 100
    console = Console(width=100, record=True)
    console.print(closing_table(summary, directory, before_sft=0.0, extra_phases=[("SFT", 9.0)]))
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


def test_the_rewards_of_the_table_are_means_of_the_first_and_the_last_steps(
    tmp_path: Path,
) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as writer:
        for step in range(40):
            lags = {"rollout/lag_max": 0.0, "train/trained_tokens": 1.0, "rollout/lag_mean": 0.0}
            writer.write(step, {**lags, "rollout/resumed_share": 0.0, "rollout/reward_mean": step})
    assert summarise(directory).rewards == (2.0, 37.0)
    assert summarise(directory).failures == "not measured", "a run of an earlier version"


def test_a_run_without_a_step_has_a_table_too(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "r", "root": str(tmp_path)}))
    assert summarise(directory).steps == 0
    Console(record=True).print(closing_table(summarise(directory), directory))
