"""Provides a real Slurm cluster of virtual nodes on this machine, with one slurmd process for each
node and without root services.

    with SlurmCluster(folder, nodes=2) as cluster:
        job = cluster.submit(script)
        cluster.wait_for(job, ("COMPLETED",), seconds=60)

Invariants
- All files of the cluster and its daemons are in `folder`. No port is fixed. No process is left
  running.
- The cluster ends only processes that it has started; it finds them by their pid files.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_CALL_SECONDS = 30.0
_POLL_SECONDS = 0.3

_SLURM_CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/pid/slurmctld.pid
SlurmdPidFile={root}/pid/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
InactiveLimit=0
KillWait=2
JobRequeue=1
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    """Return the names of the Slurm programs that are not installed on this machine."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class SlurmCluster:
    """Slurm cluster whose daemons run inside the `with` block. Its nodes are called n1, n2, ..."""

    def __init__(self, root: Path, nodes: int = 2) -> None:
        self.root = root
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> Self:
        for name in ("munge", "state", "spool", "pid", "log"):
            (self.root / name).mkdir(parents=True)
        (self.root / "munge").chmod(0o755)
        for node in self.nodes:
            (self.root / "spool" / node).mkdir()
        self._write_config()
        try:
            self._start_munge()
            self._start(["slurmctld"])
            for node in self.nodes:
                self._start(["slurmd", "-N", node])
            self._wait_for_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ------------------------------------------------------------ calls of the tests

    def submit(
        self,
        script: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
    ) -> str:
        """Submit `script` with sbatch and return the job ID; `arguments` are passed to the
        script."""
        command = ["sbatch", "--parsable", str(script), *arguments]
        out = self.call(command, environment)
        return out.strip().split(";")[0]

    def state(self, job: str) -> str:
        """Return the state of a job, for example PENDING, RUNNING, COMPLETED or FAILED."""
        return self._field(job, "JobState")

    def restarts(self, job: str) -> int:
        """Return how often Slurm has requeued the job."""
        return int(self._field(job, "Restarts"))

    def wait_for(self, job: str, states: Sequence[str], seconds: float) -> str:
        """Wait until the job is in one of `states` and return that state; fail the test after
        `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds:g} s"
            time.sleep(_POLL_SECONDS)
        return state

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition` is true; fail the test after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition is still false after {seconds:g} s"
            time.sleep(_POLL_SECONDS)

    def signal_batch(self, job: str, name: str) -> None:
        """Send the signal `name` to the job script only, as Slurm does before the time limit."""
        self.call(["scancel", "--batch", f"--signal={name}", job])

    def set_node(self, node: str, state: str) -> None:
        """Set the state of a node. `down` ends the node's jobs; the node returns to service without
        help, because its slurmd still runs."""
        self.call(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"])

    def call(self, command: Sequence[str], environment: dict[str, str] | None = None) -> str:
        """Run a Slurm command and return its output; fail the test if the command fails."""
        done = subprocess.run(
            list(command),
            env={**self._environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    # ------------------------------------------------------------ daemons

    def stop(self) -> None:
        """End the jobs, then the daemons, then job steps that could no longer report their end."""
        if (self.root / "pid" / "slurmctld.pid").exists():
            self.call(["scancel", "--partition=main"])
            deadline = time.monotonic() + _CALL_SECONDS
            while self.call(["squeue", "--noheader"]).strip() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        pids = [process.pid for process in psutil.process_iter() if self._is_own_step(process)]
        for path in sorted((self.root / "pid").glob("*.pid"), reverse=True):
            text = path.read_text().strip()
            if text:
                pids.append(int(text))
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + 5
            while any(map(_is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.1)

    def _is_own_step(self, process: psutil.Process) -> bool:
        # psutil's environ() is incomplete, because slurmstepd writes its title over it.
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            is_step = process.name() == "slurmstepd"
        except (OSError, psutil.Error):
            return False
        return is_step and f"SLURM_CONF={self.root}/slurm.conf".encode() in environment

    def _write_config(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(len(self.nodes) + 1)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
            "RealMemory=10000 State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        import getpass

        (self.root / "slurm.conf").write_text(
            _SLURM_CONF.format(
                host=host,
                controller_port=ports[0],
                user=getpass.getuser(),
                root=self.root,
                nodes=nodes,
            )
        )
        (self.root / "cgroup.conf").write_text("CgroupMountpoint=/sys/fs/cgroup\n")

    def _start_munge(self) -> None:
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            [
                "munged",
                "--force",
                f"--key-file={key}",
                f"--socket={self.root}/munge/sock",
                f"--pid-file={self.root}/pid/munged.pid",
                f"--log-file={self.root}/log/munged.log",
                f"--seed-file={self.root}/munge/seed",
                "--num-threads=2",
            ]
        )

    def _start(self, command: list[str]) -> None:
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=_CALL_SECONDS
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            states = self.call(["sinfo", "--noheader", "--Node", "--format=%T"]).split()
            if len(states) == len(self.nodes) and set(states) == {"idle"}:
                return
            assert time.monotonic() < deadline, f"the nodes are {states}"
            time.sleep(_POLL_SECONDS)

    def _field(self, job: str, name: str) -> str:
        for word in self.call(["scontrol", "show", "job", job]).split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        raise AssertionError(f"job {job} has no {name}")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()
