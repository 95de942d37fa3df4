"""Work of the trainer's ranks alone, with no rollout side: fine-tuning, scoring.

One machine starts all ranks by torchrun; of several, each starts its own, and node 0 makes the run
directory, which all see.

Invariants
- What a rank has failed of is raised here as the rank raised it: UserError or ComponentFailure.
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
    """Command of a rank: `-m module RUN_DIR *arguments`; its log has the `name` of the job.

    `steps`: lines of metrics to show as they come; 0: the job writes none.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    steps: int = 0

    def run(
        self, config: RunConfig, directory: RunDirectory, node: TrainerNode | None = None
    ) -> None:
        """Start this machine's ranks and wait for their end; show progress on the first node.

        `node`: this one of several.
        """
        first = node is None or node.index == 0
        if first:
            directory.pop_failure()
        with torchrun(
            config.parallel.ranks // (1 if node is None else node.count),
            self.module,
            *(str(directory.path), *self.arguments),
            log_file=directory.logs / f"{self.name}{'' if node is None else f'-{node.index}'}.log",
            environment=trainer_environment(os.environ, one_machine=node is None),
            rendezvous=None if node is None else node.rendezvous(),
        ) as child:
            shown = config.telemetry.progress if first and self.steps else "off"
            progress = Progress(directory.metrics_file, self.steps, shown)
            code = progress.follow(child.poll, lambda: None)
        if code != 0:
            if first:
                directory.raise_failure(child.log)
            raise child.failure(self.name)


def check_session(config: RunConfig, session: str | None, index: int) -> None:
    """Refuse a node that does not fit the layout, or several without a session. UserError."""
    count = config.parallel.nodes
    if session is None:
        if index:
            raise UserError(f"--index is {index}, and there is no --session for it to be part of")
        check_one_machine(config)
    elif not 0 <= index < count:
        raise UserError(f"--index is {index}; parallel.nodes is {count}, so it is 0 to {count - 1}")
    else:
        check_name(session)


@contextmanager
def directory_of(
    config: RunConfig, command: str, session_name: str | None, index: int
) -> Iterator[tuple[RunDirectory, TrainerNode | None]]:
    """The new run directory of a job, and this node of `session_name`, which None is without.

    Raises UserError when the name is taken, ComponentFailure when node 0 does not begin.
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
        else:  # the directory may be another run's, and only the first node finds out
            session = Session.begun(directory, session_name, RENDEZVOUS_SECONDS)
        yield directory, TrainerNode(session, index, config.parallel.nodes, node_address())
