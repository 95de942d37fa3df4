"""Child processes: started, explained and ended in one way, whatever runs in them.

Invariants
- A child imports nothing from the directory that the user works in: a file `random.py` or
  `tokenizers.py` there would replace a module of ours, of Python's or of a library's. Code of the
  user's is loaded by its path (`import_path`).
- A child leads a session of its own: Ctrl-C at a terminal reaches the process that started it only.
- A child ends with its starter, also when that is killed. A program of ours holds a lifeline: the
  read end of a pipe whose write end the starter has, so that the kernel closes it when the starter
  ends. Any other program gets a parent-death signal, which comes when the thread ends that started
  it.
- After `end` or `reap`, no process of the child's group is left.
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
"""Has the effect of `-P` on every Python below a process whose command we do not make."""
LIFELINE_VARIABLE: Final = "MEGATRON_ASYNC_LIFELINE_FD"
_KILL_SECONDS: Final = 10.0
TAIL_CHARACTERS: Final = 1500


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def after_fork(parent_death: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for a foreign program, which then gets this signal when we die.

    The program also ignores SIGUSR2, which asks a run to stop and must kill no process.
    """
    return partial(_prepare, parent_death)


def _prepare(parent_death: signal.Signals) -> None:
    prctl(PDEATHSIG, parent_death)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class ChildProcess(subprocess.Popen[bytes]):
    """A process with a session of its own; `subprocess.Popen` has the other methods."""

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
        """Start `command`. Raises OSError, and CannotWrite for the log.

        Args:
            log: File to which its output is appended; None: `options` say where that goes.
            lifeline: The program calls `hold_lifeline`.
            env: The whole environment of the program. None: the environment of this process.
            pass_fds: Descriptors that stay open in it.
            options: Others of `subprocess.Popen`.
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
        """Wait for its end, `seconds` at most; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return self.returncode is not None

    def end(self, grace_seconds: float = 10.0) -> None:
        """Ask the process to end, then kill the rest of its group. A second call does nothing.

        Raises ComponentFailure if something outlives SIGKILL.
        """
        if self._group_ended:
            return
        self._cut_lifeline()
        try:
            if self.poll() is None and grace_seconds:
                self.terminate()
                self.ended_within(grace_seconds)
        finally:  # also of an interrupt that comes while it ends
            kill_group(self.pid)
            self.ended_within(_KILL_SECONDS)
            left = []
            for member in psutil.process_iter():
                with suppress(ProcessLookupError, PermissionError):
                    if os.getpgid(member.pid) == self.pid:
                        left.append(member)
            if not wait_until_ended(left, _KILL_SECONDS):
                raise ComponentFailure(
                    f"processes that process {self.pid} has started outlived SIGKILL by "
                    f"{_KILL_SECONDS:g} seconds"
                )
            self._group_ended = True

    def reap(self) -> int:
        """Wait until the process ends, kill the rest of its group, and return the exit code."""
        # Unreaped, its number is no other group's; code of the user's may wait for any child.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self.pid)
        self._group_ended = True
        self._cut_lifeline()
        return self.wait()

    def output(self) -> str:
        """Return the output of the process, from its log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_begins)
            return file.read().decode(errors="replace")

    def why(self) -> str:
        """Return the second half of a sentence: the cause by the log, or the end of the log."""
        return self._why(self.output())

    def _why(self, text: str) -> str:
        cause = cause_in_log(text)
        if cause is not None:
            return f": {cause}; its log is {self.log}"
        tail = text[-TAIL_CHARACTERS:]
        if tail != text:
            tail = tail.partition("\n")[2] or tail  # from a line's start
        return f"; the end of its log ({self.log}):\n{tail.strip()}"

    def failure(self, what: str) -> ComponentFailure:
        """Return an error that explains how the process ended. `what` is its name in a sentence."""
        code, text = self.poll(), self.output()
        ended = "failed" if code is None else describe_exit(code)
        if code is not None and code < 0 and cause_in_log(text) is None:
            return ComponentFailure(f"{what} {ended}; its log is {self.log}")
        return ComponentFailure(f"{what} {ended}{self._why(text)}")

    def _cut_lifeline(self) -> None:
        """Let a program that holds the lifeline end."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)


def kill_group(leader: int) -> None:
    """Kill the process group of a child."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until killed processes have ended; return whether all did within the time limit.

    They need not be children of this process. A zombie counts as ended, because process 1 of a
    container may never reap it.
    """
    deadline = time.monotonic() + seconds
    left = [*processes]
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------ in the child


def hold_lifeline(last_act: Callable[[], None] = lambda: None) -> None:
    """End this process group when its starter has ended, if the starter left a pipe for that.

    `last_act` is called first. Programs that this process starts do not inherit the pipe.
    """
    text = os.environ.pop(LIFELINE_VARIABLE, "")
    if text:
        os.set_inheritable(int(text), False)
        _end_when_ready(int(text), last_act)


def follow_parent() -> None:
    """End this process group when the parent process ends."""
    parent = os.getppid()
    ended = os.pidfd_open(parent)
    if os.getppid() != parent:  # it has ended before the call, and its number may be another's
        os.killpg(os.getpgrp(), signal.SIGKILL)
    _end_when_ready(ended)


def _end_when_ready(descriptor: int, last_act: Callable[[], None] = lambda: None) -> None:
    def wait() -> None:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)
        ends.poll()  # nothing is ever written: it is ready at the end
        try:
            last_act()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    prctl(PDEATHSIG, signal.SIGCONT)  # wakes a process that is stopped
    threading.Thread(target=wait, name="lifeline", daemon=True).start()
