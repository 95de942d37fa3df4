"""Tests the benchmark programs: their settings load, and their tables and counts are correct.

The tests cover shuffled rewards for the control of episodes, comparisons pair by pair, and counters
that survive the SIGKILL of their process.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import schedules, versus_trl
from benchmarks.episodes import ROOT, name_of, pieces, row_of, settings_of, table
from benchmarks.papers import frontier
from benchmarks.reporting import append, command_line, missing, read
from benchmarks.restart import counters
from benchmarks.restart.__main__ import goals
from benchmarks.restart.run import losses
from benchmarks.shuffled import Shuffled
from megatron_async.config import load_config
from megatron_async.scoring.rewards import Sample
from megatron_async.simulate.build import build_world
from megatron_async.telemetry.metrics import MetricsWriter


@pytest.mark.parametrize("key", pieces(["guessing_game", "calculator"], 3, 2), ids=name_of)
def test_episode_benchmark_settings_load_with_their_preset_and_seed(
    key: dict[str, object], tmp_path: Path
) -> None:
    settings = settings_of(key, tmp_path, tmp_path / "model")
    config = load_config(ROOT / "examples" / str(key["example"]) / "config.yaml", settings)
    assert config.has_episodes
    assert (config.schedule.preset, config.seed) == (key["preset"], key["seed"])
    assert config.scorers.of_groups == key["shuffled"]
    assert config.eval_sets()[0].samples == 1, "evaluations must have the true rewards"


def test_shuffled_rewards_are_a_permutation_of_the_rewards_of_the_group() -> None:
    seed = 7
    number = str(random.Random(seed).randint(1, 100))
    responses = [number, "x", "101", number, "0", "-", "", number]
    for kind in ("game", "product"):
        samples = [Sample(text, answer=number, metadata={"seed": seed}) for text in responses]
        shuffled = Shuffled(kind)
        own = [float(text == number) for text in responses]
        totals = []
        for _ in range(20):
            scored = shuffled(samples)
            assert [components["true"] for _, components in scored] == own
            turn_rewards = own if kind == "game" else [0.0] * len(own)
            totals.append([value + g for (value, _), g in zip(scored, turn_rewards, strict=True)])
        assert all(sorted(total) == sorted(own) for total in totals)
        assert len({tuple(total) for total in totals}) > 10
        single = samples[0]
        assert shuffled([single])[0][0] == (0.0 if kind == "game" else 1.0), (
            "single samples keep their reward"
        )


def test_episode_benchmark_row_has_the_success_before_and_after(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file, lineage=0) as metrics:
        for step, share in ((0, 0.4), (2, 0.9)):
            found = {"accuracy": share, "accuracy_low": share, "accuracy_high": share}
            found["responses"] = 256.0
            metrics.write(step, {f"eval/{k}": v for k, v in found.items()}, kind="eval")
        for step, turns in ((0, 5.0), (1, 6.0)):
            metrics.write(step, {"rollout/turns_mean": turns, "rollout/lag_max": 1.0})
    row = row_of(file)
    assert (row["before"], row["after"], row["turns_last"]) == (0.4, 0.9, 6.0)
    key = {"example": "calculator", "preset": "copris", "seed": 1, "shuffled": False}
    assert "| calculator | copris | own | 1 | 40.0 | 90.0 | 50.0 |" in table([{**key, **row}])
    poor = {**key, **row, "after": 0.5}
    assert "Below 30 points: calculator-copris-1." in table([poor])


def test_missing_lists_only_pieces_without_a_row(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    assert read(file) == []
    wanted_pieces = [
        {"seed": seed, "sizes": {"steps": steps}} for seed in (1, 2) for steps in (8, 16)
    ]
    append(file, {**wanted_pieces[1], "seconds": 3.5})
    assert missing(wanted_pieces, read(file)) == [
        wanted_pieces[0],
        wanted_pieces[2],
        wanted_pieces[3],
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "8", "--out", "/somewhere/else.md", "--full"],
        ["--out=/somewhere/else.md", "--steps", "8", "--full"],
        ["--steps", "8", "--full", "--out", "/somewhere/else.md"],
    ],
)
def test_command_line_omits_the_result_file(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/store.py", *arguments])
    assert command_line("benchmarks.store") == "python -m benchmarks.store --steps 8 --full"


def versus_row(system: str, seed: int, step: float, accuracies: list[float]) -> dict[str, Any]:
    return {
        "distribution": "tail",
        "system": system,
        "seed": seed,
        "startup_seconds": 10.0 * seed,
        "step_seconds": [step] * 10,
        "tokens": [1000.0] * 10,
        "rewards": [0.1] * 7 + [0.5] * 3,
        "accuracies": [[5 * index, value] for index, value in enumerate(accuracies)],
    }


def test_versus_trl_table_compares_systems_seed_by_seed() -> None:
    """Seed 1 has 6 s against 2 s for a step, and reaches the target after 10 and 5 steps: 60 s
    against 10 s."""
    text = versus_trl.table(
        [
            versus_row("trl", 1, 6.0, [0.6, 0.8, 0.9]),
            versus_row("megatron_async", 1, 2.0, [0.6, 0.9, 0.95]),
            versus_row("trl", 2, 4.0, [0.6, 0.7, 0.8]),
            versus_row("megatron_async", 2, 2.0, [0.6, 0.7, 0.9]),
        ]
    )
    assert "a step 2.50 (2.00 to 3.00), to 85% 6.00." in text
    trl = next(line for line in text.splitlines() if line.startswith("| tail | trl"))
    assert "| 2 | 15 (10 to 20) | 5.00 (4.00 to 6.00) | 208 (167 to 250) | 0.500" in trl
    assert trl.endswith("| 60, 1 never |")


def schedule_row(
    preset: str, repetition: int, seconds: float, tokens: float = 1000.0
) -> dict[str, Any]:
    zeros = ("slots_idle", "trainer_idle", "resumed", "lag_mean", "lag_max")
    return {
        "lengths": "tail",
        "preset": preset,
        "repetition": repetition,
        "trained_tokens": tokens,
        "rollout_seconds": seconds,
        "step_seconds": 2 * seconds,
        **dict.fromkeys(zeros, 0.0),
        "date": "2026-11-22",
    }


def test_time_table_compares_a_schedule_with_sync_of_its_repetition() -> None:
    rows = [
        schedule_row("sync", 0, 4.0),
        schedule_row("copris", 0, 2.0),
        schedule_row("sync", 1, 9.0),
        schedule_row("copris", 1, 4.0),
        schedule_row("copris", 2, 100.0),  # The sync run of this repetition does not exist yet.
    ]
    copris = schedules.time_table(rows).splitlines()[-1]
    assert copris.startswith(
        "| tail | copris | 3 | 1,000 (1,000 to 1,000) | 250 (10 to 500) | 2.12 (2.00 to 2.25) "
        "| 125 (5 to 250) | 2.12 (2.00 to 2.25) | 4.00 (2.00 to 100.00) | 8.00 (4.00 to 200.00) | "
    )


def test_time_table_compares_seconds_for_equally_many_tokens() -> None:
    """A step that takes 1.5 times as long and trains three times the tokens is twice as fast, not
    slower."""
    rows = [schedule_row("sync", 0, 2.0), schedule_row("copris", 0, 3.0, tokens=3000.0)]
    assert "| 3,000 | 1,000 | 2.00 | 500 | 2.00 | 3.00 |" in schedules.time_table(rows)


def test_time_table_is_void_when_pairs_of_runs_spread_too_far() -> None:
    """For ratios of 2.2 and 1.8, the spread of 0.4 is 20 % of their median; for 2.6 and 1.8, it is
    36 %."""
    for faster, void in ((2.2, False), (2.6, True)):
        rows = [
            schedule_row("sync", 0, 1.0),
            schedule_row("copris", 0, 1 / 1.8),
            schedule_row("sync", 1, 1.0),
            schedule_row("copris", 1, 1 / faster),
        ]
        text = schedules.time_table(rows)
        assert ("**Void**" in text) is void
        assert (f"| void: {(1.8 + faster) / 2:.2f} (1.80 to {faster:.2f}) |" in text) is void
        if void:
            assert text.endswith(
                "**Void**: the pairs of `copris` on `tail` spread by 36% of their median, and at "
                "most 25% counts. Measure again on a quiet machine."
            )


def metrics_line(step: int, seconds: float) -> dict[str, Any]:
    zeros = ("rollout/slots_busy_share", "rollout/resumed_share", "rollout/lag_mean")
    return {
        "step": step,
        "train/trained_tokens": 100.0 * step,
        "rollout/seconds": seconds,
        "time/step": 2 * seconds,
        "time/wait_for_batch": seconds,
        **dict.fromkeys((*zeros, "rollout/lag_max"), 0.0),
    }


@pytest.mark.parametrize("updates", [1, 4])
def test_schedule_benchmark_row_excludes_warm_up_updates(updates: int) -> None:
    """The warm-up has 12 updates, which are three batches of `rapid`; figures are per update."""
    warm, measured = 12 // updates, 24 // updates
    lines = [metrics_line(step, 99.0) for step in range(warm)]
    lines += [metrics_line(10, 8.0) for _ in range(measured)]
    row = schedules.row_of(updates, 12, lines)
    assert row["trained_tokens"] == 1000 / updates
    assert (row["rollout_seconds"], row["step_seconds"]) == (8 / updates, 16 / updates)
    assert row["trainer_idle"] == 0.5
    assert schedules.per_rollout_second(row) == 125


@pytest.mark.parametrize("preset", schedules.PRESETS)
def test_schedule_benchmark_makes_equally_many_updates_for_every_preset(
    preset: str, tmp_path: Path
) -> None:
    """The defaults are 12 updates of warm-up and 24 measured updates, of 32 trajectories each."""
    options = schedules.parsed([])
    settings = schedules.settings_of(preset, "tail", tmp_path, tmp_path, options)
    schedule = settings["schedule"]
    assert settings["steps"] * schedule["updates_per_batch"] == 36
    trajectories = schedule["groups_per_batch"] * schedule["group_size"]
    assert trajectories / schedule["updates_per_batch"] == 32


def test_versus_trl_settings_differ_only_in_their_distribution(tmp_path: Path) -> None:
    options = argparse.Namespace(model=tmp_path, steps=20, every=5)
    short, tail = (
        versus_trl.settings_of(name, 3, tmp_path, options) for name in versus_trl.DISTRIBUTIONS
    )
    assert short.sampling == tail.sampling
    assert short.optimizer == tail.optimizer
    assert short.task.params["mixture"] != tail.task.params["mixture"]
    assert (tail.seed, tail.task.train_seed, tail.eval.every_steps) == (3, 3, 5)
    assert tail.algorithm.kl.loss_coef == pytest.approx(0)  # TRL's default beta.


_WRITES = """
import os, signal, sys
from pathlib import Path
from benchmarks.restart.counters import Counters

