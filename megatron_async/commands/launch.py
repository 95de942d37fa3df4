"""`megatron-async launch`: a run directory and what starts it on several nodes.

Invariants
- Everything that can be refused is refused here, before anything waits in a queue.
- A dry run makes no file and no job, and shows exactly what a real one would use.
- Where hosts differ, engines bind to their node's address and ask for a key that only the run's
  config.yaml holds (readable by its user only).
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import typer

from megatron_async.commands.rollback import rollback_to
from megatron_async.commands.train import complete
from megatron_async.config import RunConfig, load_config
from megatron_async.engines.nodes import LOOPBACK, NODE_HOST
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.package_files import ROOT, script_environment
from megatron_async.launcher import preflight
from megatron_async.launcher.claim import claimed, new_run
from megatron_async.launcher.derived import Machine, derive, layout_lines
from megatron_async.launcher.devices import check_ranks
from megatron_async.run_directory import RunDirectory, write_atomically

_SUBMIT_SECONDS = 60.0
_ONE_NODE = "srun --nodes=1 --ntasks=1 --exclusive --cpu-bind=none --gpus-per-node"
# Before the time limit, for the step under way, a checkpoint and the requeue.
_SIGNAL_SECONDS = 120


@dataclass(frozen=True)
class Cluster:
    """Nodes of the allocation. `engine_nodes` None: as many as the engines' GPUs need."""

    gpus_per_node: int
    engine_nodes: int | None
    time_limit: str
    sbatch_options: tuple[str, ...] = ()

    def rollout_nodes(self, config: RunConfig) -> int:
        """Nodes that hold the engines. Raises UserError."""
        engines, per_node = config.engines, self.gpus_per_node
        if self.engine_nodes is not None:
            if self.engine_nodes < 1:
                raise UserError(f"--engine-nodes is {self.engine_nodes}; it must be 1 or more")
            return self.engine_nodes
        if per_node == 0:
            return 1
        if engines.tensor > per_node:
            raise UserError(
                f"engines.tensor is {engines.tensor}, more than the {per_node} GPUs of a node; set "
                "--engine-nodes and SGLang's multi-node options yourself"
            )
        engines_per_node = per_node // engines.tensor
        return -(-engines.count // engines_per_node)


def for_hosts(config: RunConfig) -> RunConfig:
    """The same run with engines that other nodes reach, behind a key."""
    changes: dict[str, str] = {}
    if config.engines.host == LOOPBACK[0]:
        changes["host"] = NODE_HOST
    if not config.engines.api_key:
        changes["api_key"] = secrets.token_urlsafe(24)
    return config.model_copy(update={"engines": config.engines.model_copy(update=changes)})


def check_nodes(config: RunConfig, gpus_per_node: int) -> None:
    """Trainers and engines on different nodes. Raises UserError for what cannot work there."""
    if not gpus_per_node:
        return
    real, shared = config.engines.kind == "sglang", config.engines.placement == "colocated"
    if config.weights.transport == "tensor" and real and not shared:
        raise UserError(
            "weights.transport is tensor, which hands weights over on one GPU, and launch gives "
            "engines nodes of their own: set weights.transport distributed, disk or delta"
        )
    check_ranks(gpus_per_node, config, "--gpus-per-node is")


def launch_run(
    config_file: Path | None,
    resume: Path | None,
    overrides: list[str],
    cluster: Cluster,
    *,
    slurm: bool,
    dry_run: bool,
    from_step: int | None = None,
) -> str:
    """Return the text to show: the job that was submitted, the script, or commands by node.

    `from_step`, with `resume`: go back to that step's checkpoint here and now, before any node
    starts; a job that is queued again goes on from what it has reached since.

    Raises UserError, or ComponentFailure when sbatch fails.
    """
    if resume is not None:
        directory, before = RunDirectory.find(resume, [], "--resume")
        _, config = RunDirectory.find(resume, overrides, "--resume")
        if from_step is None and (sentence := complete(directory, before, config)):
            return sentence
        preflight.check_resume(directory, config, from_step)
        preflight.check_same_model(directory, before, config)
    else:
        assert config_file is not None
        config = load_config(config_file, overrides)
        directory = RunDirectory.of(config)
    rollout_nodes = cluster.rollout_nodes(config)
    machine = Machine.of_nodes(config, cluster.gpus_per_node, rollout_nodes)
    derived = derive(for_hosts(config), machine)
    shown = (*layout_lines(derived.config, machine), *derived.lines())
    try:
        checked = preflight.check_run(derived.config)
    except (UserError, ComponentFailure):
        if dry_run:  # it needs config.json alone
            typer.echo("\n".join(shown))
        raise
    config = checked.config
    preflight.check_probe_tolerance(config, "cuda" if cluster.gpus_per_node else "cpu")
    check_nodes(config, cluster.gpus_per_node)
    shared = config.engines.placement == "colocated"
    run = ["--resume", str(resume)] if resume else ["--config", str(config_file)]
    back_to = [] if from_step is None else ["--from-step", str(from_step)]
    train = shlex.join(["megatron-async", "train", *run, *back_to, *overrides])
    on_one_node = f"{_ONE_NODE} {cluster.gpus_per_node} {train}"
    if shared and not dry_run:
        raise UserError(
            "engines.placement is colocated, and launch gives engines nodes of their own; start "
            f"the run on its one node by `{train}`, under Slurm by `{on_one_node}`"
        )
    notices = "".join(f"# note: {notice}\n" for notice in checked.notices)
    script = job_script(config, directory, cluster, rollout_nodes)
    if dry_run:
        if from_step is not None:
            rollback_to(directory, from_step)
        if resume is None and not directory.never_began():
            directory.check_free()
        overview = "".join(f"# {line}\n" for line in (*shown, *checked.summary.splitlines()))
        usual = script if slurm else by_hand(config, directory, rollout_nodes)
        commands = on_one_node if shared else usual
        return f"{commands.rstrip()}\n\n{notices}{overview}"
    if slurm and shutil.which("sbatch") is None:
        raise UserError("--slurm: there is no sbatch on this machine; --dry-run shows the script")
    what, places, job_file = "megatron-async launch", [], directory.path / "job.sbatch"
    # Not for longer than this: the job that is submitted takes the run at its start.
    with new_run(config, what) if resume is None else claimed(directory, what):
        back = None if from_step is None else rollback_to(directory, from_step)
        if resume is not None:
            directory.prepare_resume(config)
        if back is not None:
            places = back.carry_out()
        if slurm:
            write_atomically(job_file, script)
    header = notices + "".join(f"# set aside: {place}\n" for place in places)
    if not slurm:
        return header + by_hand(config, directory, rollout_nodes)
    try:
        answer = _submit(job_file)
    except ComponentFailure as error:
        if not places:
            raise
        moved = ", ".join(str(place) for place in places)
        raise ComponentFailure(
            f"{error}; the run goes on from step {from_step} all the same, as newer checkpoints "
            f"were set aside before: {moved}"
        ) from error
    return f"{header}{answer}; logs in {directory.logs}"


def _submit(job_file: Path) -> str:
    """Submit the job and return sbatch's output. Raises ComponentFailure when it fails or hangs."""
    command = ["sbatch", str(job_file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ComponentFailure(
            f"sbatch {job_file} did not answer for {_SUBMIT_SECONDS:g} s; squeue shows whether "
            "the job was taken"
        ) from error
    if done.returncode != 0:
        raise ComponentFailure(f"sbatch {job_file} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def job_script(
    config: RunConfig, directory: RunDirectory, cluster: Cluster, rollout_nodes: int
) -> str:
    """The sbatch script of one run; the work is in launch/slurm/train.sbatch."""
    options = [
        f"--job-name={config.name}",
        f"--nodes={config.parallel.nodes + rollout_nodes}",
        f"--time={cluster.time_limit}",
        f"--signal=B:USR1@{_SIGNAL_SECONDS}",
        "--requeue",
        "--open-mode=append",
        f"--output={directory.logs}/job-%j.log",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []),
        "--exclusive",
        "--mem=0",  # all of it: Slurm's default may be a small part
        *cluster.sbatch_options,
    ]
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    command = shlex.join(
        [
            *_prefix(),
            "bash",
            str(ROOT / "launch/slurm/train.sbatch"),
            f"--trainer-nodes={config.parallel.nodes}",
            str(directory.path),
        ]
    )
    return f"#!/usr/bin/env bash\n{lines}\nexec {command}\n"


def _prefix() -> list[str]:
    """`env` with what shipped scripts need, or nothing."""
    variables = [f"{name}={value}" for name, value in script_environment().items()]
    return ["env", *variables] if variables else []


def by_hand(config: RunConfig, directory: RunDirectory, rollout_nodes: int) -> str:
    """The command of every node, for clusters without Slurm."""
    scripts, path = ROOT / "launch/torchrun", shlex.quote(str(directory.path))
    nodes = config.parallel.nodes
    bash = shlex.join([*_prefix(), "bash"])
    lines = ["# one command on each node, in any order; SESSION is any new name, alike on all"]
    for role, count in (("rollout", rollout_nodes), ("trainer", nodes)):
        lines += [
            f"{bash} {scripts}/{role}.sh {path} --index {index} --count {count} --session SESSION"
            for index in range(count)
        ]
    return "\n".join(lines)
