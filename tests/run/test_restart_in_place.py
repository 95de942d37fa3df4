"""Trainer ranks that die are restarted by torchrun in place, as often as it is allowed and no more.

No restart may be lost to what the attempt before has left behind.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.crash.run import RunUnderFire, configuration, prepare
from megatron_async.telemetry.metrics import read_metrics

KILLS = 3


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_run_goes_on_after_each_of_several_killed_ranks(tmp_path: Path) -> None:
    """With as many restarts as kills: the run itself uses up none."""
    prepare(tmp_path)
    config = configuration("async", "simulated", tmp_path, "restarts", {})
    config["parallel"] = {"ranks": 2}
    config["trainer"]["max_restarts"] = KILLS
    run = RunUnderFire(config, random.Random(1))
    try:
        run.start()
        for _ in range(KILLS):
            run.kill("trainer")
    finally:
        run.close()
    lineages = {int(line["lineage"]) for line in read_metrics(run.directory.metrics_file)}
    log = (run.directory.logs / "trainer.log").read_text(errors="replace")
    assert max(lineages) == KILLS, log[-3000:]
