"""Tests that fault sequences are repeatable and that only the kind of a fault excuses a failure."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_async.config import build_config
from megatron_async.files.disk import append_json_lines
from tests.crash.fault_program import PRESETS, Plan, is_due_to_a_slow_machine
from tests.crash.faults import (
    KINDS,
    TOLERATED,
    Injected,
    excused,
    kinds_at,
    may_end,
    sequence,
)
from tests.crash.processes import LONGER, Program
from tests.crash.run import RunUnderFire
from tests.crash.world import Result, episode_settings, rules_of, settings
from tests.store.disk import needs_compiler


def test_fault_sequence_depends_only_on_its_seed() -> None:
    assert sequence(1, 40, KINDS) == sequence(1, 40, tuple(reversed(KINDS)))
    assert sequence(1, 40, KINDS) != sequence(2, 40, KINDS)
    assert sequence(1, 40, KINDS)[:20] == sequence(1, 20, KINDS)


def test_fault_sequence_has_every_kind_before_it_repeats_one() -> None:
    kinds = kinds_at("engine", "disk")
    faults = sequence("s", 2 * len(kinds), kinds)
    assert {fault.kind for fault in faults[: len(kinds)]} == set(kinds)
    assert {fault.kind for fault in faults[len(kinds) :]} == set(kinds)


def test_faults_of_a_sequence_are_within_the_ranges_of_their_kinds() -> None:
    for fault in sequence(3, 400, KINDS, gap=(0.1, 0.2)):
        kind = KINDS[fault.kind]
        assert 0.1 <= fault.after <= 0.2
        assert kind.seconds[0] <= fault.seconds <= kind.seconds[1]
        assert kind.count[0] <= fault.count <= kind.count[1]


def test_plan_is_equal_when_no_earlier_plan_was_drawn() -> None:
    plans = [Plan.of(4, number, None, 13) for number in range(7)]
    assert [plan.preset for plan in plans] == [*PRESETS, "sync", "rapid"]
    assert plans[6] == Plan.of(4, 6, None, 13)
    assert Plan.of(4, 6, "async", 13).faults == plans[6].faults


@needs_compiler
@pytest.mark.parametrize("engine", ["simulated", "sglang"])
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_of_whole_runs_are_valid_for_every_preset_and_engine(
    tmp_path: Path, preset: str, engine: str
) -> None:
    program = Program(preset, engine, tmp_path, "run", "1.0", "local")  # type: ignore[arg-type]
    config = build_config(program.run.config)
    assert (config.schedule.preset, config.engines.kind) == (preset, engine)
    longest = KINDS["trainer pauses for long"].seconds
    assert LONGER * longest[0] > config.weights.timeout_seconds, (
        "the trainer must pause for longer than an update may take"
    )


@needs_compiler
@pytest.mark.parametrize("preset", PRESETS)
def test_fault_runs_have_the_lag_bound_of_their_preset(tmp_path: Path, preset: str) -> None:
    """With a bound of 4, the check of the lag of a `sync` run would accept a lag of 1."""
    program = Program(preset, "simulated", tmp_path, "run", "1.0", "local")
    configs = [
        settings(preset),
        episode_settings(preset, tmp_path / "episodes" / "run"),
        build_config(program.run.config),
    ]
    bounds = {config.schedule.max_async_level for config in configs}
    expected = {"sync": 0, "rapid": 0, "async": 2}.get(preset, 4)
    assert bounds == {expected}
    assert {rules_of(config).max_async_level for config in configs} == bounds


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.edge == "engine"])
def test_engine_is_excused_only_by_its_own_faults(kind: object) -> None:
    name = kind.name  # type: ignore[attr-defined]
    one = Injected(name, "http://h:1", count=1)
    enough = Injected(name, "http://h:1", count=TOLERATED)
    assert excused([one], "http://h:1") is KINDS[name].sick
    assert excused([enough], "http://h:1") is (KINDS[name].sick or KINDS[name].requests)
    assert not excused([enough], "http://h:2")


def test_wait_for_progress_counts_a_step_when_the_clock_jumped_back(tmp_path: Path) -> None:
    """The time of the new step is before the times of earlier steps."""
    run = RunUnderFire({"root": str(tmp_path), "name": "r"}, random.Random(0), limit_seconds=20.0)
    run._process = cast(Any, SimpleNamespace(poll=lambda: None))
    file = run.directory.metrics_file
    file.parent.mkdir()
    append_json_lines(file, [{"kind": "train", "step": 0, "lineage": 0, "time": time.time()}])
    more = [{"kind": kind, "step": 1, "lineage": 0, "time": 1.0} for kind in ("eval", "train")]
    later = threading.Timer(0.3, append_json_lines, (file, more))
    later.start()
    run.wait_for_progress()
    later.join()
    assert run.written() == 2 and run.step() == 2


def test_run_may_end_only_when_its_disk_is_full_or_read_only() -> None:
    assert {name for name in KINDS if may_end([Injected(name)])} == {
        "disk is full",
        "disk is read-only",
    }


def test_slow_machine_explains_only_the_replacement_of_healthy_engines() -> None:
    lost = "healthy engines given up: engine0"
    assert not is_due_to_a_slow_machine(Result("async", "", broken=[lost], slow_seconds=0.1))
    assert is_due_to_a_slow_machine(Result("async", "", broken=[lost], slow_seconds=2.0))
    assert not is_due_to_a_slow_machine(Result("async", "", slow_seconds=2.0))
    twice = Result("async", "", broken=[lost, "trained twice: 5"], slow_seconds=2.0)
    assert not is_due_to_a_slow_machine(twice)
