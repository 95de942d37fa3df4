"""Tests that each way to learn nothing is reported once, and a healthy run is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_async.scoring.interface import SCORE_FAILURES, SCORER_FAULTS
from megatron_async.telemetry.health import HealthWatch
from megatron_async.telemetry.learning import (
    NEWEST_SCORES,
    UNREACHED_STEPS,
    ZERO_REWARD_STEPS,
    FailingScores,
    LearningWatch,
    UnreachedThreshold,
)

WELL = {
    "reward/max": 1.0,
    "reward/min": 0.0,
    "reward/uninformative_groups": 0.4,
    "rollout/truncated_share": 0.1,
    "rollout/response_length_max": 192.0,
    "rollout/answered_share": 0.9,
    "rollout/lag_mean": 0.5,
    "rollout/lag_max": 2.0,
    "rollout/dropped_stale": 0.0,
    "rollout/trajectories": 64.0,
    "weights/probe_drift": 1.4,
    "weights/probe_mean_error": 0.01,
}


def names(watch: LearningWatch | HealthWatch, **changes: float) -> list[str]:
    """Return the names of the warnings at a step with healthy metrics, changed as stated."""
    changed = {name.replace("__", "/"): value for name, value in changes.items()}
    return [name for name, _ in watch.step(WELL | changed)]


def test_learning_watch_is_silent_when_the_run_learns() -> None:
    watch = LearningWatch(bound=2, before=WELL)
    assert all(names(watch) == [] for _ in range(10))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("equal_rewards", {"reward__max": 1.0, "reward__min": 1.0}),
        ("no_informative_group", {"reward__uninformative_groups": 1.0}),
        ("all_truncated", {"rollout__truncated_share": 1.0}),
        ("no_answer_found", {"rollout__answered_share": 0.0}),
        ("ratio_drift", {"weights__probe_drift": 24.0, "weights__probe_mean_error": 0.17}),
    ],
)
def test_learning_watch_warns_at_the_first_bad_batch(name: str, changes: dict[str, float]) -> None:
    assert names(LearningWatch(), **changes) == [name]


HEALTHY = {
    "rollout_corr/rollout_is_mean": 1.0,
    "rollout_corr/rollout_is_eff_sample_size": 0.9,
    "rollout_corr/rollout_is_std": 0.2,
    "rollout_corr/kl": 0.01,
    "rollout_corr/chi2_token": 0.1,
}


@pytest.mark.parametrize(
    ("metric", "value", "rule"),
    [
        ("rollout_is_mean", 0.49, "mean_weight"),
        ("rollout_is_mean", 2.01, "mean_weight"),
        ("rollout_is_eff_sample_size", 0.29, "low_ess"),
        ("rollout_is_std", 1.01, "weight_std"),
        ("kl", 0.11, "kl"),
        ("kl", -0.11, "kl"),
        ("chi2_token", 1.01, "chi2"),
        ("kl", math.nan, "kl"),
    ],
)
def test_learning_watch_names_the_broken_rule_of_the_guide(
    metric: str, value: float, rule: str
) -> None:
    ((found, message),) = LearningWatch().step({**HEALTHY, f"rollout_corr/{metric}": value})
    assert found == rule
    assert metric in message


def test_learning_watch_is_silent_when_metrics_are_healthy_or_absent() -> None:
    limits = {
        "rollout_corr/rollout_is_mean": 2.0,
        "rollout_corr/rollout_is_eff_sample_size": 0.3,
        "rollout_corr/rollout_is_std": 1.0,
        "rollout_corr/kl": -0.1,
        "rollout_corr/chi2_token": 1.0,
    }
    assert all(LearningWatch().step(metrics) == [] for metrics in (HEALTHY, limits, {}))


def test_ess_collapse_is_emitted_after_three_low_steps() -> None:
    watch = LearningWatch()
    seen = [watch.step({"off_policy/ess": ess}) for ess in (0.1, 0.1, 0.5, 0.2, 0.2, 0.1)]
    assert [[name for name, _ in found] for found in seen] == [[]] * 5 + [["ess_collapse"]]
    assert "effective sample size is 0.10" in seen[-1][0][1]


def test_zero_reward_is_emitted_after_several_steps() -> None:
    watch = LearningWatch()
    zero = {"reward__max": 0.0, "reward__min": 0.0}
    seen = [names(watch, **zero) for _ in range(ZERO_REWARD_STEPS)]
    assert seen[:-1] == [["equal_rewards"]] * (ZERO_REWARD_STEPS - 1)
    assert seen[-1] == ["equal_rewards", "zero_reward"]
    assert names(watch) == []
    assert names(watch, **zero) == ["equal_rewards"], "the count restarts"


@pytest.mark.parametrize(
    ("bound", "changes", "named"),
    [
        (2, {"rollout__lag_mean": 1.9}, True),
        (2, {"rollout__dropped_stale": 3.0}, True),
        (3, {"rollout__lag_mean": 1.9}, False),
        (None, {"rollout__lag_mean": 1.9}, False),
    ],
    ids=["nearly all", "data lost", "a higher bound", "no bound"],
)
def test_lag_at_bound_is_emitted_after_three_steps(
    bound: int | None, changes: dict[str, float], named: bool
) -> None:
    watch = LearningWatch(bound)
    assert names(watch, **changes) + names(watch, **changes) == []
    assert names(watch, **changes) == (["lag_at_bound"] if named else [])


def test_batch_size_changed_is_emitted_after_a_resume() -> None:
    watch = LearningWatch(before=WELL)
    assert names(watch, rollout__trajectories=32.0) == ["batch_size_changed"]


def test_health_watch_emits_each_warning_once_while_it_holds() -> None:
    watch = HealthWatch()
    alike = {"reward__max": 1.0, "reward__min": 1.0}
    assert names(watch, **alike) == ["equal_rewards"]
    assert watch.active == {"equal_rewards"}
    assert names(watch, **alike) == []
    assert watch.step({}) == [] and watch.active == {"equal_rewards"}, "a step without metrics"
    assert names(watch, **alike) == []
    assert names(watch) == [] and not watch.active
    assert names(watch, **alike) == ["equal_rewards"]


def failing(watch: FailingScores, *faults: str, first: Mapping[str, str]) -> list[tuple[str, str]]:
    """Record a score with these faults; return the warnings that set in."""
    return list(watch.scored(dict.fromkeys(faults, 1.0), first))


def test_failing_scores_warn_at_1_and_10_percent_for_each_kind() -> None:
    watch = FailingScores()
    first = {"scorer_errors": "reward own: KeyError: 'x' at own.py:7 (log: logs/scorer-*.log)"}
    seen: dict[str, tuple[int, str]] = {}
    for number in range(1, 1001):
        periods = {"scorer_error": 9, "scorer_timeout": 60}
        faults = [fault for fault, period in periods.items() if number % period == 0]
        for name, message in failing(watch, *faults, first=first):
            assert name not in seen, "each warning is emitted once while failures last"
            seen[name] = number, message
    assert {name: number for name, (number, _) in seen.items()} == {
        "scorer_errors": 18,
        "many_scorer_errors": 180,
        "scorer_timeouts": 120,
    }
    assert seen["many_scorer_errors"][1].startswith(
        "20 of the last 180 scores have failed, the first by reward own: KeyError: 'x' at own.py:7 "
        "(log: logs/scorer-*.log); try the reward separately (`megatron-async reward`)"
    )
    assert "task.scorer_timeout_seconds" in seen["scorer_timeouts"][1]


def test_failing_scores_warn_again_when_failures_had_ended() -> None:
    watch = FailingScores()

    def names_of(*faults: str) -> list[str]:
        return [name for name, _ in failing(watch, *faults, first={})]

    assert names_of("scorer_crash") == [], "a single failure may be chance"
    assert names_of("scorer_crash") == ["scorer_crashes"]
    assert [names_of() for _ in range(NEWEST_SCORES)] == [[]] * NEWEST_SCORES
    assert names_of("scorer_crash") == []
    assert names_of("scorer_crash") == ["scorer_crashes"]


def test_every_kind_of_failed_score_has_a_documented_warning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "see-a-run.md").read_text()
    for kind in SCORE_FAILURES:
        watch = FailingScores()
        found = [name for _ in range(20) for name, _ in failing(watch, kind, first={})]
        assert found == [SCORER_FAULTS[kind], f"many_{SCORER_FAULTS[kind]}"]
        assert all(f"`{name}`" in page for name in found)
    assert SCORER_FAULTS.keys() - SCORE_FAILURES.keys() == {"stray_output"}, (
        "stray output is not a failed score"
    )
    assert [*failing(FailingScores(), *["stray_output"] * 20, first={})] == []


def test_unreached_threshold_warns_once_when_no_reward_reaches_it() -> None:
    watch = UnreachedThreshold(1.0)
    assert watch.evaluated(0.9) == [], "before the first step a policy may solve nothing"
    assert [watch.trained({"reward/max": 0.7}) for _ in range(UNREACHED_STEPS - 1)][-1] == []
    ((name, message),) = watch.trained({"reward/max": 0.998})
    assert name == "eval_solved_at_unreached"
    assert "no reward so far has reached eval.solved_at 1 (the largest is 0.998)" in message
    assert watch.trained({"reward/max": 0.7}) == watch.evaluated(0.2) == []


def test_unreached_threshold_warns_at_an_evaluation_after_the_first_step() -> None:
    watch = UnreachedThreshold(1.0, before=[{"reward/max": 0.5}])
    assert [name for name, _ in watch.evaluated(0.8)] == ["eval_solved_at_unreached"]
    reached = UnreachedThreshold(1.0, before=[{"reward/max": 1.0}])
    assert reached.evaluated(0.8) == []
