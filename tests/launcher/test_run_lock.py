"""A run belongs to one launch: others are refused before they change anything, by who has it.

Roles of a session find each other by files, within a time limit, and only the newest one runs.
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
    root = tmp_path_factory.mktemp("claim")
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
    """A launch in a process of its own, which has the run until it is killed."""
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
def test_a_second_launch_of_a_live_run_changes_nothing_and_names_the_first(
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
def test_commands_that_only_read_leave_a_live_run_alone(
    run: RunDirectory, live: subprocess.Popen[str], command: str
) -> None:
    """Whatever another version of the program would have written into config.yaml."""
    run.config_file.write_text(run.config_file.read_text() + "# by another version\n")
    before = contents(run)
    result = CliRunner().invoke(app, [command, str(run.path)])
    assert result.exit_code == 0, result.output
    made = ("sqlite-", "report.html")
    after = {n: data for n, data in contents(run).items() if not any(part in n for part in made)}
    assert after == before


def test_a_killed_launch_leaves_the_run_free(run: RunDirectory) -> None:
    process = hold(run)
    with pytest.raises(RunInUse), hold_run_lock(run, "a test"):
        pass
    process.kill()
    process.wait(30)
    with hold_run_lock(run, "a test"):
        pass


def test_claimed_removes_temporary_files_of_killed_processes(run: RunDirectory) -> None:
    left = run.path / ".store.json.0f3a9c21.tmp"
    other = run.path / ".mine"
    for file in (left, other):
        file.write_text("half")
    with hold_run_lock(run, "test"):
        assert other.exists() and not left.exists()


def test_a_holder_on_another_host_that_may_be_down_for_good_has_a_remedy(
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


def test_without_locks_a_living_process_of_this_host_counts_and_a_dead_one_does_not(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    me = Holder.this_process("another run")
    run.lock_file.write_text(json.dumps(asdict(me)))
    with pytest.raises(RunInUse, match="another run"), hold_run_lock(run, "a test"):
        pass
    with pytest.raises(RunInUse, match="another run"):
        check_unclaimed(run)
    run.lock_file.write_text(json.dumps(asdict(replace(me, started=me.started - 1.0))))
    check_unclaimed(run)
    with hold_run_lock(run, "a test"):
        assert "cannot be locked (Function not implemented)" in caplog.text
    assert not run.lock_file.exists()


def test_a_new_run_that_cannot_be_made_leaves_nothing(config: RunConfig, tmp_path: Path) -> None:
    taken = config.model_copy(update={"root": str(tmp_path / "file")})
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"), new_run(taken, "t"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestSessions:
    """The first rollout node of a launch takes the run for its session."""

    @staticmethod
    def take(run: RunDirectory, session: str) -> int:
        arguments = ["rollout", str(run.path), "--index", "0", "--count", "1"]
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            return node_module.main([*arguments, "--session", session])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_a_second_launch_is_refused_and_the_first_stays_the_current_one(
        self, run: RunDirectory, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = Session.join(run, "70.0")
        first.begin()
        process = hold(run, "70.0")
        try:
            assert self.take(run, "71.0") == 2
        finally:
            process.kill()
            process.wait(30)
        assert f"is in use by process {process.pid} on host " in capsys.readouterr().err
        assert first.is_current() and not first.closed()
        assert Session.join(run, "71.0").closed(), "its trainer nodes must not wait for it"

    def test_a_requeued_job_takes_over_from_what_a_lost_node_left_running(
        self,
        run: RunDirectory,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """What is left sees the newer session and ends; here: the process that has the lock."""
        first = Session.join(run, "70.0")
        first.begin()
        process = hold(run, "70.0")

        def has_the_run(*_: object) -> None:
            raise UserError("far enough")

        def end_when_superseded() -> None:
            while first.is_current():
                time.sleep(0.02)
            process.kill()

        monkeypatch.setattr(node_module, "check_probe_tolerance", has_the_run)
        left_running = threading.Thread(target=end_when_superseded, daemon=True)
        left_running.start()
        assert self.take(run, "70.1") == 2
        assert "far enough" in capsys.readouterr().err
        process.wait(30)
        with hold_run_lock(run, "a test"):
            pass

    def test_which_sessions_follow_each_other(self, run: RunDirectory) -> None:
        session = Session.join(run, "70.2")
        assert session.follows("70.0") and session.follows("70.1")
        for other in ("70.2", "70.3", "71.0", "70", "", "monday", "70.x"):
            assert not session.follows(other), other
        assert not Session.join(run, "monday").follows("sunday")


class TestDisk:
    """A run directory on a disk that is full, or read-only."""

    @staticmethod
    def files(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    @pytest.mark.parametrize("command", ["train", "sft", "launch"])
    def test_a_new_run_on_a_full_disk_is_a_sentence_and_leaves_nothing(
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
    def test_going_on_with_a_run_is_a_sentence_and_changes_nothing(
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

    def test_a_rank_that_cannot_leave_its_sentence_keeps_its_exit_code(
        self, config: RunConfig, disk: SmallDisk, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The process that started it then reports what is wrong with the disk."""

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


def test_waiting_ends_with_what_was_waited_for(directory: RunDirectory) -> None:
    session = Session.join(directory, "7.0")
    with pytest.raises(ComponentFailure, match=r"waited 0 s for ray of session 7\.0"):
        session.wait_for("ray", 0.1)
    session.close()
    began = time.monotonic()
    with pytest.raises(ComponentFailure, match="was closed before ray had started"):
        session.wait_for("ray", 60)
    assert time.monotonic() - began < 5


def test_the_token_is_the_users_own_and_new_each_time(directory: RunDirectory) -> None:
    first, second = Session.join(directory, "a"), Session.join(directory, "b")
    first.begin()
    second.begin()
    assert stat.S_IMODE(first.token_file.stat().st_mode) == 0o600
    assert first.token_file.read_text() != second.token_file.read_text()


def test_names_that_are_refused(directory: RunDirectory) -> None:
    for name in ("", "../x", ".hidden"):
        with pytest.raises(UserError, match="--session"):
            Session.join(directory, name)
    used = Session.join(directory, "a")
    used.close()
    with pytest.raises(UserError, match="is 'a', which an earlier launch"):
        used.begin()


def test_a_node_does_not_take_up_a_session_that_is_over(directory: RunDirectory) -> None:
    session = Session.join(directory, "monday")
    session.begin()
    assert Session.begun(directory, "monday", 1.0).path == session.path
    session.close()
    with pytest.raises(ComponentFailure, match=r"'monday' is closed: an earlier launch"):
        Session.begun(directory, "monday", 60.0)
