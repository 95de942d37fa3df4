"""Child processes: ended with everything they started, also when the parent is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_async.launcher.processes import Child

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


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stop_ends_grandchildren_too(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", FAMILY], tmp_path / "log")
    assert wait_for(lambda: child.log_tail().strip().isdigit())
    grandchild = int(child.log_tail())
    child.stop(grace_seconds=5)
    assert child.exit_code() is not None
    assert wait_for(lambda: gone(grandchild))


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", IGNORES_SIGTERM], tmp_path / "log")
    assert wait_for(lambda: "ready" in child.log_tail())
    child.stop(grace_seconds=0.3)
    assert child.exit_code() == -signal.SIGKILL


def test_an_interrupt_while_a_child_ends_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose process goes on."""
    child = Child([sys.executable, "-c", IGNORES_SIGTERM], tmp_path / "log")
    assert wait_for(lambda: "ready" in child.log_tail())
    whole, interrupts = child.wait, [KeyboardInterrupt()]

    def wait(seconds: float) -> int | None:
        if interrupts:
            raise interrupts.pop()
        return whole(seconds)

    monkeypatch.setattr(child, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        child.stop()
    assert child.exit_code() == -signal.SIGKILL


def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from megatron_async.launcher.processes import Child\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        "Child([sys.executable, '-c', 'import time; time.sleep(60)'], log)\n"
        "print(flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    [child] = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    assert wait_for(lambda: gone(child.pid))


def test_a_child_that_ended_badly_is_reported_with_its_code_and_its_last_lines(
    tmp_path: Path,
) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit('no such layer')"], tmp_path / "log")
    assert child.wait(30) == 1
    sentence = str(child.failure("the trainer"))
    assert sentence.startswith("the trainer ended with exit code 1, and its log shows no error; ")
    assert sentence.endswith("no such layer")


def test_the_cause_is_that_of_this_start_and_has_the_logs_path(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("before", "now"):
        child = Child([sys.executable, "-c", f"raise ValueError('{word}')"], log)
        assert child.wait(30) == 1
    assert str(child.failure("sft")) == f"sft failed: ValueError: now; its log is {log}"
