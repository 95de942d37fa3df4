"""Runs one node of a launch over several nodes, as command `-m megatron_async.launcher.node ROLE
RUN_DIR --index I`.

Every node has one of two roles:
- rollout: The first node of this role runs Ray's head and the rollout manager, and starts and
  closes the session. The other nodes of this role run Ray, which starts engines on them.
- trainer: The node runs torchrun with its trainer ranks. It also joins the Ray cluster, but only so
  that the ranks can call the rollout manager.

A session is one launch of a run. The scripts in `launch/` start one such process on every node, in
any order. The processes find each other through the session's files; no port is fixed.

Invariants
- The exit code is 0 if the run is complete, 75 (EX_TEMPFAIL) if the run stopped with a checkpoint
  on request and should be queued again, 2 after bad input, and 1 if a component failed. A rollout
  node other than the first does not know the outcome and returns 0 when the session ends.
- The process ends when its session is closed or a newer one has started; its child processes end
  with it.
- Every wait has a time limit.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

from megatron_async.config import RunConfig
from megatron_async.engines.nodes import free_port, node_address
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import translating_disk_errors
from megatron_async.files.package_files import check_code
from megatron_async.launcher.environment import ray_node_environment, trainer_environment
from megatron_async.launcher.preflight import check_probe_tolerance, check_store
from megatron_async.launcher.processes import torchrun
from megatron_async.launcher.run_lock import RunInUse, hold_run_lock
from megatron_async.launcher.session import RENDEZVOUS_SECONDS, Session, TrainerNode
from megatron_async.process_backends.child_process import ChildProcess, after_fork, module_command
from megatron_async.process_backends.on_ray import (
    ROLE_LABEL,
    TRAINER_ROLE,
    lost_node_of,
    ray_backend,
)
from megatron_async.process_backends.ray_cluster import ray_directory, use_ray_token
from megatron_async.run_directory import RunDirectory, RunOutcome

REQUEUE_CODE = os.EX_TEMPFAIL
_POLL_SECONDS = 0.5
_RAY_STOP_SECONDS = 15.0
# Time after which a Ray node other than the head is killed if it has not ended on request. If the
# head has ended before, the node waits long for it, although it has nothing left to do.
_RAY_JOINED_STOP_SECONDS = 3.0
# Longest wait for the run's lock of a lost node. A file system releases the locks of a dead host in
# less time (NFS: 90 s).
_TAKEOVER_SECONDS = 150.0


class Node:
    """State that a node needs in both roles: the run directory, the session, and this node's index
    and address."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.directory, self.config = RunDirectory.launched(arguments.run_directory)
        self.session = Session.join(self.directory, arguments.session)
        self.index: int = arguments.index
        self.count: int = arguments.count
        self.address = node_address()
        self.name = socket.gethostname().split(".")[0]

    def use_token(self) -> None:
        """Make Ray authenticate by the session's token, in this process and in those that it starts
        from now on."""
        use_ray_token(self.session.token_file)

    @contextmanager
    def ray_node(self, *arguments: str) -> Iterator[ChildProcess]:
        """Run `ray start` with these arguments for the duration of the block."""
        # The call creates Ray's directory, which every node needs. Only the head gets it as an
        # argument; the other nodes learn its name from the head.
        directory = ray_directory()
        if "--head" in arguments:
            arguments = (*arguments, f"--temp-dir={directory}")
        log = f"ray-{self.session.path.name}-{self.name}-{os.getpid()}.log"
        added = ray_node_environment(os.environ, nvls=self.config.engines.uses_nvls)
        child = ChildProcess(
            [
                *module_command("ray.scripts.scripts", "start", "--block"),
                f"--node-ip-address={self.address}",
                "--disable-usage-stats",
                "--dashboard-agent-listen-port=0",
                # Logs are written to the run directory, so Ray need not collect them.
                "--include-log-monitor=false",
                *arguments,
            ],
            log=self.directory.logs / log,
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            preexec_fn=after_fork(signal.SIGTERM),
        )
        try:
            yield child
        finally:
            is_head = "--head" in arguments
            child.end(_RAY_STOP_SECONDS if is_head else _RAY_JOINED_STOP_SECONDS)


