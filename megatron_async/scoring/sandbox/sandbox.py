"""Runs a program with limits, and isolated from the machine if the operating system permits it.

Isolation means Linux namespaces: the program sees no network, no other process and few files.

Invariants
- `run` returns within its time limit, plus the seconds that ending processes takes, and leaves no
  process and no file.
- A program that prints more than `OUTPUT_BYTES` is ended.
- Whether namespaces are available is tested once, when a `Sandbox` is created, by running a program
  in them.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatron_async.config.reward import SandboxConfig
from megatron_async.errors import UserError
from megatron_async.process_backends.child_process import ChildProcess

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
# Time limit in seconds for the launcher to end all processes, also on a busy machine.
_END_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 20.0
_PIECE_BYTES: Final = 1 << 16
OUTPUT_BYTES: Final = 64 << 10
"""Maximum output of a program. A grader prints only a score; more output is a runaway program."""
Cause = Literal["", "seconds", "memory", "output", "processes"]
"""The limit that a program exceeded; empty if it exceeded none."""


class SandboxError(RuntimeError):
    """Raised when the sandbox itself failed, so that the program may not have run at all."""


@dataclass(frozen=True)
class Outcome:
    """Result of running a program in the sandbox.

    Attributes:
        exit_code: The program's exit code, 128 + n if signal n ended it; None if it was ended
            because it exceeded a limit.
        exceeded: The limit that the program exceeded; empty if it ended by itself.
        output: Its standard output.
        errors: Its standard error.
        seconds: Time that the run took.
    """

    exit_code: int | None
    exceeded: Cause
    output: str
    errors: str
    seconds: float


class Sandbox:
    """Runs programs with limits and, if available, in Linux namespaces; each call blocks.

    Attributes:
        missing: Message about the isolation that is missing on this machine; empty if programs run
            in namespaces.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Test which isolation is available on this machine, by running programs.

        Raises:
            UserError: If `config.required` is true and namespaces are not available.
        """
        self._config = config
        root = os.geteuid() == 0
        self._namespaces, self._other_user = True, root
        self.missing = ""
        problem = self._problem()
        if not problem:
            return
        self._namespaces = False
        if root and self._problem():
            self._other_user = False
        self.missing = (
            f"programs in responses run without namespaces on this machine ({problem}): they can "
            "reach the network, and read every file that "
            f"{'all users' if self._other_user else 'the user of this process'} can read"
        )
        if config.required:
            raise UserError(
                f"scoring.sandbox.required is true, and {self.missing}. Allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "
                "or set scoring.sandbox.required to false."
            )

    def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        seconds: float,
        stdin: str = "",
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        isolated: bool = True,
    ) -> Outcome:
        """Run a program in a new temporary directory with `files`; return how it ended.

        Args:
            command: The program and its arguments.
            files: Names and contents of the files in the directory.
            seconds: Time limit.
            stdin: Text on the program's standard input.
            readable: Additional directories that the program may read.
            environment: Additional environment variables of the program.
            isolated: Whether to run the program isolated. If False, the program is trusted: it runs
                as this user with access to the network and all files; the limits still apply.

        Raises:
            SandboxError: If the sandbox itself failed.
        """
        spec = {
            "command": [*command],
            "files": {**files},
            "seconds": seconds,
            "namespaces": self._namespaces and isolated,
            "other_user": self._other_user and isolated,
            "apart": isolated,
            "readable": [*_python(), *self._config.readable, *readable],
            "environment": {**(environment or {})},
            "path": os.environ.get("PATH", os.defpath),
            **self._config.model_dump(include={"memory_mib", "disk_mib", "processes"}),
        }
        began = time.monotonic()
        with (
            tempfile.TemporaryFile() as stdin_file,
            tempfile.TemporaryFile() as spec_file,
            tempfile.TemporaryFile() as report_file,
        ):
            for file, text in ((stdin_file, stdin), (spec_file, json.dumps(spec))):
                file.write(text.encode())
                file.seek(0)
            fds = (spec_file.fileno(), report_file.fileno())
            launcher = ChildProcess(
                [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, fds)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
            )
            with launcher:
                texts, cause = self._read(launcher, began + seconds + _END_SECONDS)
            report_file.seek(0)
            report = json.loads(report_file.read() or "{}")
        if not cause and not {"exit_code", "exceeded"} & report.keys():
            raise SandboxError(
                report.get("error") or f"the launcher ended without a report: {texts[1].strip()}"
            )
        return Outcome(
            None if cause else report.get("exit_code"),
            cause or report.get("exceeded", ""),
            *texts,
            seconds=time.monotonic() - began,
        )

    def _read(self, launcher: ChildProcess, deadline: float) -> tuple[tuple[str, str], Cause]:
        """Read the program's output through the launcher until the launcher ends.

        At `deadline`, or if there is too much output, the launcher is made to end the program.

        Returns:
            The standard output and standard error, and the limit that was exceeded.
        """
        assert launcher.stdout is not None and launcher.stderr is not None
        found = (bytearray(), bytearray())
        output_budget = OUTPUT_BYTES
        cause: Cause = ""
        with selectors.DefaultSelector() as selector:
            selector.register(launcher.stdout, selectors.EVENT_READ, found[0])
            selector.register(launcher.stderr, selectors.EVENT_READ, found[1])
            while selector.get_map() and not cause:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    cause = "seconds"
                for key, _ in ready:
                    piece = os.read(key.fd, _PIECE_BYTES)
                    key.data.extend(piece[:output_budget])
                    if len(piece) > output_budget:
                        cause = "output"
                    output_budget -= min(output_budget, len(piece))
                    if not piece:
                        selector.unregister(key.fileobj)
        if cause:
            launcher.terminate()  # The launcher then kills the program and its processes.
            deadline = time.monotonic() + _END_SECONDS
        if not launcher.ended_within(max(0.0, deadline - time.monotonic())):
            launcher.kill()
            cause = cause or "seconds"
        output, errors = (text.decode(errors="replace") for text in found)
        return (output, errors), cause

    def _problem(self) -> str:
        """Run a trial program with the current isolation; return why it failed, empty if it ran."""
        try:
            outcome = self.run([sys.executable, "-I", "-S", "-c", ""], {}, _PROBE_SECONDS)
        except SandboxError as error:
            return str(error)
        if outcome.exit_code == 0:
            return ""
        return f"a trial program ended with {outcome.exit_code}: {outcome.errors.strip()[-200:]}"


def _python() -> list[str]:
    """Return the directories that this Python interpreter must read to run."""
    return list(dict.fromkeys([sys.prefix, sys.base_prefix, str(Path(sys.executable).parent)]))