counters = Counters(Path(sys.argv[1]))
counters.trajectories[[0, 7]] = [3, 5]
counters.waited(0.25)
counters.waited(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_counters_survive_a_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITES, str(tmp_path / "lives" / "engine-1")]
    assert subprocess.run(command, check=False).returncode == -9
    [found] = counters.read_counters(tmp_path / "lives", "engine")
    assert found.trajectories[[0, 6, 7]].tolist() == [3, 0, 5]
    assert (found["events"], found["seconds"], found["longest"]) == (2, 0.75, 0.5)
    assert found["first"] == 0


@pytest.mark.parametrize(
    ("name", "trajectory"),
    [("t17-3;", 17), ("5f0c.12;t17-3;", 17), ("eval.t17.0;", None), ("5f0c.12;check;", None)],
)
def test_trajectory_of_reads_the_trajectory_from_a_request_name(
    name: str, trajectory: int | None
) -> None:
    assert counters.trajectory_of(name) == trajectory


def test_restart_losses_count_only_unfinished_responses() -> None:
    """Prompts have 5 tokens. The responses lost 3 of 20 tokens, were finished, lost all 7 tokens,
    were never started, and had no token."""
    generated = np.array([25.0, 40, 12, 0, 0])
    started = np.array([5.0, 5, 5, 0, 5])
    resumed = np.array([22.0, 0, 5, 5, 5])
    assert losses(generated, started, resumed).tolist() == [3, 7, 0]
    with pytest.raises(ValueError, match="1 responses have tokens that were not generated"):
        losses(generated - 5, started, resumed)


