"""Starts and ends child processes of every kind, and explains how they ended.

Invariants
- A child imports nothing from the working directory: a file `random.py` or `tokenizers.py` there
  would replace a module of this project, of Python or of a library. The user's code is loaded by
  its path (`import_path`).
- A child has a separate session, so Ctrl-C at a terminal reaches only the process that started it.
- A child ends when its starter ends, also if the starter is killed. A program of this project holds
  a lifeline: the read end of a pipe whose write end the starter has, which the kernel closes when
  the starter ends. Any other program gets a parent-death signal, which the kernel sends when the
  thread that started the program ends.
- After `end` or `reap`, no process of the child's process group exists.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from megatron_async.errors import ComponentFailure, cause_in_log, describe_exit
from megatron_async.files.disk import writing
from megatron_async.runtime.prctl import PDEATHSIG, prctl

SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"
"""Environment variable that acts as Python's option `-P`, also in the child processes of a program
whose command line this project does not create."""
LIFELINE_VARIABLE: Final = "MEGATRON_ASYNC_LIFELINE_FD"
_KILL_SECONDS: Final = 10.0
TAIL_CHARACTERS: Final = 1500


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this Python interpreter.

    The module imports nothing from the working directory (option `-P`).
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def after_fork(parent_death: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` by which a child gets the signal `parent_death` when its parent ends.

    The parent in this sense is the thread that started the child. The function is meant for
    programs of other projects, which cannot watch a lifeline (see the module). The child also
    ignores SIGUSR2, which requests that a run stop and must not kill any process.
    """
    return partial(_prepare, parent_death)


def _prepare(parent_death: signal.Signals) -> None:
    prctl(PDEATHSIG, parent_death)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class ChildProcess(subprocess.Popen[bytes]):
    """A child process in a separate session, optionally with a log and a lifeline.
    A lifeline is a pipe by which the child notices that the process that started it has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        lifeline: bool = False,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Start `command` as a child process.

        Args:
            command: Program and its arguments.
            log: File to which the child's output is appended; None if `options` direct the output.
            lifeline: Whether to give the child a lifeline; its program must call `hold_lifeline`.
            env: Whole environment of the child; None for the environment of this process.
            pass_fds: File descriptors that stay open in the child.
            options: Other arguments of `subprocess.Popen`.

        Raises:
            OSError: The program cannot be started.
            CannotWrite: The log cannot be written.
        """
        environment = dict(os.environ if env is None else env)
        self.log = Path(os.devnull) if log is None else log
        self._log_begins = 0
        self._lifeline: int | None = None
        self._group_ended = False
        with ExitStack() as opened:
            if lifeline:
                read_end, self._lifeline = os.pipe()
                opened.callback(os.close, read_end)
                environment[LIFELINE_VARIABLE] = str(read_end)
                pass_fds = (*pass_fds, read_end)
            try:
                if log is not None:
                    with writing(log):
                        file = opened.enter_context(log.open("ab"))
                    self._log_begins = file.tell()
                    options |= {"stdout": file, "stderr": subprocess.STDOUT}
                super().__init__(
                    [*command],
                    env=environment,
                    pass_fds=pass_fds,
                    start_new_session=True,
                    **options,
                )
            except BaseException:
                self._cut_lifeline()
                raise

    def ended_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return self.returncode is not None

    def end(self, grace_seconds: float = 10.0) -> None:
        """Send the process SIGTERM, wait up to `grace_seconds`, then kill its process group.

        Do nothing if the group has ended already.

        Raises:
            ComponentFailure: A process of the group still exists after SIGKILL.
        """
        if self._group_ended:
            return
        self._cut_lifeline()
        try:
            if self.poll() is None and grace_seconds:
                self.terminate()
                self.ended_within(grace_seconds)
        finally:  # The group is killed also if an interrupt ends the wait.
            kill_group(self.pid)
            self.ended_within(_KILL_SECONDS)
            remaining = []
            for member in psutil.process_iter():
                with suppress(ProcessLookupError, PermissionError):
                    if os.getpgid(member.pid) == self.pid:
                        remaining.append(member)
            if not wait_until_ended(remaining, _KILL_SECONDS):
                raise ComponentFailure(
                    f"processes that process {self.pid} started still exist "
                    f"{_KILL_SECONDS:g} seconds after SIGKILL"
                )
            self._group_ended = True

    def reap(self) -> int:
        """Wait until the process ends, kill the rest of its group, and return the exit code."""
        # The ended process is left unreaped until its group is killed, so that no other group can
        # get its number. ChildProcessError: the user's code may have reaped all children.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self.pid)
        self._group_ended = True
        self._cut_lifeline()
        return self.wait()

    def output(self) -> str:
        """Return what this process has written to its log; empty if there is no log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_begins)
            return file.read().decode(errors="replace")

    def why(self) -> str:
        """Return why the process ended, as the end of a message that says that it ended.

        The result is the cause that `cause_in_log` finds in the log, or else the log's last lines.
        The path of the log is added.
        """
        return self._why(self.output())

    def _why(self, text: str) -> str:
        """Return why the process ended, as the end of a message that says that it ended.

        The result is the cause that `cause_in_log` finds in the process's output `text`, or else
        the last lines of `text`. The path of the log is added.
        """
        cause = cause_in_log(text)
        if cause is not None:
            return f": {cause}; its log is {self.log}"
        tail = text[-TAIL_CHARACTERS:]
        if tail != text:
            tail = tail.partition("\n")[2] or tail  # Start at the beginning of a line.
        return f"; the end of its log ({self.log}):\n{tail.strip()}"

    def failure(self, what: str) -> ComponentFailure:
        """Return an error that says how and why the process ended; it calls the process `what`."""
        code, text = self.poll(), self.output()
        ended = "failed" if code is None else describe_exit(code)
        if code is not None and code < 0 and cause_in_log(text) is None:
            return ComponentFailure(f"{what} {ended}; its log is {self.log}")
        return ComponentFailure(f"{what} {ended}{self._why(text)}")

    def _cut_lifeline(self) -> None:
        """Close this process's end of the lifeline; a child that holds the other end then ends."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)