def run_rollout(node: Node) -> int:
    """Run the role `rollout` on this node and return the exit code."""
    if node.index > 0:
        return _join_rollout(node)
    with ExitStack() as stack:
        # The session must be closed even if the run is refused, because other nodes wait for it.
        stack.callback(node.session.close)
        _take_run(node, stack)
        # After a launch that was not refused, the session must be closed before the run's lock is
        # released. Callbacks run in reverse order, so this one runs before that of `_take_run`.
        stack.callback(node.session.close)
        node.use_token()
        # These checks depend on the machine, and the login node, on which the other checks were
        # made, may have other devices and disks.
        check_probe_tolerance(node.config)
        check_store(node.config, node.directory)
        port = free_port()
        address = f"{node.address}:{port}"
        with node.ray_node(
            "--head",
            f"--port={port}",
            f"--ray-client-server-port={free_port()}",
            "--include-dashboard=false",
            "--no-monitor",  # No autoscaling: Ray must not start further nodes.
        ) as ray_node:
            _wait_for_port(node.address, port, ray_node)
            node.session.publish("ray", {"address": address})
            outcome = drive_rollout(node.config, node.directory, address, node.session)
    return REQUEUE_CODE if outcome is RunOutcome.STOPPED else 0


def _take_run(node: Node, stack: ExitStack) -> None:
    """Lock the run for this session until `stack` closes, and make the session the run's current
    one.

    If Slurm restarts a job after it has lost a node, a process on that node may still hold the
    lock. This session then becomes the current one first. That process sees it, ends, and so
    releases the lock.

    Raises:
        UserError: Another launch uses the run.
    """
    session = node.session.path.name
    try:
        stack.enter_context(hold_run_lock(node.directory, f"session {session}", session=session))
        node.session.begin()
    except RunInUse as error:
        if error.holder is None or not node.session.follows(error.holder.session):
            raise
        node.session.begin()
        stack.enter_context(
            hold_run_lock(
                node.directory,
                f"session {session}",
                session=session,
                wait_seconds=_TAKEOVER_SECONDS,
            )
        )


def _join_rollout(node: Node) -> int:
    """Run a rollout node other than the first: run Ray until the session is closed or superseded;
    return the exit code."""
    address = node.session.wait_for("ray", RENDEZVOUS_SECONDS)["address"]
    node.use_token()
    with node.ray_node(f"--address={address}") as ray_node:
        while not node.session.closed() and node.session.is_current():
            if ray_node.poll() is not None:
                raise ray_node.failure(f"Ray on {node.name}")
            time.sleep(_POLL_SECONDS)
    return 0


def drive_rollout(
    config: RunConfig, directory: RunDirectory, ray_address: str, session: Session | None
) -> RunOutcome:
    """Run the rollout side in a Ray cluster until the trainers end; return how the run ended.

    Args:
        config: The run's settings.
        directory: The run directory.
        ray_address: Address of the Ray cluster.
        session: The session of this launch; None if the user starts the processes by hand.

    Raises:
        UserError: Bad input, reported by the rollout side.
        ComponentFailure: The rollout side failed, a trainer node left the cluster, or the session
            was closed or superseded.
    """
    from megatron_async.launcher.rollout_side import RolloutSide
    from megatron_async.telemetry.progress import Progress

    earlier = directory.outcome_stamp()

    def ended() -> RunOutcome | None:
        outcome = directory.outcome(earlier)
        if outcome is None and session is not None:
            session.check()
            _check_trainer_nodes(directory, earlier)
        return outcome

    with (
        ray_backend(ray_address) as backend,
        closing(RolloutSide(config, directory, backend)) as rollout,
    ):
        try:
            progress = Progress(directory.metrics_file, config.steps, config.telemetry.progress)
            return progress.follow(ended, rollout.status)
        except BaseException:
            if session is not None:
                # The session is closed before Ray ends, so that trainer nodes report the closed
                # session and not the loss of Ray.
                session.close()
            raise


def _check_trainer_nodes(directory: RunDirectory, earlier: int) -> None:
    """Raise ComponentFailure if a trainer node has left the Ray cluster before the run ended.

    `earlier` is the stamp of the outcome that was stored before this start. That outcome does not
    count.
    """
    lost = lost_node_of(TRAINER_ROLE)
    if lost is not None and directory.outcome(earlier) is None:
        raise ComponentFailure(f"trainer node {lost} left the cluster before the run was complete")


