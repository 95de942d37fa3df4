"""Tests of the advice that `simulate` prints: its premise is true, and following it improves the
result."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import pytest

from megatron_async.config.load import build_simulation, merge, parse_override
from megatron_async.errors import UserError
from megatron_async.simulate.build import simulate
from megatron_async.simulate.show import comments, warnings
from megatron_async.simulate.sweep import Point
from tests.simulate.test_world import SMALL


@functools.cache
def point(*overrides: str) -> Point:
    settings = SMALL
    for override in overrides:
        settings = merge(settings, parse_override(override))
    config = build_simulation(settings)
    return Point((), config, simulate(config))


def printed(*overrides: str) -> list[str]:
    one = point(*overrides)
    return [*comments(one), *warnings([one])]


@dataclass(frozen=True)
class Advice:
    """One line of advice to test.

    Attributes:
        words: Text that the line contains.
        result: Field of `Summary` that the line is about.
        settings: Overrides with which the line is printed.
        remedies: Overrides that the line suggests, each of which alone makes the result smaller.
    """

    words: str
    result: str
    settings: tuple[str, ...]
    remedies: tuple[tuple[str, ...], ...]


FULL = ("schedule.preset=pipeline", "schedule.concurrency=160", "simulate.kv_capacity_tokens=6000")
STORM = (*FULL, "simulate.admission_reserve_tokens=0", "simulate.load_report_seconds=0.5")
AHEAD = ("schedule.preset=pipeline", "schedule.concurrency=160")
RELIEVE_KV = (("schedule.concurrency=16",), ("simulate.kv_capacity_tokens=60000",))
ADVICE = [
    Advice(
        "engines are idle",
        "engine_idle",
        ("schedule.preset=sync",),
        (("schedule.preset=pipeline",), ("schedule.preset=async",)),
    ),
    Advice(
        "trainer is idle",
        "trainer_idle",
        ("schedule.preset=sync",),
        (("schedule.preset=copris",), ("schedule.preset=pipeline",), ("schedule.preset=async",)),
    ),
    Advice(
        "engines are idle",
        "engine_idle",
        # The warm-up ends after the batches of the initial burst were consumed.
        (*AHEAD, "simulate.steps=60", "simulate.warmup_steps=30"),
        (("parallel.ranks=4",), ("engines.count=1",)),
    ),
    Advice(
        "trainer is idle",
        "trainer_idle",
        ("schedule.preset=pipeline", "schedule.concurrency=4"),
        (("schedule.concurrency=40",), ("engines.count=4",)),
    ),
    Advice("requests wait for space in the KV cache", "kv_full", FULL, RELIEVE_KV),
    Advice(
        "recomputation_storm",
        "recomputed_at_preemption",
        STORM,
        (*RELIEVE_KV, ("schedule.concurrency=auto",)),
    ),
    Advice("mostly because the KV cache is full", "recomputed_at_preemption", STORM, RELIEVE_KV),
    Advice(
        "mostly because responses are resumed",
        "recomputed_at_resume",
        ("schedule.preset=copris",),
        (("schedule.groups_per_batch=24",), ("schedule.concurrency=20",)),
    ),
    Advice(
        "mostly because of weight updates",
        "recomputed_at_update",
        (*AHEAD, "schedule.kv=recompute"),
        (("schedule.kv=keep",),),
    ),
    Advice(
        "mostly as stale",
        "wasted",
        ("schedule.preset=async", "schedule.concurrency=400"),
        (("schedule.max_async_level=4",), ("schedule.on_stale=wait",)),
    ),
    Advice(
        "mostly as overflow",
        "wasted",
        (*AHEAD, "schedule.overflow=drop_oldest"),
        (("schedule.overflow=block",), ("schedule.concurrency=16",)),
    ),
    Advice(
        "mostly as filtered",
        "wasted",
        ("schedule.preset=pipeline", "schedule.dynamic_sampling=true"),
        (("schedule.dynamic_sampling=false",),),
    ),
    Advice(
        "mean lag",
        "lag_mean",
        AHEAD,
        (("schedule.max_async_level=2",), ("schedule.concurrency=40",)),
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=lambda a: f"{a.words}, {a.settings[0]}")
def test_advice_improves_its_result_when_followed(advice: Advice) -> None:
    line = next(line for line in printed(*advice.settings) if advice.words in line)
    remedy = line.split(advice.words)[1]
    named = re.findall(r"\b(?:schedule|simulate|engines|parallel|task)\.[a-z_.]*[a-z_]", remedy)
    tested = {text.partition("=")[0] for texts in advice.remedies for text in texts}
    assert set(named) == tested, "the test tries exactly the settings that the line names"
    before = getattr(point(*advice.settings).summary, advice.result)
    for texts in advice.remedies:
        after = getattr(point(*advice.settings, *texts).summary, advice.result)
        assert after < before, f"{texts}: {advice.result} {before:.3f} → {after:.3f}"


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.preset=sync", "simulate.placement=colocated"),
        ("schedule.preset=async", "schedule.concurrency=400"),
        ("schedule.preset=pipeline", "schedule.concurrency=60", "engines.max_running_requests=8"),
    ],
    ids=["a batch that drains", "a lag bound", "engines.max_running_requests"],
)
def test_advice_does_not_blame_the_cache_when_slots_are_empty_otherwise(
    settings: tuple[str, ...],
) -> None:
    one = point(*settings)
    assert one.summary.slots_busy < 0.5 and one.summary.kv_full == 0
    assert not [line for line in comments(one) if "KV" in line]


def test_advice_is_empty_for_shared_gpus_that_alternate() -> None:
    assert point("schedule.preset=sync", "simulate.placement=colocated").summary.trainer_idle > 0.4
    assert printed("schedule.preset=sync", "simulate.placement=colocated") == []


def test_advice_does_not_remove_the_last_engine() -> None:
    (line, *_) = printed(*AHEAD, "engines.count=1", "parallel.ranks=8")
    assert line.endswith("try more parallel.ranks")


def test_advice_does_not_raise_concurrency_when_requests_wait_for_kv() -> None:
    settings = (*FULL, "simulate.kv_capacity_tokens=2200")
    (line,) = [line for line in printed(*settings) if "trainer is idle" in line]
    assert line.endswith("try more engines.count")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ((), r"larger engines\.tensor 1, simulate\.gpu\.name A6000 or simulate\.kv_capacity_tok"),
        (("simulate.kv_capacity_tokens=100",), r"\). Set a larger simulate\.kv_capacity_tokens$"),
    ],
)
def test_engine_costs_name_the_remedy_when_a_response_does_not_fit(
    settings: tuple[str, ...], remedy: str
) -> None:
    large = ("simulate.model=llama-3-70b", "simulate.gpu.name=A6000")
    with pytest.raises(UserError, match=remedy):
        point(*large, *settings)
