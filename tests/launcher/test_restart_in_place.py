"""Tests that a live run restarts killed trainer ranks in place, exactly as often as
`trainer.max_restarts` permits.

State that an earlier attempt has left behind must not make a restart fail.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from megatron_async.files.disk import json_lines
from megatron_async.telemetry.metrics import read_metrics
from tests.crash.run import RunFailed, RunUnderFire, configuration, prepare
from tests.process_backends.test_child_process import wait_for

KILLS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunUnderFire]:
    """Yield a started run that permits as many restarts as the tests kill ranks."""
    root = tmp_path_factory.mktemp("live")
    prepare(root)
    config = configuration("async", "simulated", root, "restarts", {})
    config["parallel"] = {"ranks": 2}
    config["trainer"]["max_restarts"] = KILLS
    run = RunUnderFire(config, random.Random(1))
    try:
        run.start()
        yield run
    finally:
        run.close()


def test_run_warns_of_each_restart_when_ranks_are_killed(run: RunUnderFire) -> None:
    run.directory.report_failure("a checkpoint could not be written", 1, "an earlier one")
    for _ in range(KILLS):
        run.kill("trainer")
    lines = json_lines(run.directory.metrics_file.read_bytes())
    named = [(w["name"], w["message"]) for w in lines if w["kind"] == "warning"]
    warnings = {name: message for name, message in named if name.startswith("trainer_restart")}
    assert [*warnings] == [f"trainer_restart_{number + 1}" for number in range(KILLS)]
    causes = ["a checkpoint could not be written", *["rank [01] was killed by SIGKILL"] * 2]
    for number, (message, cause) in enumerate(zip(warnings.values(), causes, strict=True)):
        assert re.match(
            rf"a trainer rank failed \({cause}.*\); all ranks have restarted from "
            rf"(the checkpoint of step \d+|step 0); {KILLS - number - 1} of {KILLS} restarts "
            r"remain \(trainer.max_restarts\)$",
            message,
        ), message
        expected = f"warning trainer_restart_{number + 1}: {message}"
        assert wait_for(lambda expected=expected: expected in run.log.read_text())
    assert read_metrics(run.directory.metrics_file)[-1]["train/restarts"] == KILLS
    lineages = {int(line["lineage"]) for line in read_metrics(run.directory.metrics_file)}
    log = (run.directory.logs / "trainer.log").read_text(errors="replace")
    assert max(lineages) == KILLS, log[-3000:]


def test_run_ends_with_the_last_cause_when_restarts_are_used_up(
    run: RunUnderFire,
) -> None:
    with pytest.raises(
        RunFailed, match=r"(?s)exit code 1: .*error: the trainer.* killed by SIGKILL"
    ):
        run.kill("trainer")