def run_trainer(node: Node) -> int:
    """Run the role `trainer` on this node and return the exit code; after a failure, close the
    session (this launch of the run on all nodes), so that its other roles end too."""
    try:
        return _run_trainer(node)
    except (UserError, ComponentFailure, OSError):
        node.session.close()
        raise


def _run_trainer(node: Node) -> int:
    earlier = node.directory.outcome_stamp()
    address = node.session.wait_for("ray", RENDEZVOUS_SECONDS)["address"]
    if node.index == 0:
        node.directory.pop_failure()  # An earlier session may have recorded a failure.
    node.use_token()
    with (
        node.ray_node(
            f"--address={address}",
            "--num-cpus=0",
            "--num-gpus=0",
            f"--labels={ROLE_LABEL}={TRAINER_ROLE}",
        ),
        _ranks(node, address) as ranks,
    ):
        while (code := ranks.poll()) is None:
            # Once the run has an outcome, the first rollout node closes the session, possibly
            # before torchrun has ended. Before that, a closed session is a failure.
            if node.directory.outcome(earlier) is None:
                node.session.check()
            time.sleep(_POLL_SECONDS)
    return _trainer_code(node, code, ranks)


def _ranks(node: Node, ray_address: str) -> AbstractContextManager[ChildProcess]:
    """Start torchrun with this node's trainer ranks."""
    config = node.config
    if config.parallel.ranks % node.count:
        raise UserError(
            f"parallel.ranks is {config.parallel.ranks}, which is not divisible by the number of "
            f"trainer nodes, {node.count}"
        )
    trainer_node = TrainerNode(node.session, node.index, node.count, node.address)
    return torchrun(
        config.parallel.ranks // node.count,
        "megatron_async.train_loop.rank",
        str(node.directory.path),
        log_file=node.directory.logs / f"trainer-{node.index}.log",
        environment=trainer_environment(
            os.environ,
            one_machine=False,
            nvls=config.engines.uses_nvls,
            backend=f"ray:{ray_address}",
            stop_file=node.session.stop_file,
            hands_memory_to_engines=config.weights.transport == "tensor",
            first_lineage=str(node.directory.lineages_so_far()),
        ),
        max_restarts=config.trainer.max_restarts,
        rendezvous=trainer_node.rendezvous(),
    )


def _trainer_code(node: Node, code: int, ranks: ChildProcess) -> int:
    """Return the exit code of a trainer node whose torchrun ended successfully; raise the failure
    otherwise.

    Args:
        node: The trainer node.
        code: Exit code of torchrun.
        ranks: The process of torchrun.

    Raises:
        UserError: A rank reported bad input (raised on the first node only).
        ComponentFailure: A rank failed.
    """
    if code == 0:
        return REQUEUE_CODE if node.directory.outcome() is RunOutcome.STOPPED else 0
    if node.index == 0:
        node.directory.raise_failure(ranks.log)
    raise ranks.failure(f"the trainer ranks of {node.name}")


def _wait_for_port(host: str, port: int, child: ChildProcess) -> None:
    """Wait until Ray's head (`child`) listens on the port. Raises ComponentFailure if it does
    not."""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise child.failure("Ray's head")
        with socket.socket() as connection:
            connection.settimeout(1.0)
            if connection.connect_ex((host, port)) == 0:
                return
        time.sleep(_POLL_SECONDS)
    raise ComponentFailure(
        f"Ray's head did not listen on {host}:{port} within {RENDEZVOUS_SECONDS:.0f} s"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_async.launcher.node", description=__doc__)
    parser.add_argument("role", choices=("rollout", "trainer"))
    parser.add_argument("run_directory", type=Path)
    parser.add_argument(
        "--index", type=int, required=True, help="index of this node among the nodes of its role"
    )
    parser.add_argument("--count", type=int, required=True, help="number of nodes of this role")
    parser.add_argument("--session", required=True, help="name of this launch, equal on all nodes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run this node's role and return its exit code."""
    parsed = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        with translating_disk_errors():
            check_code()
            node = Node(parsed)
            stop_file = node.session.stop_file
            signal.signal(signal.SIGUSR2, lambda number, _frame: stop_file.touch())
            return run_rollout(node) if parsed.role == "rollout" else run_trainer(node)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ComponentFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
