"""Tests the run lock, which permits one launch of a run at a time, and the sessions of a launch
over several nodes.

A second launch is refused before it changes any file, with a message that names the holder. The
roles of a session find each other by files, within a time limit, and only the newest session may
run.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import RunConfig, build_config, dump
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import CannotWrite
from megatron_async.files.lock import Holder
from megatron_async.launcher import node as node_module
from megatron_async.launcher.run_lock import RunInUse, check_unclaimed, hold_run_lock, new_run
from megatron_async.launcher.session import Session
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.train_loop.attempt import exit_code
from tests.small_disk import SmallDisk

HOLD = """
import sys
from pathlib import Path
from megatron_async.launcher.run_lock import hold_run_lock
from megatron_async.run_directory import RunDirectory
with hold_run_lock(RunDirectory(Path(sys.argv[1])), "megatron-async train", session=sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("run_lock")
    build_tiny_model(root / "model", seed=1)
    return build_config({"name": "live", "root": str(root), "model": {"path": str(root / "model")}})


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(config.model_copy(update={"root": str(tmp_path)}))
    directory.lineage_file.write_text("0")
    with MetricsWriter(directory.metrics_file, lineage=0) as metrics:
        metrics.write(0, {"rollout/lag_max": 0, "train/trained_tokens": 1})
    asyncio.run(TrajectoryStore.open(directory.store_file).close())
    return directory


def hold(directory: RunDirectory, session: str = "") -> subprocess.Popen[str]:
    """Start a separate process that holds the run lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory.path), session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def live(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    process = hold(run)
    yield process
    process.kill()
    process.wait(30)


def contents(directory: RunDirectory) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory.path)): path.read_bytes()
        for path in sorted(directory.path.rglob("*"))
        if path.is_file()
    }


RESUMES = [
    ("train", "--resume", "{run}", "steps=9"),
    ("train", "--resume", "{run}", "--from-step", "1"),
    ("launch", "--resume", "{run}", "--gpus-per-node", "0", "steps=9"),
    ("launch", "--resume", "{run}", "--gpus-per-node", "0", "--from-step", "1"),
    ("rollout", "{run}", "--ray-address", "127.0.0.1:1"),
]


@pytest.mark.parametrize("command", RESUMES, ids=" ".join)
def test_second_launch_of_a_live_run_is_refused_and_changes_no_file(
    run: RunDirectory, live: subprocess.Popen[str], command: tuple[str, ...]
) -> None:
    before = contents(run)
    result = CliRunner().invoke(app, [word.format(run=run.path) for word in command])
    assert isinstance(result.exception, UserError), result.output
    assert str(result.exception).startswith(
        f"{run.path} is in use by process {live.pid} on host {os.uname().nodename} "
        "(megatron-async train, started "
    )
    assert contents(run) == before


@pytest.mark.parametrize("command", ["report", "trajectories"])
def test_read_only_command_changes_no_file_of_a_live_run(
    run: RunDirectory, live: subprocess.Popen[str], command: str
) -> None:
    """The config.yaml stays unchanged even if this version of the program would have written it
    differently."""
    run.config_file.write_text(run.config_file.read_text() + "# by another version\n")
    before = contents(run)
    result = CliRunner().invoke(app, [command, str(run.path)])
    assert result.exit_code == 0, result.output
    created = ("sqlite-", "report.html")
    after = {n: data for n, data in contents(run).items() if not any(part in n for part in created)}
    assert after == before


def test_run_lock_is_free_after_its_holder_was_killed(run: RunDirectory) -> None:
    process = hold(run)
    with pytest.raises(RunInUse), hold_run_lock(run, "a test"):
        pass
    process.kill()
    process.wait(30)
    with hold_run_lock(run, "a test"):
        pass


def test_hold_run_lock_removes_temporary_files_of_killed_processes(run: RunDirectory) -> None:
    temporary = run.path / ".store.json.0f3a9c21.tmp"
    user_file = run.path / ".mine"
    for file in (temporary, user_file):
        file.write_text("half")
    with hold_run_lock(run, "test"):
        assert user_file.exists() and not temporary.exists()


def test_run_in_use_error_has_a_remedy_when_the_holder_host_may_be_down(
    run: RunDirectory, live: subprocess.Popen[str]
) -> None:
    elsewhere = replace(Holder.this_process("session 7.0"), host="node7", pid=12)
    run.lock_file.write_text(json.dumps(asdict(elsewhere)))
    with (
        pytest.raises(
            RunInUse, match=r"process 12 on host node7 .* if host node7 is down for good"
        ),
        hold_run_lock(run, "a test"),
    ):
        pass


def test_run_lock_needs_a_live_holder_when_file_locks_are_unsupported(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    holder = Holder.this_process("another run")
    run.lock_file.write_text(json.dumps(asdict(holder)))
    with pytest.raises(RunInUse, match="another run"), hold_run_lock(run, "a test"):
        pass
    with pytest.raises(RunInUse, match="another run"):
        check_unclaimed(run)
    run.lock_file.write_text(json.dumps(asdict(replace(holder, started=holder.started - 1.0))))
    check_unclaimed(run)
    with hold_run_lock(run, "a test"):
        assert "cannot be locked (Function not implemented)" in caplog.text
    assert not run.lock_file.exists()


def test_new_run_leaves_no_file_when_its_directory_cannot_be_created(
    config: RunConfig, tmp_path: Path
) -> None:
    new = config.model_copy(update={"root": str(tmp_path / "file")})
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"), new_run(new, "t"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestSessions:
    """Tests that the first rollout node of a launch takes the run lock for its session."""

    @staticmethod
    def start_rollout_node(run: RunDirectory, session: str) -> int:
        arguments = ["rollout", str(run.path), "--index", "0", "--count", "1"]
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            return node_module.main([*arguments, "--session", session])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_first_session_stays_current_when_a_second_launch_is_refused(
        self, run: RunDirectory, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = Session.join(run, "70.0")
        first.begin()
        process = hold(run, "70.0")
        try:
            assert self.start_rollout_node(run, "71.0") == 2
        finally:
            process.kill()
            process.wait(30)
        assert f"is in use by process {process.pid} on host " in capsys.readouterr().err
        assert first.is_current() and not first.closed()
        assert Session.join(run, "71.0").closed(), (
            "trainer nodes of the refused launch must not wait for it"
        )

    def test_requeued_job_takes_the_lock_when_the_superseded_process_ends(
        self,
        run: RunDirectory,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Processes of the lost node see the newer session and end. Here, the process that holds
        the lock does so."""
        first = Session.join(run, "70.0")
        first.begin()
        process = hold(run, "70.0")

        def stop_after_lock(*_: object) -> None:
            raise UserError("the lock is held")

        def end_when_superseded() -> None:
            while first.is_current():
                time.sleep(0.02)
            process.kill()

        monkeypatch.setattr(node_module, "check_probe_tolerance", stop_after_lock)
        lost_node = threading.Thread(target=end_when_superseded, daemon=True)
        lost_node.start()
        assert self.start_rollout_node(run, "70.1") == 2
        assert "the lock is held" in capsys.readouterr().err
        process.wait(30)
        with hold_run_lock(run, "a test"):
            pass

    def test_session_follows_only_earlier_restarts_of_the_same_job(self, run: RunDirectory) -> None:
        session = Session.join(run, "70.2")
        assert session.follows("70.0") and session.follows("70.1")
        for other in ("70.2", "70.3", "71.0", "70", "", "monday", "70.x"):
            assert not session.follows(other), other
        assert not Session.join(run, "monday").follows("sunday")


class TestDisk:
    """Tests launches with a run directory on a disk that is full or read-only."""

    @staticmethod
    def files(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    @pytest.mark.parametrize("command", ["train", "sft", "launch"])
    def test_new_run_is_refused_and_leaves_no_file_when_the_disk_is_full(
        self, config: RunConfig, disk: SmallDisk, tmp_path: Path, command: str
    ) -> None:
        settings = tmp_path / "c.yaml"
        settings.write_text(dump(config))
        words = [command, "--config", str(settings), f"root={disk.path}"]
        words += ["--out", str(tmp_path / "out")] if command == "sft" else []
        words += ["--gpus-per-node", "0"] if command == "launch" else []
        for leave in (0, 4096, 8192, 1 << 19):
            disk.fill(leave)
            result = CliRunner().invoke(app, words)
            assert isinstance(result.exception, UserError), result.output
            assert re.search(
                rf"{disk.path}/live\S* cannot be (written: No space left on device"
                rf"|made in {disk.path}: database or disk is full); free space"
                rf"|{disk.path}/live\S* has free space for .* GB of checkpoints",
                str(result.exception),
            )
            assert self.files(disk.path) == []
            disk.make_room()

    @pytest.mark.parametrize("words", RESUMES, ids=" ".join)
    def test_resume_is_refused_and_changes_no_file_when_disk_is_unwritable(
        self, config: RunConfig, disk: SmallDisk, words: tuple[str, ...]
    ) -> None:
        run = RunDirectory.create(config.model_copy(update={"root": str(disk.path)}))
        before = contents(run)
        command = [word.format(run=run.path) for word in words]
        disk.fill()
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError), result.output
        assert re.search(
            "cannot be written: No space left on device; free space|has free space for",
            str(result.exception),
        )
        disk.make_room()
        disk.read_only()
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError), result.output
        assert re.search(
            "cannot be written: Read-only file system; mount|has free space for",
            str(result.exception),
        )
        assert {name: data for name, data in contents(run).items() if name != "run.lock"} == before

    def test_failed_rank_keeps_its_exit_code_when_its_cause_cannot_be_written(
        self, config: RunConfig, disk: SmallDisk, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The process that started the rank then reports the failure of the disk."""

        def fails() -> None:
            raise ComponentFailure("the cause")

        run = RunDirectory.create(config.model_copy(update={"root": str(disk.path)}))
        assert exit_code(run, fails) == 1
        with pytest.raises(ComponentFailure, match=r"^the cause; the log is"):
            run.raise_failure(run.logs / "trainer.log")
        disk.fill()
        assert exit_code(run, fails) == 1
        assert capsys.readouterr().err == "error: the cause\n"
        with pytest.raises(CannotWrite, match=f"^{run.path} cannot be written: No space left on"):
            run.raise_failure(run.logs / "trainer.log")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_session_wait_fails_when_it_times_out_or_the_session_is_closed(
    directory: RunDirectory,
) -> None:
    session = Session.join(directory, "7.0")
    with pytest.raises(ComponentFailure, match=r"waited 0 s for ray of session 7\.0"):
        session.wait_for("ray", 0.1)
    session.close()
    started = time.monotonic()
    with pytest.raises(ComponentFailure, match="was closed before ray had started"):
        session.wait_for("ray", 60)
    assert time.monotonic() - started < 5


def test_session_token_is_private_and_new_for_each_session(directory: RunDirectory) -> None:
    first, second = Session.join(directory, "a"), Session.join(directory, "b")
    first.begin()
    second.begin()
    assert stat.S_IMODE(first.token_file.stat().st_mode) == 0o600
    assert first.token_file.read_text() != second.token_file.read_text()


def test_session_refuses_invalid_and_used_names(directory: RunDirectory) -> None:
    for name in ("", "../x", ".hidden"):
        with pytest.raises(UserError, match="--session"):
            Session.join(directory, name)
    used = Session.join(directory, "a")
    used.close()
    with pytest.raises(UserError, match="is 'a', which an earlier launch"):
        used.begin()


def test_node_refuses_to_join_a_closed_session(directory: RunDirectory) -> None:
    session = Session.join(directory, "monday")
    session.begin()
    assert Session.begun(directory, "monday", 1.0).path == session.path
    session.close()
    with pytest.raises(ComponentFailure, match=r"'monday' is closed: an earlier launch"):
        Session.begun(directory, "monday", 60.0)
