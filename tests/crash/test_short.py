"""The crash test of `tests/crash`, short and with a fixed seed: real processes, real kills.

Simulated engines: every part of a run killed once under `async`, the whole tree at the end; the run
then goes back to an older checkpoint. Episodes under `copris`: their worker, the manager, an engine
and the tree, with the environment's own account of what it has seen; those of an agent under
`pipeline`, with the program's own log. Real engines, under `copris`: a killed scorer and the
failure table of docs/failures.md, one failure after the other in one run, with two engines at first
and with only one in its last life.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.commands.report import write_report
from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments.calls import Call
from megatron_async.environments.chat import ChatCall
from megatron_async.environments.gateway import Gateway
from tests.crash.__main__ import Account, one_run
from tests.crash.checks import audit
from tests.crash.evidence import gather
from tests.crash.run import (
    RunUnderFire,
    Target,
    configuration,
    of_agents,
    of_episodes,
    prepare,
    rules_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[RunUnderFire]]:
    prepare(tmp_path)
    started: list[RunUnderFire] = []
    yield started
    for run in started:
        run.close()


def goes_back(run: RunUnderFire) -> None:
    """A complete run goes on from the older of the two checkpoints that it keeps."""
    older, newer = sorted(c.manifest.version for c in list_checkpoints(run.directory.checkpoints))
    run.resume("--from-step", str(older.number), f"steps={newer.number + 2}")
    run.wait_for_end()
    assert (run.directory.checkpoints / f"abandoned_{newer}").is_dir()
    evidence = gather(run.directory, run.looks)
    began = evidence.attaches[-1]
    assert (began.lineage > newer.lineage, began.step) == (True, older.number)
    broken = {name: found for name, found in audit(evidence, rules_of(run.config)).items() if found}
    assert broken == {}


def test_killed_parts_and_a_killed_tree_lose_nothing(
    tmp_path: Path, runs: list[RunUnderFire]
) -> None:
    run = RunUnderFire(configuration("async", "simulated", tmp_path, "short", {}), random.Random(3))
    runs.append(run)
    plan: list[Target] = ["engine", "scorer", "manager", "trainer", "tree"]
    account = Account()
    one_run(run, plan, account)
    assert account.broken == []
    assert [kill.target for kill in run.kills] == plan
    assert account.batches >= len(plan)
    goes_back(run)


KEY = re.compile(rb"sk-[\w-]{43}")


def assert_no_key_in_a_file_of(run: RunUnderFire) -> None:
    """Nothing that the run has left holds a key of an agent: its report and the log neither."""
    own = Gateway(SamplingConfig()).open(NobodysCalls()).encode()
    assert KEY.fullmatch(own), "this is what keys are like"
    report = write_report([run.directory.path], None)
    found = [file for file in run.directory.path.rglob("*") if file.is_file()]
    names = {file.name for file in found}
    assert {report.name, "config.yaml", "metrics.jsonl", "trajectories.jsonl"} <= names
    assert run.directory.store_file in found
    assert any(name.startswith("environments0") for name in names), "the worker's log"
    assert [file for file in (*found, run.log) if KEY.search(file.read_bytes())] == []


class NobodysCalls:
    """An owner of a key that nobody uses."""

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        raise NotImplementedError


def test_what_a_program_has_been_given_is_stored_after_kills_and_its_keys_are_nowhere(
    tmp_path: Path, runs: list[RunUnderFire]
) -> None:
    changes = of_agents(tmp_path, "agents")
    config = configuration("pipeline", "simulated", tmp_path, "agents", changes)
    run = RunUnderFire(config, random.Random(3))
    runs.append(run)
    account = Account()
    one_run(run, ["worker", "manager", "tree"], account)
    assert account.broken == []
    assert account.repeats > 0, "programs have run again"
    assert_no_key_in_a_file_of(run)


def test_episodes_go_on_after_kills_as_their_environments_saw_them(
    tmp_path: Path, runs: list[RunUnderFire]
) -> None:
    changes = of_episodes(tmp_path, "episodes")
    config = configuration("copris", "simulated", tmp_path, "episodes", changes)
    run = RunUnderFire(config, random.Random(3))
    runs.append(run)
    account = Account()
    one_run(run, ["worker", "manager", "engine", "tree"], account)
    assert account.broken == []
    assert account.open_at_kills > 0
    assert account.went_on >= 0.8 * account.open_at_kills


@pytest.mark.engine
def test_a_run_on_real_engines_survives_the_failure_table(
    tmp_path: Path, runs: list[RunUnderFire]
) -> None:
    changes = {
        "engines": {"hang_timeout_seconds": 8.0},
        "task": {"scorer_timeout_seconds": 5.0},
    }
    run = RunUnderFire(
        configuration("copris", "sglang", tmp_path, "table", changes), random.Random(5)
    )
    runs.append(run)
    run.start()
    run.wait_for_step(1)  # a scorer that scores, and not one that starts
    hung = [run.hang("scorer"), run.hang("engine")]
    run.wait_for_progress()
    run.wait_until_killed(*hung)
    run.kill("engine")
    run.kill("scorer")
    run.kill("trainer")
    run.kill("manager")
    run.last_life(14, "engines.count=1")
    run.kill("engine")
    # What had been generated before is good for two batches; then the engine must be back.
    run.wait_for_step(run.step() + 4)
    run.hang("engine")
    run.wait_for_end()
    evidence = gather(run.directory, run.looks)
    broken = {name: found for name, found in audit(evidence, rules_of(run.config)).items() if found}
    assert broken == {}
