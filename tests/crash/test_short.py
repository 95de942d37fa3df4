"""Runs the crash test of `tests/crash` shortly and with fixed seeds, on real processes.

With simulated engines, each test kills each part of a run once and the whole process tree at the
end:

- `async`: the run then resumes from an older checkpoint.
- `copris` with episodes: the environment records the calls that it receives.
- `pipeline` with episodes of an agent: the agent records the responses that it receives.

With real engines, the test kills a scorer and causes the failures of the table in docs/failures.md
one after the other in one `copris` run. The run has two engines at first and one engine after its
last resume.
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
    """Resume a completed run from the older of its two checkpoints, and check its evidence."""
    older, newer = sorted(c.manifest.version for c in list_checkpoints(run.directory.checkpoints))
    run.resume("--from-step", str(older.number), f"steps={newer.number + 2}")
    run.wait_for_end()
    assert (run.directory.checkpoints / f"abandoned_{newer}").is_dir()
    evidence = gather(run.directory, run.looks)
    began = evidence.attaches[-1]
    assert (began.lineage > newer.lineage, began.step) == (True, older.number)
    broken = {name: found for name, found in audit(evidence, rules_of(run.config)).items() if found}
    assert broken == {}


def test_run_keeps_every_promise_when_each_part_and_the_tree_are_killed(
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
    """Assert that no file of the run contains an agent's key, not even the report and the log."""
    own = Gateway(SamplingConfig()).open(NobodysCalls()).encode()
    assert KEY.fullmatch(own), "KEY must match a real key"
    report = write_report([run.directory.path], None)
    found = [file for file in run.directory.path.rglob("*") if file.is_file()]
    names = {file.name for file in found}
    assert {report.name, "config.yaml", "metrics.jsonl", "trajectories.jsonl"} <= names
    assert run.directory.store_file in found
    assert any(name.startswith("environments0") for name in names), "the worker's log is missing"
    assert [file for file in (*found, run.log) if KEY.search(file.read_bytes())] == []


class NobodysCalls:
    """Call handler of a key that no program uses."""

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        raise NotImplementedError


def test_agent_run_stores_every_response_and_no_key_when_its_parts_are_killed(
    tmp_path: Path, runs: list[RunUnderFire]
) -> None:
    changes = of_agents(tmp_path, "agents")
    config = configuration("pipeline", "simulated", tmp_path, "agents", changes)
    run = RunUnderFire(config, random.Random(3))
    runs.append(run)
    account = Account()
    one_run(run, ["worker", "manager", "tree"], account)
    assert account.broken == []
    assert account.repeats > 0, "no program ran again after a kill"
    assert_no_key_in_a_file_of(run)


def test_episodes_continue_and_keep_their_responses_when_parts_are_killed(
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
def test_run_on_sglang_keeps_every_promise_during_the_failures_of_the_docs(
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
    run.wait_for_step(1)  # The scorer must hang while it scores, not while it starts.
    hung = [run.hang("scorer"), run.hang("engine")]
    run.wait_for_progress()
    run.wait_until_killed(*hung)
    run.kill("engine")
    run.kill("scorer")
    run.kill("trainer")
    run.kill("manager")
    run.last_life(14, "engines.count=1")
    run.kill("engine")
    # The responses generated so far are enough for two batches; then the engine must be available.
    run.wait_for_step(run.step() + 4)
    run.hang("engine")
    run.wait_for_end()
    evidence = gather(run.directory, run.looks)
    broken = {name: found for name, found in audit(evidence, rules_of(run.config)).items() if found}
    assert broken == {}
