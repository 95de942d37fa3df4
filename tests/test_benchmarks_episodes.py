"""The benchmark of episodes: its runs' settings load, and the control's rewards are shuffled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.episodes import ROOT, name_of, pieces, row_of, settings_of, table
from benchmarks.shuffled import Shuffled
from megatron_async.config import load_config
from megatron_async.scoring.rewards import Sample
from megatron_async.telemetry.metrics import MetricsWriter


@pytest.mark.parametrize("key", pieces(["guessing_game", "calculator"], 3, 2), ids=name_of)
def test_every_run_is_its_example_with_a_schedule_and_a_seed(
    key: dict[str, object], tmp_path: Path
) -> None:
    settings = settings_of(key, tmp_path, tmp_path / "model")
    config = load_config(ROOT / "examples" / str(key["example"]) / "config.yaml", settings)
    assert config.plays
    assert (config.schedule.preset, config.seed) == (key["preset"], key["seed"])
    assert config.scorers.of_groups == key["shuffled"]
    assert config.eval_sets()[0].samples == 1, "so that evaluations have the true rewards"


def test_shuffled_rewards_are_those_of_the_group_in_another_order() -> None:
    seed = 7
    number = str(random.Random(seed).randint(1, 100))
    answers = [number, "x", "101", number, "0", "-", "", number]
    for of in ("game", "product"):
        samples = [Sample(text, answer=number, metadata={"seed": seed}) for text in answers]
        shuffled = Shuffled(of)
        own = [float(text == number) for text in answers]
        totals = []
        for _ in range(20):
            scored = shuffled(samples)
            assert [parts["true"] for _, parts in scored] == own
            given = own if of == "game" else [0.0] * len(own)
            totals.append([value + g for (value, _), g in zip(scored, given, strict=True)])
        assert all(sorted(total) == sorted(own) for total in totals)
        assert len({tuple(total) for total in totals}) > 10
        alone = samples[0]
        assert shuffled([alone])[0][0] == (0.0 if of == "game" else 1.0), "as in an evaluation"


def test_a_row_has_the_success_before_and_after(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file, lineage=0) as metrics:
        for step, share in ((0, 0.4), (2, 0.9)):
            found = {"accuracy": share, "accuracy_low": share, "accuracy_high": share}
            found["answers"] = 256.0
            metrics.write(step, {f"eval/{k}": v for k, v in found.items()}, kind="eval")
        for step, turns in ((0, 5.0), (1, 6.0)):
            metrics.write(step, {"rollout/turns_mean": turns, "rollout/lag_max": 1.0})
    row = row_of(file)
    assert (row["before"], row["after"], row["turns_last"]) == (0.4, 0.9, 6.0)
    key = {"example": "calculator", "preset": "copris", "seed": 1, "shuffled": False}
    assert "| calculator | copris | own | 1 | 40.0 | 90.0 | 50.0 |" in table([{**key, **row}])
    poor = {**key, **row, "after": 0.5}
    assert "Below 30 points: calculator-copris-1." in table([poor])
