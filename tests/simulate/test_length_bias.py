"""Tests which schedules train long responses less often than they sample them.

A schedule that drops nothing trains every response, so each decile of the lengths has its share. A
schedule that drops or masks what is too old trains long responses less, because they take longer.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.config.load import build_simulation, merge
from megatron_async.simulate.build import build_world, group_source
from megatron_async.simulate.statistics import length_bias
from tests.simulate.test_world import SMALL

STEPS, WARMUP = 300, 20
ERROR = 0.03
"""Tolerance of a ratio. It covers the groups that were in flight at the start and the end of the
measured steps; measured is 0.011 at most."""
WHOLE: dict[str, dict[str, Any]] = {
    "sync": {},
    "rapid": {"updates_per_batch": 3},
    "copris": {},
    "pipeline": {},
    "async": {"on_stale": "wait"},
    "continue": {"preset": "pipeline", "overlap": False},
    "pause": {"preset": "pipeline", "overlap": False, "boundary": "pause"},
    "restart": {"preset": "async", "on_stale": "restart"},
}


def bias(*, tokens: bool = False, **schedule: Any) -> list[float]:
    """Return the ratios of all deciles, with the groups that a schedule without drops trains as the
    sampled ones."""
    changes = {"schedule": schedule, "task": {"scorer_workers": 64}}
    settings = build_simulation(merge(SMALL, changes))
    world, source = build_world(settings), group_source(settings)
    world.run(STEPS)
    size = settings.schedule.groups_per_batch
    sampled = [n for number in range(WARMUP * size, STEPS * size) for n in source.group(number)[0]]
    trained = [pair for batch in world.statistics.lengths[WARMUP:STEPS] for pair in batch]
    return length_bias(sampled, trained, tokens=tokens)


@pytest.mark.parametrize("name", WHOLE)
def test_schedule_without_drops_trains_each_decile_as_often_as_sampled(name: str) -> None:
    ratios = bias(**{"preset": name, **WHOLE[name]})
    assert ratios == pytest.approx([1.0] * 10, abs=ERROR)


def test_async_that_drops_trains_the_longest_decile_at_less_than_half_its_share() -> None:
    """The preset's default is `on_stale: drop`; measured is 0.25 of the share."""
    ratios = bias(preset="async", on_stale="drop")
    assert ratios[9] < 0.5 and ratios[0] > 1.2


def test_mask_trains_all_responses_but_fewer_tokens_of_long_ones() -> None:
    """The longest decile has 0.69 of its share of tokens in this measurement."""
    of_responses = bias(preset="async", on_stale="mask")
    assert of_responses == pytest.approx([1.0] * 10, abs=ERROR)
    of_tokens = bias(tokens=True, preset="async", on_stale="mask")
    assert of_tokens[9] < 0.85 and of_tokens[0] > 1.1


def test_dropping_the_oldest_complete_groups_trains_fewer_long_responses() -> None:
    ratios = bias(preset="pipeline", overflow="drop_oldest", max_waiting_batches=1, concurrency=80)
    assert ratios[9] < 0.5 and ratios[0] > 1.5


def test_length_bias_compares_shares_of_responses_and_of_tokens() -> None:
    sampled = list(range(1, 101))
    assert length_bias(sampled, [(n, n) for n in sampled]) == pytest.approx([1.0] * 10)
    # Without the longest decile, the other nine have 10 / 9 of their share.
    shorter = [(n, n) for n in sampled[:90]]
    assert length_bias(sampled, shorter) == pytest.approx([10 / 9] * 9 + [0.0])
    # Half of the tokens of the longest decile (955 of 5050 tokens) are masked.
    masked = [(n, n if n <= 90 else n / 2) for n in sampled]
    expected = [1 / (1 - 0.5 * 955 / 5050)] * 9 + [0.5 / (1 - 0.5 * 955 / 5050)]
    assert length_bias(sampled, masked, tokens=True) == pytest.approx(expected)  # type: ignore[arg-type]
