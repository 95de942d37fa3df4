"""The time that train.sbatch gives a stop, on a Slurm cluster of virtual nodes.

Stand-ins for both roles: trainers whose save takes seconds after the signal, and a rollout side
that ends after it, or with its session.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megatron_async.commands.launch import Cluster, job_script
from megatron_async.config import build_config
from megatron_async.files.package_files import ROOT
from megatron_async.run_directory import RunDirectory
from tests.launcher.cluster import SlurmCluster, missing_programs
from tests.wanted import needs

MISSING = missing_programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    needs(not MISSING, f"Slurm ({', '.join(MISSING)})", "MEGATRON_ASYNC_SLURM_TESTS"),
]

SAVE_SECONDS = 6
# Called as `python -P -m MODULE ROLE RUN --index I --count N --session S`.
ROLE = f"""#!/usr/bin/env bash
role=$4 run=$5 session=${{11}}
control="$run/launch/$session"
touch "$control/$role.up"
until_there() {{ until [ -e "$1" ] || [ -e "$2" ]; do sleep 0.1; done; }}
if [ "$role" = rollout ]; then until_there "$run/saved" "$control/closed"; exit 75; fi
until_there "$control/stop" "$control/stop"
end=$((SECONDS + {SAVE_SECONDS}))
while [ $SECONDS -lt $end ]; do
  [ -e "$control/closed" ] && exit 75
  sleep 0.1
done
touch "$run/saved"
exit 75
"""


def submit(cluster: SlurmCluster, folder: Path, stop: int) -> tuple[str, RunDirectory]:
    """A job as `launch` writes it, whose trainers may take `stop` seconds."""
    directory = RunDirectory(folder / f"run{stop}")
    directory.logs.mkdir(parents=True)
    directory.config_file.write_text("name: x\n")
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(ROLE)
    python.chmod(0o755)
    nodes = Cluster(gpus_per_node=0, engine_nodes=1, time_limit="1:00:00")
    job_file = directory.path / "job.sbatch"
    job_file.write_text(job_script(build_config({}), directory, nodes, 1, stop))
    environment = {
        "MEGATRON_ASYNC_ROOT": str(ROOT),
        "MEGATRON_ASYNC_VENV": str(folder / "venv"),
    }
    return cluster.submit(job_file, environment=environment), directory


def is_up(directory: RunDirectory) -> bool:
    return len(list(directory.path.glob("launch/*/*.up"))) == 2


def queued_again(cluster: SlurmCluster, job: str) -> bool:
    return cluster.restarts(job) == 1


def test_a_save_has_the_seconds_of_the_job_and_no_more(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path / "cluster", nodes=4) as cluster:
        jobs = [submit(cluster, tmp_path, stop) for stop in (2 * SAVE_SECONDS, 2)]
        for job, directory in jobs:
            cluster.wait_until(partial(is_up, directory), 30)
            cluster.signal_batch(job, "USR1")
        for job, _ in jobs:
            cluster.wait_until(partial(queued_again, cluster, job), 60)
        saved = [(directory.path / "saved").exists() for _, directory in jobs]
    assert saved == [True, False]