def kill_group(leader: int) -> None:
    """Send SIGKILL to the process group of the child with process ID `leader`, if it exists."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait up to `seconds` until the killed `processes` have ended; return whether all have ended.

    The processes need not be children of this process. A zombie counts as ended, because process 1
    of a container, which inherits orphans, may never reap it.
    """
    deadline = time.monotonic() + seconds
    running = [*processes]
    while (running := [each for each in running if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not running


def _runs(process: psutil.Process) -> bool:
    """Return whether `process` exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------ in the child


def hold_lifeline(last_act: Callable[[], None] = lambda: None) -> None:
    """Watch the lifeline, and kill this process's group once the process that started it ends.

    The environment variable `LIFELINE_VARIABLE` has the pipe's descriptor; without it, nothing
    happens. Programs that this process starts do not inherit the pipe. `last_act` is called before
    the kill.
    """
    text = os.environ.pop(LIFELINE_VARIABLE, "")
    if text:
        os.set_inheritable(int(text), False)
        _end_when_ready(int(text), last_act)


def follow_parent() -> None:
    """Kill this process's group once its parent process ends."""
    parent = os.getppid()
    ended = os.pidfd_open(parent)
    # If the parent ended before `pidfd_open`, that may have opened a new process with its number.
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    _end_when_ready(ended)


def _end_when_ready(descriptor: int, last_act: Callable[[], None] = lambda: None) -> None:
    """Start a thread that kills this process's group once `descriptor` becomes readable.

    `last_act` is called before the kill.
    """

    def wait() -> None:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)
        # The descriptor is a pidfd, or a pipe to which nothing is written. So it becomes readable
        # only when the other process ends.
        ends.poll()
        try:
            last_act()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    # If this process is stopped (SIGSTOP) when the parent ends, the kernel continues it, so that
    # the thread can run.
    prctl(PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=wait, name="lifeline", daemon=True).start()
