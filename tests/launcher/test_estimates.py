"""What a run takes, by arithmetic: the time of a stop, and room for checkpoints."""

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


def seventy(*overrides: str) -> SimulationConfig:
    return load_simulation(ROOT / "configs" / "llama3.3-70b.yaml", list(overrides))


def stop_of(config: SimulationConfig) -> int:
    return stop_seconds(config, Checkpoints.of(config, shape_of(config)), NODE)


def nodes(time_limit: str = "24:00:00", *options: str) -> Cluster:
    return Cluster(8, None, time_limit, options)


def test_a_checkpoint_holds_twelve_bytes_of_each_parameter() -> None:
    found = Checkpoints.of(seventy(), shape_of(seventy()))
    # The shape counts no norms and biases.
    assert found.size == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert found.write_seconds == pytest.approx(12 * PARAMETERS / 5e9, rel=1e-3)
    assert found.limit == 3, "two are kept, and one is written"


def test_few_steps_make_fewer_checkpoints() -> None:
    config = seventy("steps=15")
    assert Checkpoints.of(config, shape_of(config)).limit == 2


def test_a_stop_waits_for_the_step_and_for_a_save_under_way_and_for_its_own() -> None:
    """A step takes less than a save here, which therefore is what the stop waits for, twice."""
    config = seventy()
    write = Checkpoints.of(config, shape_of(config)).write_seconds
    assert 40 < training_seconds(config) < write
    assert stop_of(config) == math.ceil(2 * write)
    large = seventy("schedule.groups_per_batch=512")
    assert training_seconds(large) > write
    assert stop_of(large) == math.ceil(training_seconds(large) + write)
    alone = seventy("checkpoint.asynchronous=false")
    assert stop_of(alone) == math.ceil(training_seconds(alone) + write)


def test_the_script_needs_no_more_than_its_share_to_end_the_job() -> None:
    """After a good end: the rollout side's own end, then SIGTERM. Else: the trainers' end first."""
    waits = [int(seconds) for seconds in re.findall(r"within (\d+) ", SCRIPT)]
    rollout, trainer, each = waits
    assert max(rollout + each, trainer + 2 * each) <= END_SECONDS
    assert f"#SBATCH --signal=B:USR1@{90 + END_SECONDS}" in SCRIPT and "grace=90" in SCRIPT


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (
            nodes("0:05:00"),
            r"--time is 0:05:00, but a stop takes up to 429 s: 339 s for the current step",
        ),
        (nodes("24:00:00", "--signal=B:USR1@120"), r"Remove it, or set it to .*USR1@429"),
        (nodes("24:00:00", "--signal=USR1@900"), r"Remove it, or set it to .*USR1@429"),
    ],
)
def test_a_notice_that_cannot_hold_is_refused(cluster: Cluster, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        cluster.notice(stop_of(seventy()))


def test_a_longer_notice_is_the_users_to_choose() -> None:
    assert nodes("24:00:00", "--signal=B:USR1@900").notice(stop_of(seventy())) == 900


def test_a_disk_too_slow_for_the_limit_of_a_save_is_found_before_it_fails_one() -> None:
    with pytest.raises(UserError, match=r"checkpoint.timeout_seconds is 1800, .* takes 2117 s"):
        stop_of(seventy("checkpoint.write_gb_per_s=0.4"))


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
def test_times_are_read_as_slurm_takes_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_checkpoints_that_lie_there_need_no_further_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    held = directory.checkpoints / "step_10" / "rank_00000.f32.safetensors"
    held.parent.mkdir(parents=True)
    held.write_bytes(bytes(2000))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    Checkpoints(1000.0, 1.0, 3).check_free_space(directory)
    with pytest.raises(UserError, match=r"Lower checkpoint\.keep"):
        Checkpoints(1001.0, 1.0, 3).check_free_space(directory)
