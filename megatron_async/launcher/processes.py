"""Child processes of a run: started in a session of their own, ended within a limit, no leftovers.

Invariants
- A child dies with its parent, even when the parent is killed (Linux parent-death signal).
- `stop` first asks (SIGTERM), then kills; it touches only the child's own session.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_async.engines.nodes import RENDEZVOUS_VARIABLE
from megatron_async.errors import ComponentFailure, cause_in_log, how_ended
from megatron_async.files.disk import writing
from megatron_async.files.own_directory import own_directory, temporary_files
from megatron_async.runtime.child_process import module_command, start_child
from megatron_async.runtime.prctl import PDEATHSIG, prctl


def _prepare_child() -> None:
    """Ask the kernel for SIGTERM when the parent process ends, and ignore SIGUSR2."""
    if sys.platform == "linux":
        prctl(PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class Child:
    """A process with its output in a log file.

    SIGUSR2 asks a run to stop (`train_loop/stop.py`). A process that does not handle it must not
    die of it, so a child starts with it ignored, and so do its own children.
    """

    def __init__(
        self, command: Sequence[str], log_file: Path, extra_env: Mapping[str, str] | None = None
    ) -> None:
        self.log_file = log_file
        with writing(log_file):
            log = log_file.open("ab")
        with log:
            self._log_begins = log.tell()
            self._process = start_child(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(extra_env or {})},
                preexec_fn=_prepare_child,
            )

    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit code, or None when it still runs after the limit."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self, seconds: float) -> None:
        """SIGTERM to the process alone, for one that ends its own children in order.

        Waits for its end within the limit; `stop` then clears what is left.
        """
        self._process.terminate()
        self.wait(seconds)

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End the whole session of the child."""
        try:
            self._signal(signal.SIGTERM, grace_seconds)
        finally:  # also of an interrupt that comes while it ends
            self._signal(signal.SIGKILL, 5.0)

    def _signal(self, number: signal.Signals, seconds: float) -> None:
        """Signal the session; wait for the end of the child, which grandchildren may outlive."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            self.wait(seconds)

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines that the process wrote."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def failure(self, what: str) -> ComponentFailure:
        """Explain the end of a child that has left no sentence by what its log shows."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_begins)
            cause = cause_in_log(log.read().decode(errors="replace"))
        if cause is not None:
            return ComponentFailure(f"{what} failed: {cause}; its log is {self.log_file}")
        code = self.exit_code()
        if code is not None and code < 0:
            return ComponentFailure(f"{what} {how_ended(code)}; its log is {self.log_file}")
        return ComponentFailure(
            f"{what} ended with exit code {self.exit_code()}, and its log shows no error; the end "
            f"of {self.log_file}:\n{self.log_tail()}"
        )


@contextmanager
def torchrun(
    ranks: int,
    module: str,
    *arguments: str,
    log_file: Path,
    environment: Mapping[str, str],
    max_restarts: int = 0,
    rendezvous: Sequence[str] | None = None,
) -> Iterator[Child]:
    """`torchrun` of this interpreter for this machine's ranks, ended with the block.

    `environment`: from `launcher.environment.trainer_environment`. `rendezvous`: the options by
    which it finds the agents of other machines (`launcher/session.py`). Without, its ranks meet by
    files: stores of torch would listen on every interface, to anybody.
    """
    with own_directory() as place:
        added = temporary_files(place, {**os.environ, **environment})
        environment = {**environment, **added}
        if rendezvous is None:
            environment = {**environment, RENDEZVOUS_VARIABLE: str(place)}
            rendezvous = (
                "--rdzv-backend=c10d",
                "--rdzv-id=run",
                "--local-addr=127.0.0.1",
                f"--rdzv-endpoint={place}/agent",
                "--rdzv-conf=store_type=file",
            )
        command = [
            *module_command("torch.distributed.run", *rendezvous),
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}",
            f"--log-dir={place}",
            "-m",
            module,
            *arguments,
        ]
        child = Child(command, log_file, environment)
        try:
            yield child
        finally:
            child.stop()
