"""Tests run directories: each is complete or not a run, is never shared, and has small files that
are written atomically."""

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.config import build_config
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.launcher.run_lock import new_run
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import MetricsWriter
from tests.store.disk import keeping, needs_compiler


def test_find_returns_the_settings_that_create_wrote(tmp_path: Path) -> None:
    config = build_config({"name": "a", "root": str(tmp_path), "seed": 7})
    directory = RunDirectory.create(config)
    opened, settings = RunDirectory.find(directory.path, ["steps=9"])
    assert opened == directory
    assert (settings.seed, settings.steps) == (7, 9)
    directory.save_config(settings)
    assert RunDirectory.find(directory.path, [])[1].steps == 9, "a saved override stays"


def test_new_run_sets_aside_directory_of_a_failed_start_with_its_name(tmp_path: Path) -> None:
    config = build_config({"name": "a", "root": str(tmp_path)})
    for number in (1, 2):
        with pytest.raises(ComponentFailure), new_run(config, "a test") as directory:
            (directory.logs / "trainer.log").write_text(str(number))
            raise ComponentFailure("the engine did not start")
    with new_run(config, "a test") as directory:
        assert [*directory.logs.iterdir()] == []
    kept = [(tmp_path / f"a.failed-{i}/logs/trainer.log").read_text() for i in (1, 2)]
    assert kept == ["1", "2"]
    with pytest.raises(UserError, match="exists already"), new_run(config, "a test"):
        pass


def test_new_run_is_refused_when_earlier_run_failed_after_a_step(tmp_path: Path) -> None:
    config = build_config({"name": "a", "root": str(tmp_path)})
    with pytest.raises(ComponentFailure), new_run(config, "a test") as directory:
        with MetricsWriter(directory.metrics_file, lineage=0) as metrics:
            metrics.write(0, {})
        raise ComponentFailure("rank 0 has died")
    with pytest.raises(UserError, match="exists already"), new_run(config, "a test"):
        pass


def test_find_is_refused_when_the_directory_has_no_run(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(UserError, match=f"^run directory {nowhere}: there is no run"):
        RunDirectory.find(nowhere, [])
    with pytest.raises(UserError, match=f"^--resume {nowhere}: there is no run"):
        RunDirectory.find(nowhere, [], "--resume")


def test_config_file_is_private_when_it_has_an_api_key(tmp_path: Path) -> None:
    content = {"name": "a", "root": str(tmp_path), "engines": {"api_key": "secret"}}
    directory = RunDirectory.create(build_config(content))
    assert stat.S_IMODE(directory.config_file.stat().st_mode) == 0o600
    directory.save_config(RunDirectory.find(directory.path, ["steps=9"])[1])
    assert stat.S_IMODE(directory.config_file.stat().st_mode) == 0o600
    assert not list(directory.path.glob(".*")), "no temporary file is left"


def test_lineages_count_up_and_first_failure_is_kept(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    assert [directory.next_lineage() for _ in range(3)] == [0, 1, 2]
    directory.report_failure("the cause", 1)
    directory.report_failure("a consequence", 2)
    assert directory.pop_failure() == {"message": "the cause", "exit_code": 1}
    assert directory.pop_failure() is None


def test_lineages_so_far_is_refused_when_a_digit_is_damaged(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    directory.lineage_file.write_text("41")  # The format of an earlier version.
    assert directory.next_lineage() == 42
    intact = directory.lineage_file.read_bytes()
    for position in range(len(intact)):
        for bit in range(8):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << bit
            directory.lineage_file.write_bytes(damaged)
            try:
                assert directory.lineages_so_far() == 43, "only a separator is damaged"
            except UserError as refused:
                assert "holds" in str(refused) and "write it there again" in str(refused)
    directory.lineage_file.write_bytes(intact[: len(intact) // 2])
    assert directory.lineages_so_far() == 43


@pytest.mark.parametrize("content", [b"", b"ctopped", b"\xff\xfe", b"complete\n"])
def test_outcome_is_refused_when_the_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    directory.outcome_file.write_bytes(content)
    with pytest.raises(UserError, match=r"outcome holds .*; write complete or stopped there"):
        directory.outcome()


@needs_compiler
def test_next_lineage_is_new_after_a_power_loss(tmp_path: Path) -> None:
    run, durable = tmp_path / "run", tmp_path / "durable"
    run.mkdir()
    code = (
        "import sys; from pathlib import Path; from megatron_async.run_directory import *; "
        "[RunDirectory(Path(sys.argv[1])).next_lineage() for _ in range(3)]"
    )
    command = [sys.executable, "-c", code, str(run)]
    subprocess.run(command, env=keeping(run, durable), check=True, timeout=60)
    assert RunDirectory(durable).next_lineage() == 3


def test_raise_failure_raises_reported_message_with_its_error_type(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    for code, kind in ((2, UserError), (1, ComponentFailure)):
        directory.report_failure("the cause", code)
        with pytest.raises(kind, match=r"^the cause($|; the log is .*trainer\.log$)"):
            directory.raise_failure(directory.logs / "trainer.log")
    # Raises nothing, because both failures were removed when they were raised.
    directory.raise_failure(directory.logs / "trainer.log")


def test_weights_directory_differs_between_runs_and_their_copies(tmp_path: Path) -> None:
    """Runs differ even if they share `weights.directory`, or if one is a copy of the other."""
    first = RunDirectory(tmp_path / "a" / "run")
    first.path.mkdir(parents=True)
    assert first.weights_directory("") == first.path / "weights"
    shared = str(tmp_path / "shared")
    weights = first.weights_directory(shared)
    assert weights.parent == tmp_path / "shared" and weights.name.startswith("run-")
    moved = RunDirectory(first.path.rename(tmp_path / "a" / "moved"))
    assert weights == moved.weights_directory(shared), "a resume after a move finds the weights"
    shutil.copytree(moved.path, tmp_path / "b" / "run")
    (tmp_path / "c" / "run").mkdir(parents=True)
    others = [RunDirectory(tmp_path / name / "run") for name in "bc"]
    assert len({weights, *(run.weights_directory(shared) for run in others)}) == 3


def test_raise_failure_names_the_run_directory_when_it_was_moved(tmp_path: Path) -> None:
    settings = build_config({"root": str(tmp_path), "name": "run"})
    expected = (
        rf"^{tmp_path}/run was moved or removed during the run: move it back, replacing what "
    )
    with pytest.raises(ComponentFailure, match=expected), new_run(settings, "test") as directory:
        directory.path.rename(tmp_path / "elsewhere")
        directory.raise_failure(directory.logs / "trainer.log")
