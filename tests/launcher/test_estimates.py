"""Tests estimates of what a run needs: the seconds of a stop, and disk space for checkpoints."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron_async.commands.launch import Cluster, seconds_of
from megatron_async.config.load import load_simulation
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.files.package_files import ROOT
from megatron_async.launcher.derived import Machine
from megatron_async.launcher.estimates import END_SECONDS, Checkpoints, stop_seconds
from megatron_async.models.shape import shape_of
from megatron_async.run_directory import RunDirectory
from megatron_async.simulate.planner import training_seconds

PARAMETERS = 70_553_706_496
SCRIPT = (ROOT / "launch/slurm/train.sbatch").read_text()


NODE = Machine.of_nodes(8, 4)


def config_of_70b(*overrides: str) -> SimulationConfig:
    return load_simulation(ROOT / "configs" / "llama3.3-70b.yaml", list(overrides))


def stop_of(config: SimulationConfig) -> int:
    return stop_seconds(config, Checkpoints.of(config, shape_of(config)), NODE)


def nodes(time_limit: str = "24:00:00", *options: str) -> Cluster:
    return Cluster(8, None, time_limit, options)


def test_checkpoint_size_is_twelve_bytes_for_each_parameter() -> None:
    found = Checkpoints.of(config_of_70b(), shape_of(config_of_70b()))
    # The shape does not count norms and biases.
    assert found.size == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert found.write_seconds == pytest.approx(12 * PARAMETERS / 5e9, rel=1e-3)
    assert found.limit == 3, "two checkpoints are kept, and one is written"


def test_checkpoint_limit_is_lower_when_the_run_has_few_steps() -> None:
    config = config_of_70b("steps=15")
    assert Checkpoints.of(config, shape_of(config)).limit == 2


def test_stop_seconds_cover_the_current_step_or_save_and_the_final_save() -> None:
    """With these settings a step takes less time than a save, therefore the stop waits for two
    saves."""
    config = config_of_70b()
    write = Checkpoints.of(config, shape_of(config)).write_seconds
    assert 40 < training_seconds(config) < write
    assert stop_of(config) == math.ceil(2 * write)
    large = config_of_70b("schedule.groups_per_batch=512")
    assert training_seconds(large) > write
    assert stop_of(large) == math.ceil(training_seconds(large) + write)
    synchronous = config_of_70b("checkpoint.asynchronous=false")
    assert stop_of(synchronous) == math.ceil(training_seconds(synchronous) + write)


def test_train_script_ends_the_job_within_the_reserved_seconds() -> None:
    """After a successful end, the script waits for the rollout side to exit and then sends SIGTERM.
    Otherwise it waits for the trainers first."""
    waits = [int(seconds) for seconds in re.findall(r"within (\d+) ", SCRIPT)]
    rollout, trainer, after_signal = waits
    assert max(rollout + after_signal, trainer + 2 * after_signal) <= END_SECONDS
    assert f"#SBATCH --signal=B:USR1@{90 + END_SECONDS}" in SCRIPT and "grace=90" in SCRIPT


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            nodes("0:05:00"),
            r"--time is 0:05:00, but a stop takes up to 429 s: 339 s for the current step",
        ),
        (nodes("24:00:00", "--signal=B:USR1@120"), r"Remove it, or set it to .*USR1@429"),
        (nodes("24:00:00", "--signal=USR1@900"), r"Remove it, or set it to .*USR1@429"),
    ],
)
def test_cluster_notice_is_refused_when_too_short_for_a_stop(
    cluster: Cluster, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        cluster.notice(stop_of(config_of_70b()))


def test_cluster_notice_may_be_longer_than_a_stop_needs() -> None:
    assert nodes("24:00:00", "--signal=B:USR1@900").notice(stop_of(config_of_70b())) == 900


def test_stop_seconds_refuses_disk_too_slow_for_the_save_timeout() -> None:
    with pytest.raises(UserError, match=r"checkpoint.timeout_seconds is 1800, .* takes 2117 s"):
        stop_of(config_of_70b("checkpoint.write_gb_per_s=0.4"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:05:00", 3900),
        ("2-0", 172_800),
        ("1-02:03", 93_780),
        ("1-0:0:1", 86_401),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_seconds_of_reads_the_time_formats_of_slurm(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_check_free_space_counts_the_space_of_existing_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    existing = directory.checkpoints / "step_10" / "rank_00000.f32.safetensors"
    existing.parent.mkdir(parents=True)
    existing.write_bytes(bytes(2000))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    Checkpoints(1000.0, 1.0, 3).check_free_space(directory)
    with pytest.raises(UserError, match=r"Lower checkpoint\.keep"):
        Checkpoints(1001.0, 1.0, 3).check_free_space(directory)
