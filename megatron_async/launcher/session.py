"""Provides sessions. A session is one launch of a run over several nodes; its nodes communicate by
files.

A node has a role: it runs engines (rollout) or trainer ranks (trainer). The files are in the
directory `RUN_DIR/launch/NAME/`, on the file system that all nodes share. If a job is queued again,
its next launch is a new session of the same run.

The torchrun agents of the trainer nodes rendezvous at trainer node 0, on a port that this node
chooses.

Invariants
- An entry is a file with data of one node for the others. It is written atomically and never
  changes. A wait for an entry has a time limit; the error after it names the entry.
- The newest session owns the run. `is_current` becomes False for processes of an older session, so
  that processes left by a lost node end themselves.
- Only the user can read the session's Ray token.
"""

import json
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_async.engines.nodes import free_port
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import reason, writing
from megatron_async.run_directory import RunDirectory, write_atomically

_POLL_SECONDS = 0.2


def check_name(name: str) -> None:
    """Raise UserError if a session's name cannot be used as a file name."""
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"--session is {name!r}; it must be a plain file name, such as a job ID")


RENDEZVOUS_SECONDS: Final = 600.0
_RENDEZVOUS = "trainers"


@dataclass(frozen=True)
class Session:
    """One launch of a run over several nodes. `path` is the directory of the files by which the
    nodes communicate."""

    path: Path

    @classmethod
    def join(cls, directory: RunDirectory, name: str) -> "Session":
        """Create the session's directory if it does not exist, and return the session.

        Raises:
            UserError: The name cannot be used as a file name.
        """
        check_name(name)
        path = directory.path / "launch" / name
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def begun(cls, directory: RunDirectory, name: str, seconds: float) -> "Session":
        """Wait until another node has called `begin` for the session, and return it; write nothing.

        Raises:
            UserError: The name cannot be used as a file name.
            ComponentFailure: The session is already closed, or did not start within `seconds`.
        """
        check_name(name)
        session = cls(directory.path / "launch" / name)
        over = (
            f"session {name!r} is closed: an earlier launch of the run used this --session, or the "
            "first node has already ended"
        )
        late = f"session {name} of {directory.path}, which the first node did not start"
        session._wait_for_file(session.token_file, seconds, late, over)
        if session.closed():
            raise ComponentFailure(over)
        return session

    def begin(self) -> None:
        """Make this session the owner of the run. The first rollout node calls this; in a job with
        trainer ranks only, node 0 does.

        Raises:
            UserError: The session's name was used by an earlier launch.
        """
        if self.closed():
            raise UserError(
                f"--session is {self.path.name!r}, which an earlier launch of the run used. Choose "
                "another name."
            )
        write_atomically(self.token_file, secrets.token_hex(32), private=True)
        write_atomically(self._owner_file, self.path.name)

    def follows(self, other: str) -> bool:
        """Return whether session `other` was an earlier start of the same Slurm job.

        The session of a Slurm job is named `JOB.RESTARTS`: the job's ID and how often Slurm has
        restarted it.
        """
        (job, _, count), (their_job, _, their_count) = (
            name.rpartition(".") for name in (self.path.name, other)
        )
        numbers = count.isdigit() and their_count.isdigit()
        return bool(job) and job == their_job and numbers and int(their_count) < int(count)

    def is_current(self) -> bool:
        """Return whether this session owns the run, because no newer session has started."""
        return self._owner_file.exists() and self._owner_file.read_text() == self.path.name

    @property
    def stop_file(self) -> Path:
        """File whose existence asks the run to stop at the end of its step, with a checkpoint."""
        return self.path / "stop"

    @property
    def token_file(self) -> Path:
        """File with the token by which Ray's processes authenticate to each other."""
        return self.path / "ray-token"

    @property
    def _owner_file(self) -> Path:
        return self.path.parent / "current"

    def close(self) -> None:
        """Mark the session closed, so that the processes of all its nodes end.

        If the mark cannot be written, the other nodes end when the Ray cluster ends.
        """
        try:
            (self.path / "closed").touch()
        # This error is only printed, so that it does not replace the failure that ended the
        # session.
        except OSError as error:
            print(f"failed to write {self.path / 'closed'}: {reason(error)}", file=sys.stderr)

    def closed(self) -> bool:
        """Return whether a node or the job script has closed the session."""
        return (self.path / "closed").exists()

    def check(self) -> None:
        """Raise ComponentFailure if the session was closed or superseded."""
        if self.closed():
            raise ComponentFailure(f"session {self.path.name} was closed")
        if not self.is_current():
            raise ComponentFailure(
                f"session {self.path.name} was superseded by a newer launch of the run"
            )

    def publish(self, entry: str, content: dict[str, Any]) -> None:
        """Write `content` to the JSON file named `entry`, for which other nodes can wait."""
        write_atomically(self._entry(entry), json.dumps(content))

    def _entry(self, entry: str) -> Path:
        return self.path / f"{entry}.json"

    def wait_for(self, entry: str, seconds: float) -> dict[str, Any]:
        """Wait until another node publishes the entry of this name; return its content.

        Raises:
            ComponentFailure: The entry did not appear within `seconds`, or the session was closed.
        """
        path, name = self._entry(entry), self.path.name
        over = f"session {name} was closed before {entry} had started"
        late = f"{entry} of session {name} ({path}), whose node did not start"
        self._wait_for_file(path, seconds, late, over)
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def _wait_for_file(self, file: Path, seconds: float, late: str, over: str) -> None:
        """Wait until `file` exists.

        Args:
            file: The file.
            seconds: Time limit.
            late: Description of the missing file, for the error message after the limit.
            over: The error message if the session is closed.

        Raises:
            ComponentFailure: The limit has passed, or the session was closed.
        """
        deadline = time.monotonic() + seconds
        while not file.exists():
            if self.closed():
                raise ComponentFailure(over)
            if time.monotonic() > deadline:
                raise ComponentFailure(
                    f"waited {seconds:.0f} s for {late}; the log of that node may have the reason"
                )
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class TrainerNode:
    """One of the `count` nodes with trainer ranks. `index` is its number, and `address` the address
    at which other nodes reach it."""

    session: Session
    index: int
    count: int
    address: str

    def rendezvous(self) -> list[str] | None:
        """Return the options by which the torchrun agents of all trainer nodes find each other;
        None if there is only one trainer node.

        Raises:
            ComponentFailure: Node 0 did not publish its address within the time limit.
        """
        if self.count == 1:
            return None
        if self.index == 0:
            endpoint = f"{self.address}:{free_port()}"
            self.session.publish(_RENDEZVOUS, {"endpoint": endpoint})
        return [
            f"--nnodes={self.count}",
            # c10d is the only rendezvous backend of torchrun that can restart all ranks after one
            # rank has died.
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.session.path.name}",
            f"--rdzv-endpoint={self.session.wait_for(_RENDEZVOUS, RENDEZVOUS_SECONDS)['endpoint']}",
            f"--rdzv-conf=is_host={int(self.index == 0)},join_timeout={RENDEZVOUS_SECONDS:.0f}",
            f"--local-addr={self.address}",
        ]
