"""Runs jobs that have trainer ranks and generate nothing, so need no engines: fine-tuning and
scoring.

A job on one machine starts all ranks by torchrun. In a job on several machines, each machine starts
its own ranks, and node 0 creates the run directory, which all machines can read.

Invariants
- If a rank fails, node 0 raises the rank's own UserError or ComponentFailure. Other nodes raise a
  ComponentFailure that says how their ranks ended.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megatron_async.config import RunConfig
from megatron_async.engines.nodes import node_address
from megatron_async.errors import UserError
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.preflight import check_one_machine
from megatron_async.launcher.processes import torchrun
from megatron_async.launcher.run_lock import new_run
from megatron_async.launcher.session import RENDEZVOUS_SECONDS, Session, TrainerNode, check_name
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.progress import Progress


@dataclass(frozen=True)
class RankJob:
    """A job whose ranks run `-m module RUN_DIR *arguments`.

    Attributes:
        name: Name of the job and of its log file.
        steps: Number of steps that the job writes to metrics.jsonl, for the display of progress; 0
            to display nothing.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    steps: int = 0

    def run(
        self, config: RunConfig, directory: RunDirectory, node: TrainerNode | None = None
    ) -> None:
        """Start this machine's ranks and wait until they end; show progress on the first node.

        `node` is this machine's part in a job over several machines; None for a job on one.
        """
        first = node is None or node.index == 0
        if first:
            directory.pop_failure()
        with torchrun(
            config.parallel.ranks // (1 if node is None else node.count),
            self.module,
            str(directory.path),
            *self.arguments,
            log_file=directory.logs / f"{self.name}{'' if node is None else f'-{node.index}'}.log",
            environment=trainer_environment(os.environ, one_machine=node is None),
            rendezvous=None if node is None else node.rendezvous(),
        ) as child:
            display = config.telemetry.progress if first and self.steps else "off"
            progress = Progress(directory.metrics_file, self.steps, display)
            code = progress.follow(child.poll, lambda: None)
        if code != 0:
            if first:
                directory.raise_failure(child.log)
            raise child.failure(self.name)


def check_session(config: RunConfig, session: str | None, index: int) -> None:
    """Raise UserError if `index` is not the index of one of the layout's nodes, or if the layout
    has several nodes and there is no session to connect them."""
    count = config.parallel.nodes
    if session is None:
        if index:
            raise UserError(f"--index is {index}, which requires --session, but it is not set")
        check_one_machine(config)
    elif not 0 <= index < count:
        raise UserError(
            f"--index is {index}; parallel.nodes is {count}, so it must be 0 to {count - 1}"
        )
    else:
        check_name(session)


@contextmanager
def directory_of(
    config: RunConfig, command: str, session_name: str | None, index: int
) -> Iterator[tuple[RunDirectory, TrainerNode | None]]:
    """Create the run directory of a job, or wait for the one that node 0 creates; yield it.

    Args:
        config: The job's settings.
        command: Name of the command, stored in the run's lock.
        session_name: Session that connects the job's nodes; None for a job on one machine.
        index: Index of this node.

    Yields:
        The run directory; and this node's part in the job, or None for a job on one machine.

    Raises:
        UserError: The run's name is in use.
        ComponentFailure: Node 0 did not start within the time limit.
    """
    if session_name is None:
        with new_run(config, command, resumable=False) as directory:
            yield directory, None
        return
    directory = RunDirectory.of(config)
    with ExitStack() as stack:
        if index == 0:
            what = f"{command}, session {session_name}"
            stack.enter_context(new_run(config, what, resumable=False))
            session = Session.join(directory, session_name)
            stack.callback(session.close)
            session.begin()
        # This node must write nothing, because the first node creates the directory and checks that
        # no run has it.
        else:
            session = Session.begun(directory, session_name, RENDEZVOUS_SECONDS)
        yield directory, TrainerNode(session, index, config.parallel.nodes, node_address())
