"""Programs run under limits, and apart from everything else where the system lets it.

Invariants
- `run` returns within the limit it is given (and the seconds that ending processes takes), and
  leaves no process and no file behind.
- What the program prints is cut at `OUTPUT_BYTES`: more ends it.
- Whether namespaces are to be had is tried once, when the sandbox is made, by running a program.
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
_END_SECONDS: Final = 10.0  # for the launcher to end what runs, on a busy machine
_PROBE_SECONDS: Final = 20.0
_PIECE_BYTES: Final = 1 << 16
# What a program may print. A grader prints a score; a program that prints more runs away.
OUTPUT_BYTES: Final = 64 << 10
Cause = Literal["", "seconds", "memory", "output", "processes"]


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known of the program."""


@dataclass(frozen=True)
class Outcome:
    """End of a program: by itself (`exit_code`, 128 + n for signal n), or by a limit."""

    exit_code: int | None
    exceeded: Cause
    output: str
    errors: str
    seconds: float


class Sandbox:
    """Runs programs, one at a time for each caller. Raises UserError where it must not start."""

    def __init__(self, config: SandboxConfig) -> None:
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
            "reach the network, and read what "
            f"{'everyone' if self._other_user else 'the user of this process'} can read"
        )
        if config.required:
            raise UserError(
                f"scoring.sandbox.required is true, and {self.missing}; allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "
                "or set it to false"
            )

    def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        seconds: float,
        stdin: str = "",
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        apart: bool = True,
    ) -> Outcome:
        """Run `command` in a directory that holds `files`. Raises SandboxError.

        `apart=False`: it is trusted, and keeps this user, the network and all files.
        """
        spec = {
            "command": [*command],
            "files": {**files},
            "seconds": seconds,
            "namespaces": self._namespaces and apart,
            "other_user": self._other_user and apart,
            "apart": apart,
            "readable": [*_python(), *self._config.readable, *readable],
            "environment": {**(environment or {})},
            "path": os.environ.get("PATH", os.defpath),
            **self._config.model_dump(include={"memory_mib", "disk_mib", "processes"}),
        }
        began = time.monotonic()
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as described,
            tempfile.TemporaryFile() as reported,
        ):
            for file, text in ((given, stdin), (described, json.dumps(spec))):
                file.write(text.encode())
                file.seek(0)
            fds = (described.fileno(), reported.fileno())
            launcher = ChildProcess(
                [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, fds)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
            )
            with launcher:
                texts, cause = self._read(launcher, began + seconds + _END_SECONDS)
            reported.seek(0)
            report = json.loads(reported.read() or "{}")
        if not cause and not {"exit_code", "exceeded"} & report.keys():
            raise SandboxError(report.get("error") or f"the launcher ended: {texts[1].strip()}")
        return Outcome(
            None if cause else report.get("exit_code"),
            cause or report.get("exceeded", ""),
            *texts,
            seconds=time.monotonic() - began,
        )

    def _read(self, launcher: ChildProcess, deadline: float) -> tuple[tuple[str, str], Cause]:
        """Read what it prints until it ends; end it for too much of that, or at the deadline."""
        assert launcher.stdout is not None and launcher.stderr is not None
        found = (bytearray(), bytearray())
        left = OUTPUT_BYTES
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
                    key.data.extend(piece[:left])
                    if len(piece) > left:
                        cause = "output"
                    left -= min(left, len(piece))
                    if not piece:
                        selector.unregister(key.fileobj)
        if cause:
            launcher.terminate()  # it ends what it started
            deadline = time.monotonic() + _END_SECONDS
        if not launcher.ended_within(max(0.0, deadline - time.monotonic())):
            launcher.kill()
            cause = cause or "seconds"
        output, errors = (text.decode(errors="replace") for text in found)
        return (output, errors), cause

    def _problem(self) -> str:
        """Reason why a first program cannot run as things are set; empty when it can."""
        try:
            outcome = self.run([sys.executable, "-I", "-S", "-c", ""], {}, _PROBE_SECONDS)
        except SandboxError as error:
            return str(error)
        if outcome.exit_code == 0:
            return ""
        return f"a first program ended with {outcome.exit_code}: {outcome.errors.strip()[-200:]}"


def _python() -> list[str]:
    """Directories that this interpreter needs to run."""
    return list(dict.fromkeys([sys.prefix, sys.base_prefix, str(Path(sys.executable).parent)]))
