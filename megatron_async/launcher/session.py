"""A session: one launch of a run over several nodes, and files by which its roles communicate.

It is the directory `RUN_DIR/launch/NAME/` on the file system that all nodes share. A requeued job
is a new session of the same run.

The torchrun agents of several nodes have their rendezvous at node 0, on a port that it chooses.

Invariants
- An entry is written atomically and never changes; a wait for one has a time limit and names what
  was waited for.
- The newest session owns the run: `is_current` turns false for the processes of an older one, so
  that what a lost node left running ends itself.
- The Ray token of a session is readable by its user only.
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
    """Refuse a session's name that is no file name. Raises UserError."""
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"--session is {name!r}; it must be a plain name, e.g. a job's id")


RENDEZVOUS_SECONDS: Final = 600.0
_RENDEZVOUS = "trainers"


@dataclass(frozen=True)
class Session:
    """The files by which the nodes of one session coordinate."""

    path: Path

    @classmethod
    def join(cls, directory: RunDirectory, name: str) -> "Session":
        """Make or find the session. Raises UserError for a name that is no file name."""
        check_name(name)
        path = directory.path / "launch" / name
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def begun(cls, directory: RunDirectory, name: str, seconds: float) -> "Session":
        """The session once another node has begun it; nothing is written before.

        Raises UserError for a name that is no file name, ComponentFailure for a session that is
        over already and after the limit.
        """
        check_name(name)
        session = cls(directory.path / "launch" / name)
        over = (
            f"--session {name!r} is over: an earlier launch of the run used that name, or the "
            "first node has ended already"
        )
        late = f"session {name} of {directory.path}: the first node has not begun it"
        session._wait_for_file(session.token_file, seconds, late, over)
        if session.closed():
            raise ComponentFailure(over)
        return session

    def begin(self) -> None:
        """Make this session the owner of the run; by the first rollout node. Raises UserError."""
        if self.closed():
            raise UserError(
                f"--session {self.path.name!r} was used by an earlier launch of the run"
            )
        write_atomically(self.token_file, secrets.token_hex(32), private=True)
        write_atomically(self._owner_file, self.path.name)

    def follows(self, other: str) -> bool:
        """Return whether `other` was an earlier start of the same Slurm job (JOB.RESTARTS)."""
        (job, _, count), (their_job, _, their_count) = (
            name.rpartition(".") for name in (self.path.name, other)
        )
        numbers = count.isdigit() and their_count.isdigit()
        return bool(job) and job == their_job and numbers and int(their_count) < int(count)

    def is_current(self) -> bool:
        """Return whether no newer session has begun."""
        return self._owner_file.exists() and self._owner_file.read_text() == self.path.name

    @property
    def stop_file(self) -> Path:
        """Exists when the run is asked to stop at the end of its step, with a checkpoint."""
        return self.path / "stop"

    @property
    def token_file(self) -> Path:
        """File of the token that Ray's processes show each other."""
        return self.path / "ray-token"

    @property
    def _owner_file(self) -> Path:
        return self.path.parent / "current"

    def close(self) -> None:
        """The session has ended: every role of it ends too.

        Where that cannot be written, the others end because Ray is gone.
        """
        try:
            (self.path / "closed").touch()
        except OSError as error:  # what ended the session matters more
            print(f"{self.path / 'closed'} cannot be written: {reason(error)}", file=sys.stderr)

    def closed(self) -> bool:
        """Return whether a role or the job script has ended the session."""
        return (self.path / "closed").exists()

    def check(self) -> None:
        """Check that the session is not over. Raises ComponentFailure."""
        if self.closed():
            raise ComponentFailure(f"session {self.path.name} was closed")
        if not self.is_current():
            raise ComponentFailure(
                f"session {self.path.name} was superseded by a newer launch of the run"
            )

    def publish(self, entry: str, content: dict[str, Any]) -> None:
        """Leave an entry for the other roles."""
        write_atomically(self._entry(entry), json.dumps(content))

    def _entry(self, entry: str) -> Path:
        return self.path / f"{entry}.json"

    def wait_for(self, entry: str, seconds: float) -> dict[str, Any]:
        """The entry of another role. Raises ComponentFailure after the limit, or when closed."""
        path, name = self._entry(entry), self.path.name
        over = f"session {name} was closed before {entry} was up"
        late = f"{entry} of session {name} ({path}): the node that writes it has not started"
        self._wait_for_file(path, seconds, late, over)
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def _wait_for_file(self, file: Path, seconds: float, late: str, over: str) -> None:
        """Wait for a file. Raises ComponentFailure: `late` after the limit, `over` when closed."""
        deadline = time.monotonic() + seconds
        while not file.exists():
            if self.closed():
                raise ComponentFailure(over)
            if time.monotonic() > deadline:
                raise ComponentFailure(
                    f"waited {seconds:.0f} s for {late}, or its log has the reason"
                )
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class TrainerNode:
    """A node with trainer ranks, numbered from 0 of `count`; `address` is what others reach."""

    session: Session
    index: int
    count: int
    address: str

    def rendezvous(self) -> list[str] | None:
        """torchrun's options; None: this node has all ranks.

        Waits for node 0; raises ComponentFailure when it does not come.
        """
        if self.count == 1:
            return None
        if self.index == 0:
            endpoint = f"{self.address}:{free_port()}"
            self.session.publish(_RENDEZVOUS, {"endpoint": endpoint})
        return [
            f"--nnodes={self.count}",
            # c10d, not static: only with it can torchrun restart all ranks after one has died.
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.session.path.name}",
            f"--rdzv-endpoint={self.session.wait_for(_RENDEZVOUS, RENDEZVOUS_SECONDS)['endpoint']}",
            f"--rdzv-conf=is_host={int(self.index == 0)},join_timeout={RENDEZVOUS_SECONDS:.0f}",
            f"--local-addr={self.address}",
        ]
