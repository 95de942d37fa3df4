"""What `simulate` advises: its premise is true, and who follows it sees the figure get better."""

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
    """`settings` bring about the line that holds `words`, about `figure`; `tries` are what it
    names, each of which by itself makes the figure smaller."""

    words: str
    figure: str
    settings: tuple[str, ...]
    tries: tuple[tuple[str, ...], ...]


FULL = ("schedule.preset=pipeline", "schedule.concurrency=160", "simulate.kv_capacity_tokens=6000")
STORM = (*FULL, "simulate.admission_reserve_tokens=0", "simulate.load_report_seconds=0.5")
AHEAD = ("schedule.preset=pipeline", "schedule.concurrency=160")
ROOM = (("schedule.concurrency=16",), ("simulate.kv_capacity_tokens=60000",))
ADVICE = [
    Advice(
        "engines idle",
        "engine_idle",
        ("schedule.preset=sync",),
        (("schedule.preset=pipeline",), ("schedule.preset=async",)),
    ),
    Advice(
        "trainer idle",
        "trainer_idle",
        ("schedule.preset=sync",),
        (("schedule.preset=copris",), ("schedule.preset=pipeline",), ("schedule.preset=async",)),
    ),
    Advice(
        "engines idle",
        "engine_idle",
        (*AHEAD, "simulate.steps=60", "simulate.warmup_steps=30"),  # the first burst is used up
        (("parallel.ranks=4",), ("engines.count=1",)),
    ),
    Advice(
        "trainer idle",
        "trainer_idle",
        ("schedule.preset=pipeline", "schedule.concurrency=4"),
        (("schedule.concurrency=40",), ("engines.count=4",)),
    ),
    Advice("requests wait for KV cache", "kv_full", FULL, ROOM),
    Advice(
        "recomputation_storm",
        "recomputed_at_preemption",
        STORM,
        (*ROOM, ("schedule.concurrency=auto",)),
    ),
    Advice("most where the KV cache is full", "recomputed_at_preemption", STORM, ROOM),
    Advice(
        "most where responses are resumed",
        "recomputed_at_resume",
        ("schedule.preset=copris",),
        (("schedule.groups_per_batch=24",), ("schedule.concurrency=20",)),
    ),
    Advice(
        "most at weight updates",
        "recomputed_at_update",
        (*AHEAD, "schedule.kv=recompute"),
        (("schedule.kv=keep",),),
    ),
    Advice(
        "most as stale",
        "wasted",
        ("schedule.preset=async", "schedule.concurrency=400"),
        (("schedule.max_async_level=4",), ("schedule.on_stale=wait",)),
    ),
    Advice(
        "most as overflow",
        "wasted",
        (*AHEAD, "schedule.overflow=drop_oldest"),
        (("schedule.overflow=block",), ("schedule.concurrency=16",)),
    ),
    Advice(
        "most as filtered",
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
def test_each_setting_that_is_named_makes_the_figure_better(advice: Advice) -> None:
    line = next(line for line in printed(*advice.settings) if advice.words in line)
    remedy = line.split(advice.words)[1]
    named = re.findall(r"\b(?:schedule|simulate|engines|parallel|task)\.[a-z_.]*[a-z_]", remedy)
    tried = {text.partition("=")[0] for texts in advice.tries for text in texts}
    assert set(named) == tried, "the test follows what the line advises"
    before = getattr(point(*advice.settings).summary, advice.figure)
    for texts in advice.tries:
        after = getattr(point(*advice.settings, *texts).summary, advice.figure)
        assert after < before, f"{texts}: {advice.figure} {before:.3f} → {after:.3f}"


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.preset=sync", "simulate.placement=colocated"),
        ("schedule.preset=async", "schedule.concurrency=400"),
        ("schedule.preset=pipeline", "schedule.concurrency=60", "engines.max_running_requests=8"),
    ],
    ids=["a batch that drains", "a lag bound", "engines.max_running_requests"],
)
def test_slots_that_are_empty_for_another_reason_are_no_full_cache(
    settings: tuple[str, ...],
) -> None:
    one = point(*settings)
    assert one.summary.slots_busy < 0.5 and one.summary.kv_full == 0
    assert not [line for line in comments(one) if "KV" in line]


def test_gpus_that_train_and_generate_in_turn_get_no_advice_that_is_refused_there() -> None:
    assert point("schedule.preset=sync", "simulate.placement=colocated").summary.trainer_idle > 0.4
    assert printed("schedule.preset=sync", "simulate.placement=colocated") == []


def test_a_last_engine_is_not_to_be_taken_away() -> None:
    (line, *_) = printed(*AHEAD, "engines.count=1", "parallel.ranks=8")
    assert line.endswith("try more parallel.ranks")


def test_a_higher_concurrency_is_not_advised_where_requests_wait_for_kv() -> None:
    settings = (*FULL, "simulate.kv_capacity_tokens=2200")
    (line,) = [line for line in printed(*settings) if "trainer idle" in line]
    assert line.endswith("try more engines.count")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ((), r"larger engines\.tensor 1, simulate\.gpu\.name A6000 or simulate\.kv_capacity_tok"),
        (("simulate.kv_capacity_tokens=100",), r"\): set a larger simulate\.kv_capacity_tokens$"),
    ],
)
def test_a_response_that_does_not_fit_names_what_makes_room(
    settings: tuple[str, ...], remedy: str
) -> None:
    large = ("simulate.model=llama-3-70b", "simulate.gpu.name=A6000")
    with pytest.raises(UserError, match=remedy):
        point(*large, *settings)