def restart_row(lost: int, seconds: float) -> dict[str, Any]:
    times = {"engine_pauses": 0, "blocked": 0, "batch": 2 * seconds, "trained": 3 * seconds}
    return {"kind": "kill", "number": 0, "lost_largest": lost, "first_token": seconds, **times}


def test_restart_goals_are_judged_by_the_worst_run() -> None:
    good, worse = restart_row(64, 30.0), restart_row(65, 31.0)
    assert "| 64 | 64.0 | yes |" in goals([good])
    assert "first token | 30 | 30.0 | yes |" in goals([good])
    assert "| 64 | 65.0 | **no** |" in goals([good, worse])
    assert "first token | 30 | 31.0 | **no** |" in goals([worse, good])
    assert "is trained | 30 | 93.0 | **no** |" in goals([worse, good])


@pytest.mark.parametrize("setting", frontier.SETTINGS)
def test_frontier_settings_load_with_equal_batches_and_numbers_of_gpus(setting: str) -> None:
    of = frontier.SETTINGS[setting]
    for curve in frontier.CURVES:
        overrides = next(iter(frontier.points(of, curve).values()))
        config = frontier.configured(of, overrides)
        build_world(config)
        schedule, shared = config.schedule, config.simulate.placement == "colocated"
        engines = 0 if shared else config.engines.count * config.engines.tensor
        assert config.parallel.ranks + engines == config.simulate.gpus
        base = frontier.configured(of, of.common).schedule
        assert schedule.groups_per_batch == base.groups_per_batch * schedule.updates_per_batch
        assert schedule.group_size == base.group_size


def test_frontier_ratio_interpolates_each_seed_only_within_both_curves() -> None:
    lines = {"pipeline": (1.0, 3.0), "continue": (2.0, 4.0)}
    rows = [
        {"seed": seed, "curve": curve, "lag_mean": lag, "tokens_per_second": factor * lag}
        for seed, factors in ((0, (100.0, 110.0)), (1, (100.0, 130.0)))
        for (curve, lags), factor in zip(lines.items(), factors, strict=True)
        for lag in lags
    ]
    assert frontier.ratios(rows, "continue", "pipeline", 2.5) == "1.20"
    assert frontier.ratios(rows, "continue", "pipeline", 1.5) == "–"
    assert frontier.ratios(rows, "continue", "copris", 2.5) == "–"
