"""Compares simulated runs with closed forms of lag and speed.

The runs are idealized: one decode step takes `STEP` seconds for any batch, prefill, scores and
weight updates take no time, and training takes a fixed time per batch. So C requests in flight
generate C / STEP tokens per second. Weight updates are in flight.

Symbols: B is the number of responses of a batch, t the seconds of training on it, r the number of
responses that are generated per second, rho = r * t / B the rollout rate over the training rate,
and M the mean longest length of a group over the mean length. The lag of a response is that of its
first token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config.load import build_simulation, merge
from megatron_async.simulate.build import build_world
from megatron_async.simulate.lengths import GroupSource
from megatron_async.simulate.statistics import Summary
from megatron_async.simulate.world import World
from tests.simulate.test_world import PRESETS, SMALL

STEP = 0.01
LONGEST = 400
GROUPS, SIZE = 8, 2
B = GROUPS * SIZE
IN_FLIGHT = 60
ENGINE = f"""
format: megatron_async.engine_cost
format_version: 1
kv_capacity_tokens: 1000000000
decode:
  - {{batch: 1, kv_tokens: 1, seconds: {STEP}}}
prefill:
  - {{tokens: 1, seconds: 0}}
"""


@dataclass
class PatternSource(GroupSource):
    """Source of groups with one response of `LONGEST` tokens and one of `shorter` tokens. Both are
    multiplied by a random factor of the group, uniform between 1 - `spread` and 1 + `spread`.

    The first `in_flight` responses have evenly spaced lengths, so that later responses end evenly
    over time instead of all at once.
    """

    shorter: int
    spread: float
    in_flight: int

    def group(self, number: int) -> tuple[list[int], list[float]]:
        first = number * SIZE + 1
        if first <= self.in_flight:
            spaced = (math.ceil(LONGEST * (first + i) / self.in_flight) for i in range(SIZE))
            return list(spaced), [0.0, 1.0]
        factor = np.random.default_rng(number).uniform(1 - self.spread, 1 + self.spread)
        return [round(factor * LONGEST), round(factor * self.shorter)], [0.0, 1.0]


class Run:
    """A simulated run that records, for each batch, the policy numbers of the first tokens, the
    policy numbers under which the groups were completed, and the lengths."""

    def __init__(self, world: World, steps: int) -> None:
        self.world = world
        self.first: list[list[int]] = []
        self.completed: list[Sequence[int]] = []
        self.lengths: list[list[int]] = []
        record = world.statistics.batch

        def batch(step: int, written: Any, completed: Sequence[int], mask: int | None) -> None:
            self.first.append([spans[0][0] for spans in written])
            self.completed.append(completed)
            self.lengths.append([sum(count for _, count in spans) for spans in written])
            record(step, written, completed, mask)

        world.statistics.batch = batch  # type: ignore[method-assign]
        world.run(steps)

    def lags(self, warmup: int = 0) -> list[float]:
        """Return the mean lag of each batch from the step `warmup` on."""
        return [step - float(np.mean(self.first[step])) for step in range(warmup, len(self.first))]

    def queue_lags(self, warmup: int) -> list[float]:
        """Return the mean lag in the queue of each batch from the step `warmup` on."""
        steps = range(warmup, len(self.completed))
        return [step - float(np.mean(self.completed[step])) for step in steps]

    def summary(self, warmup: int) -> Summary:
        return self.world.statistics.summary(warmup, engine_gpus=2, trainer_gpus=2, shared=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("engine") / "engine.yaml"
    file.write_text(ENGINE)
    return file


def ideal_world(
    engine: Path, train: float, *, simulate: dict[str, Any] | None = None, **schedule: Any
) -> World:
    """Return an idealized run whose trainer needs `train` seconds for each update."""
    changes = {
        "schedule": {"groups_per_batch": GROUPS, "group_size": SIZE, **schedule},
        "task": {"scorer_workers": 10_000},
        "simulate": {
            "cost_model": str(engine),
            "trainer_seconds_per_token": 1e-15,
            "trainer_seconds_per_update": train,
            "weight_update_seconds": 0.0,
            "efficiency": {"batch_overhead_seconds": 0.0},
            "reward": {"scorer_seconds": 0.0},
            "lengths": {"prompt_tokens": 1},
            "load_report_seconds": 1e6,
            **(simulate or {}),
        },
    }
    return build_world(build_simulation(merge(SMALL, changes)))


def queue_run(
    engine: Path,
    rho: float,
    shorter: int,
    steps: int,
    *,
    in_flight: int = IN_FLIGHT,
    spread: float = 0.0,
    **schedule: Any,
) -> Run:
    """Simulate `pipeline` with the ratio `rho` of rollout rate to training rate."""
    responses_per_second = in_flight / ((LONGEST + shorter) / 2 * STEP)
    train = rho * B / responses_per_second
    world = ideal_world(engine, train, preset="pipeline", concurrency=in_flight, **schedule)
    world._source = PatternSource(shorter, spread, in_flight)
    return Run(world, steps)


def mean_lags(engine: Path, rho: float, shorter: int, **schedule: Any) -> tuple[float, ...]:
    """Return three means over four values of C: the lag, its part in the queue, and the closed form
    of its part before the queue, C * M / (B * max(1, rho)).

    All groups of a run take equally long. The four values are spaced so that the time from the
    first token to the completion of a group has evenly spaced fractions of a step.
    """
    lags, in_queue, before = [], [], []
    longest_over_mean = 2 * LONGEST / (LONGEST + shorter)
    one_more_step = B * max(1, rho) / longest_over_mean
    for part in range(4):
        in_flight = IN_FLIGHT + round(part / 4 * one_more_step)
        run = queue_run(engine, rho, shorter, 40, in_flight=in_flight, **schedule)
        assert bool(run.world.statistics.dropped) == ("overflow" in schedule)
        lags.append(run.lags(20))
        in_queue.append(run.queue_lags(20))
        before.append(in_flight / one_more_step)
    return float(np.mean(lags)), float(np.mean(in_queue)), float(np.mean(before))


def mean_ceiling(low: float, high: float) -> float:
    """Return the mean of ceil(x) for x that is uniform between `low` and `high`."""
    cuts = [low, *range(math.ceil(low), math.ceil(high)), high]
    pieces = itertools.pairwise(cuts)
    return sum((b - a) * math.ceil((a + b) / 2) for a, b in pieces) / (high - low)


@pytest.mark.parametrize("shorter", [400, 100], ids=["M 1", "M 1.6"])
@pytest.mark.parametrize("rho", [0.3, 0.8])
def test_lag_follows_closed_form_when_the_trainer_is_faster(
    engine: Path, rho: float, shorter: int
) -> None:
    """The mean lag is C * M / B before the queue plus rho in the queue.

    C responses are always in flight, so a response of mean length takes C / r seconds (Little), and
    the longest one of its group C * M / r. A step takes B / r, because the trainer waits for B
    responses. So C * M / B versions are published between the first token and the completion of
    the group. In the queue, a response waits x for its batch, uniform in 0 to B / r. The trainer
    publishes a version t after it received the batch before, that is, B / r - t before it receives
    this one. The response misses this version if x is larger, with the probability t * r / B = rho.
    """
    lag, in_queue, before = mean_lags(engine, rho, shorter)
    assert lag == pytest.approx(before + rho, rel=0.03)
    assert in_queue == pytest.approx(rho, abs=1 / GROUPS), "more than the rounding to whole groups"


@pytest.mark.parametrize(
    ("rho", "waiting", "shorter"), [(1.5, 1, 400), (1.5, 3, 100), (3.0, 3, 100), (1.5, 1, 100)]
)
def test_lag_follows_closed_form_when_a_full_queue_drops_the_oldest(
    engine: Path, rho: float, waiting: int, shorter: int
) -> None:
    """With a queue of q * B responses, the mean lag is C * M / (B * rho) before the queue plus
    (2 * q + rho - 1) / (2 * rho) in the queue. The batch that waits for the trainer adds 1.

    A response takes C * M / r as above, and a step takes t, so C * M / (r * t) versions are
    published meanwhile. When a batch is chosen, the queue has the newest q * B responses, and the
    batch is the oldest B of them. So the age x of a chosen response is uniform between
    (q - 1) * B / r and q * B / r. In units of t, this is between (q - 1) / rho and q / rho, with
    the mean (2 * q - 1) / (2 * rho). Batches are chosen right after a version is published, so a
    response of age y since its first token has missed ceil(y / t) versions. That is y / t + 1/2 on
    average, if the fraction of y / t is uniform. The queue's part with this 1/2 is
    (2 * q - 1) / (2 * rho) + 1/2, the value above.

    The fraction of x / t is not uniform unless 1 / rho is an integer. So the formula is compared
    with the whole lag, and the lag in the queue with the mean of ceil(x / t).

    The scheduler chooses a batch when the trainer receives the one before, which is one step before
    it is trained. Meanwhile, at most `max_waiting_batches` batches minus one group are complete
    without being dropped.
    """
    schedule = {"overflow": "drop_oldest", "max_waiting_batches": waiting}
    lag, in_queue, before = mean_lags(engine, rho, shorter, **schedule)
    q = waiting - 1 / GROUPS
    assert lag == pytest.approx(before + (2 * q + rho - 1) / (2 * rho) + 1, rel=0.03)
    assert in_queue == pytest.approx(1 + mean_ceiling((q - 1) / rho, q / rho), rel=0.03)


def test_full_queue_drops_long_groups_first_when_lengths_differ(engine: Path) -> None:
    """The closed form above does not hold if groups take unequally long: the scheduler drops the
    group with the oldest token, not the group that was completed first. So groups of long responses
    are dropped more often. That lowers lag and mean length. Without drops, lengths are as sampled.
    """
    runs = {
        overflow: queue_run(engine, 3.0, 400, 80, spread=0.5, overflow=overflow)
        for overflow in ("drop_oldest", "block")
    }
    means = {name: np.mean(run.lengths[20:]) for name, run in runs.items()}
    assert means["block"] == pytest.approx(LONGEST, rel=0.03)
    assert means["drop_oldest"] < 0.95 * LONGEST


@pytest.mark.parametrize("rho", [1.25, 2.0])
def test_lag_grows_by_1_minus_1_over_rho_per_step_until_the_bound(engine: Path, rho: float) -> None:
    """In a first-in, first-out queue without dropping, responses are trained in the order in which
    they were completed.

    Response i is complete at i / r and trained at i * t / B. The difference is
    i * (t / B - 1 / r). Batch n has the responses around i = n * B, so its age is n * (t - B / r),
    which is n * (1 - 1 / rho) steps of t.

    Back-pressure ends the growth. When a group starts, less than `max_waiting_batches` batches of
    groups are finished, one batch is in training, and C responses and the group itself are in
    flight. So fewer than `max_waiting_batches` + 1 + (C + N) / B batches are trained before the
    group is in a batch. One more version may be missed between the choice of a batch and its
    training.
    """
    waiting = 20
    run = queue_run(engine, rho, 400, steps=150, max_waiting_batches=waiting)
    slope = 1 - 1 / rho
    lags = run.lags()
    growing = range(10, int(0.7 * waiting / slope))
    fitted, _ = np.polyfit(growing, [lags[step] for step in growing], 1)
    assert fitted == pytest.approx(slope, rel=0.05)
    assert waiting < max(lags) <= waiting + 2 + (IN_FLIGHT + SIZE) / B
    assert np.mean(lags[-20:]) == pytest.approx(np.mean(lags[-40:-20]), abs=0.5)


@pytest.mark.parametrize("level", [1, 2, 4])
def test_lag_is_k_while_k_plus_1_batches_are_begun_and_untrained(engine: Path, level: int) -> None:
    """With the staleness bound k, at most (k + 1) * B responses are begun and not trained.

    Let them always be (k + 1) * B, because enough requests are free. When version v is published, B
    of them were trained just before, so B responses of version v start, and k * B older ones are
    untrained. These are in the batches v to v + k - 1, so those of version v are in batch v + k:
    their lag is k. The lag is smaller if generation is too slow to keep so many begun.
    """
    full, fewer = (
        Run(
            ideal_world(
                engine,
                train=8.0,
                preset="async",
                max_async_level=level,
                on_stale="wait",
                concurrency=requests,
                max_waiting_batches=10,
                simulate={"lengths": {"distribution": "uniform", "scale": 400}},
            ),
            steps=60,
        )
        for requests in ((level + 1) * B, 2)
    )
    assert set(full.lags(20)) == {level}
    assert np.mean(fewer.lags(20)) < level


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    preset=st.sampled_from(PRESETS),
    train=st.floats(0.1, 20.0),
    update=st.floats(0.0, 2.0),
    requests=st.integers(8, 64),
    distribution=st.sampled_from(["uniform", "lognormal", "constant"]),
)
def test_no_schedule_is_faster_than_rollout_or_training(
    engine: Path, preset: str, train: float, update: float, requests: int, distribution: str
) -> None:
    """A step takes at least as long as training and the weight update. All steps together take at
    least as long as the generation of their tokens, because C requests generate at most C / STEP
    tokens per second.

    `sync` does its work one after the other, so its step is the sum of three times: generation of
    the longest response of the batch, training, and the weight update.
    """
    steps, warmup = 14, 4
    updates = 2 if preset == "rapid" else 1
    world = ideal_world(
        engine,
        train / updates,
        preset=preset,
        updates_per_batch=updates,
        concurrency=B if preset == "sync" else requests,
        simulate={
            "weight_update_seconds": update,
            "lengths": {"distribution": distribution, "median": 200, "prompt_tokens": 1},
        },
    )
    summary = Run(world, steps).summary(warmup)
    assert summary.step_seconds >= train + update - 1e-6
    generated = sum(lag.tokens for lag in world.statistics.lags[:steps])
    assert world.statistics.marks[-1].at >= generated / world.scheduler.concurrency * STEP
    if preset == "sync":
        longest = [max(world._source.group(number)[0]) for number in range(steps * GROUPS)]
        rollout = [STEP * max(longest[n * GROUPS : (n + 1) * GROUPS]) for n in range(steps)]
        expected = np.mean(rollout[warmup:]) + train + update
        assert summary.step_seconds == pytest.approx(expected, rel=1e-4)
