"""Tests that child processes end with their descendants and starter, and import no user file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_async.errors import UserError
from megatron_async.process_backends.child_process import ChildProcess, module_command
from megatron_async.runtime.import_path import load_object

FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True); time.sleep(60)\n"
)
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(60)"
)


def wait_for(condition, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_child_end_kills_grandchildren(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", FAMILY], log=tmp_path / "log")
    assert wait_for(lambda: child.output().strip().isdigit())
    grandchild = int(child.output())
    child.end(5)
    assert child.poll() is not None
    assert wait_for(lambda: has_ended(grandchild))


def test_child_end_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", IGNORES_SIGTERM], log=tmp_path / "log")
    assert wait_for(lambda: "ready" in child.output())
    child.end(0.3)
    assert child.poll() == -signal.SIGKILL


def test_child_is_killed_when_an_interrupt_comes_during_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, the process continues after an interrupt."""
    child = ChildProcess([sys.executable, "-c", IGNORES_SIGTERM], log=tmp_path / "log")
    assert wait_for(lambda: "ready" in child.output())
    whole, interrupts = child.ended_within, [KeyboardInterrupt()]

    def ended_within(seconds: float) -> bool:
        if interrupts:
            raise interrupts.pop()
        return whole(seconds)

    monkeypatch.setattr(child, "ended_within", ended_within)
    with pytest.raises(KeyboardInterrupt):
        child.end()
    assert child.poll() == -signal.SIGKILL


def test_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "import signal; from megatron_async.process_backends.child_process import *\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = ChildProcess(command, preexec_fn=after_fork(signal.SIGTERM))\n"
        "print(flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    [child] = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    assert wait_for(lambda: has_ended(child.pid))


def test_child_failure_has_the_exit_code_and_the_last_lines_of_the_log(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such layer')"]
    child = ChildProcess(command, log=tmp_path / "log")
    assert child.wait(30) == 1
    sentence = str(child.failure("the trainer"))
    assert sentence.startswith("the trainer ended with exit code 1; the end of its log (")
    assert sentence.endswith("no such layer")


def test_child_failure_names_the_cause_of_this_start_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("before", "now"):
        child = ChildProcess([sys.executable, "-c", f"raise ValueError('{word}')"], log=log)
        assert child.wait(30) == 1
    why = f"ValueError: now; its log is {log}"
    assert str(child.failure("sft")) == f"sft ended with exit code 1: {why}"


def test_child_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('of the user')")
    (tmp_path / "own.py").write_text("")
    ran = ChildProcess(
        [*module_command("json.tool"), "--help"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    assert ran.wait(30) == 0
    own = ChildProcess(module_command("own"), cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert own.wait(30) == 1, "no module of the working directory can be run by its name"


def test_grandchild_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('of the user')")
    code = (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    raise SystemExit(child.exitcode)\n"
    )
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "-P", "program.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0


def test_user_file_can_import_its_neighbors_but_not_replace_other_modules(tmp_path: Path) -> None:
    (tmp_path / "my_neighbor_module.py").write_text("VALUE = 7")
    (tmp_path / "textwrap.py").write_text("raise RuntimeError('of the user')")
    file = tmp_path / "mine.py"
    file.write_text("import textwrap\nfrom my_neighbor_module import VALUE\n")
    before = [*sys.path]
    try:
        assert load_object(f"{file}:VALUE", "reward") == 7
    finally:
        sys.path[:] = before
        sys.modules.pop("my_neighbor_module", None)


def test_load_error_names_the_file_when_a_module_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("score = len")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    with pytest.raises(UserError, match=r"no module 'mine' on the Python path; name the file, as"):
        load_object("mine:score", "reward")
