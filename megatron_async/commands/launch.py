"""`megatron-async launch`: creates a run directory, and the job that starts the run on several
nodes.

Invariants
- Everything that can be refused on the login node is refused before a job is queued.
- A dry run creates no file and no job, and shows exactly what a real launch would use.
- On several hosts, engines bind to their node's address and require a key. Only the run's
  config.yaml contains the key, and only the user can read that file.
"""

import math
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import typer

from megatron_async.commands.rollback import Rollback, rollback_to
from megatron_async.commands.train import complete
from megatron_async.config import RunConfig, load_config
from megatron_async.config.load import differences
from megatron_async.config.simulate import GpuConfig
from megatron_async.engines.nodes import NODE_HOST, is_loopback
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.package_files import ROOT, script_environment
from megatron_async.launcher import preflight
from megatron_async.launcher.derived import Machine, check_memory, derive
from megatron_async.launcher.devices import check_ranks, check_ray
from megatron_async.launcher.estimates import (
    END_SECONDS,
    checkpoints_with_room,
    estimate_lines,
    stop_seconds,
)
from megatron_async.launcher.run_lock import check_new, check_unclaimed, hold_run_lock, new_run
from megatron_async.run_directory import RunDirectory, write_atomically
from megatron_async.simulate.hardware import DATA_SHEETS

_SUBMIT_SECONDS = 60.0
_ONE_NODE = "srun --nodes=1 --ntasks=1 --export=ALL --exclusive --cpu-bind=none --gpus-per-node"
_SIGNAL = re.compile(r"--signal=B:USR1@(\d+)")
# Largest number of seconds before the time limit that Slurm's --signal accepts.
_MAX_NOTICE = 65_535
_OPTION = re.compile(r"--[\w-]+(=.*)?|-\w\S*")
_SECOND_OPTION = re.compile(r"\s--?\w")


@dataclass(frozen=True)
class Cluster:
    """Nodes and Slurm options of a launch.

    Attributes:
        gpus_per_node: GPUs of a node; 0 for nodes without GPUs.
        engine_nodes: Nodes that run engines; None for as many as the engines' GPUs need.
        time_limit: Slurm time limit.
        sbatch_options: Further options of sbatch.
        gpu: Name of the nodes' GPU in the simulator's table of data sheets.
    """

    gpus_per_node: int
    engine_nodes: int | None
    time_limit: str
    sbatch_options: tuple[str, ...] = ()
    gpu: str = "H100"

    def machine(self, config: RunConfig) -> Machine:
        """Return the hardware of a node.

        Raises:
            UserError: The GPU's name is unknown.
        """
        if self.gpu not in DATA_SHEETS:
            raise UserError(f"--gpu is {self.gpu}; it must be one of {', '.join(DATA_SHEETS)}")
        gpu = GpuConfig.model_validate({"name": self.gpu})
        return Machine.of_nodes(self.gpus_per_node, self.rollout_nodes(config), gpu)

    def rollout_nodes(self, config: RunConfig) -> int:
        """Return the number of nodes that run the engines.

        Raises:
            UserError: An engine needs more GPUs than a node has.
        """
        engines, per_node = config.engines, self.gpus_per_node
        if self.engine_nodes is not None:
            return self.engine_nodes
        if per_node == 0:
            return 1
        if engines.tensor > per_node:
            raise UserError(
                f"engines.tensor is {engines.tensor}, which is more than the {per_node} GPUs of a "
                "node. Set --engine-nodes and SGLang's options for several nodes yourself."
            )
        engines_per_node = per_node // engines.tensor
        return -(-engines.count // engines_per_node)

    def notice(self, stop: int) -> int:
        """Return how many seconds before the time limit Slurm must send the stop signal.

        Args:
            stop: Estimated seconds that the run needs to stop with a checkpoint.

        Raises:
            UserError: The time limit, or the user's own --signal, leaves too little time.
        """
        needed = stop + END_SECONDS
        duration = (
            f"a stop takes up to {needed} s: {stop} s for the current step and the checkpoint "
            f"(checkpoint.write_gb_per_s), {END_SECONDS} s to end the job"
        )
        signals = [option for option in self.sbatch_options if option.startswith("--signal")]
        for option in signals:
            found = _SIGNAL.fullmatch(option)
            if found is None or int(found[1]) < needed:
                raise UserError(
                    f"--sbatch is {option}, but {duration}. Remove it, or set it to "
                    f"--signal=B:USR1@{needed}."
                )
            needed = int(found[1])
        if needed > _MAX_NOTICE or needed >= seconds_of(self.time_limit):
            raise UserError(
                f"--time is {self.time_limit}, but {duration}. Raise --time, or "
                "checkpoint.write_gb_per_s if the file system is faster."
            )
        return needed


def seconds_of(time_limit: str) -> float:
    """Return a Slurm time limit in seconds; infinity if there is no limit or `time_limit` is in a
    form that this function does not know."""
    days, dash, rest = time_limit.rpartition("-")
    parts = rest.split(":")
    if not all(map(str.isdecimal, parts)) or (dash and not days.isdecimal()):
        return math.inf
    # In D-H, D-H:M, D-H:M:S and H:M:S the first number after the days is hours. In M and M:S it is
    # minutes.
    first = 0 if dash or len(parts) == 3 else 1
    units = (3600, 60, 1)[first:]
    rest_seconds = sum(unit * int(part) for unit, part in zip(units, parts, strict=False))
    return int(days or 0) * 86_400 + rest_seconds or math.inf


def for_hosts(config: RunConfig) -> RunConfig:
    """Return `config` with engines that other nodes can reach, and with an API key that protects
    them."""
    host, key = config.engines.host, config.engines.api_key
    host = NODE_HOST if is_loopback(host) else host
    return config.with_section("engines", host=host, api_key=key or secrets.token_urlsafe(24))


def check_nodes(config: RunConfig, gpus_per_node: int) -> None:
    """Raise UserError if the settings cannot work with trainers and engines on different nodes."""
    if config.cluster == "local":
        raise UserError(
            "cluster is local, but launch starts a run on several nodes. Set cluster auto or ray."
        )
    check_ray(config, nodes=2)
    if not gpus_per_node:
        return
    real, shared = config.engines.kind == "sglang", config.engines.placement == "colocated"
    if config.weights.transport == "tensor" and real and not shared:
        raise UserError(
            "weights.transport is tensor, which requires trainer and engines on the same GPU, but "
            "launch gives engines separate nodes. Set weights.transport distributed, disk or delta."
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
    """Check the run, create or prepare its directory, and return the text to show the user.

    The text is sbatch's reply, or the job script or commands of each node.

    Args:
        config_file: YAML file of a new run; None with `resume`.
        resume: Run directory to resume; None for a new run.
        overrides: Settings that replace settings of the file or run.
        cluster: Nodes and Slurm options.
        slurm: Whether to submit a job instead of printing commands.
        dry_run: Whether to only show what would be done.
        from_step: With `resume`, step of the checkpoint to which the run returns before any node
            starts; None for the newest checkpoint. If the job is queued again later, it resumes
            from the newest checkpoint at that time.

    Raises:
        UserError: Bad input.
        ComponentFailure: sbatch failed.
    """
    if resume is not None:
        directory, before = RunDirectory.find(resume, [], "--resume")
        _, config = RunDirectory.find(resume, overrides, "--resume")
        if from_step is None and (message := complete(directory, before, config)):
            return message
        preflight.check_resume(directory, config, from_step)
        changed = preflight.check_same_run(directory, before, config)
    else:
        assert config_file is not None
        config, changed = load_config(config_file, overrides), ()
        directory = RunDirectory.of(config)
    rollout_nodes = cluster.rollout_nodes(config)
    config, remarks, details = _check(config, cluster, dry_run=dry_run)
    run = ["--resume", str(resume)] if resume else ["--config", str(config_file)]
    back_to = [] if from_step is None else ["--from-step", str(from_step)]
    train = shlex.join(["megatron-async", "train", *run, *back_to, *overrides])
    on_one_node = f"{_ONE_NODE} {cluster.gpus_per_node} {train}"
    shared = config.engines.placement == "colocated"
    if shared and not dry_run:
        raise UserError(
            "engines.placement is colocated, but launch gives engines separate nodes. Start the "
            f"run on a single node by `{train}`, under Slurm by `{on_one_node}`."
        )
    notices = "".join(f"# note: {notice}\n" for notice in (*remarks, *changed))
    if resume is not None:
        notices += "".join(f"# changed: {change}\n" for change in differences(before, config))
    commands = _commands(config, directory, cluster, rollout_nodes, slurm=slurm)
    if dry_run:
        if from_step is not None:
            rollback_to(directory, from_step)
        (check_new if resume is None else check_unclaimed)(directory)
        overview = "".join(f"# {line}\n" for line in details)
        return f"{(on_one_node if shared else commands).rstrip()}\n\n{notices}{overview}"
    if slurm and shutil.which("sbatch") is None:
        raise UserError(
            "--slurm requires sbatch, which this machine does not have; --dry-run shows the script"
        )
    renamed, submitted = _start(config, directory, commands, resume, from_step, slurm=slurm)
    header = notices + "".join(f"# renamed: {path}\n" for path in renamed)
    return f"{header}{submitted}; logs in {directory.logs}" if slurm else header + commands


def _start(
    config: RunConfig,
    directory: RunDirectory,
    commands: str,
    resume: Path | None,
    from_step: int | None,
    *,
    slurm: bool,
) -> tuple[Sequence[Path], str]:
    """Create the run, or prepare its resume, and with `slurm` submit the job.

    If Slurm refuses the job of a resume, the preparation is undone.

    Returns:
        The new paths of renamed checkpoints, and sbatch's reply.

    Raises:
        UserError: Bad input.
        ComponentFailure: sbatch failed.
    """
    what, job_file = "megatron-async launch", directory.path / "job.sbatch"
    renamed: Sequence[Path] = ()
    with ExitStack() as withdraw:
        # The lock is released before the job is submitted, because the job needs it at its start.
        with new_run(config, what) if resume is None else hold_run_lock(directory, what):
            back = None if from_step is None else rollback_to(directory, from_step)
            if resume is not None:
                files = _content(job_file, directory.resume_file)
                withdraw.callback(_withdraw, directory, files, back)
                directory.prepare_resume(config)
            if back is not None:
                renamed = back.carry_out()
            if slurm:
                write_atomically(job_file, commands)
        submitted = _submit(job_file, withdraw) if slurm else ""
        withdraw.pop_all()
    return renamed, submitted


def _content(*files: Path) -> dict[Path, str | None]:
    """Return the text of each file; None for a file that does not exist."""
    return {file: file.read_text() if file.exists() else None for file in files}


def _withdraw(
    directory: RunDirectory, files: Mapping[Path, str | None], back: Rollback | None
) -> None:
    """Undo the preparation of a resume: give checkpoints their old names and files their former
    text.

    Args:
        directory: The run directory.
        files: Former text of each file that was written; None for a file that did not exist.
        back: The rollback, whose checkpoints get their old names back; None if there was none.
    """
    with hold_run_lock(directory, "megatron-async launch"):
        if back is not None:
            back.undo()
        for file, text in files.items():
            if text is None:
                file.unlink(missing_ok=True)
            else:
                write_atomically(file, text, private=file == directory.resume_file)


def _commands(
    config: RunConfig, directory: RunDirectory, cluster: Cluster, rollout_nodes: int, *, slurm: bool
) -> str:
    """Return the job script or the commands of each node, after checking the space for checkpoints.

    Raises:
        UserError: The disk has too little space for the checkpoints.
    """
    checkpoints = checkpoints_with_room(config, directory)
    stop = stop_seconds(config, checkpoints, cluster.machine(config))
    if slurm:
        return job_script(config, directory, cluster, rollout_nodes, stop)
    return manual_commands(config, directory, rollout_nodes)


def _check(
    config: RunConfig, cluster: Cluster, *, dry_run: bool
) -> tuple[RunConfig, tuple[str, ...], tuple[str, ...]]:
    """Check that the run can start on the nodes of `cluster`; return its final settings, notices,
    and lines to show.

    The lines describe the training data and, in a dry run, also the layout, the estimates and the
    derived settings. If `check_run` refuses a dry run, the latter are printed before the error is
    raised, because they need only the settings and the model's config.json.

    Raises:
        UserError: The run cannot start on these nodes.
        ComponentFailure: A part of a check failed, for example a trial episode.
    """
    machine = cluster.machine(config)
    derived = derive(for_hosts(config), machine)
    details = [*estimate_lines(derived.config, machine), *derived.lines()] if dry_run else []
    try:
        checked = preflight.check_run(derived.config)
    except (UserError, ComponentFailure):
        if dry_run:
            typer.echo("\n".join(details))
        raise
    preflight.check_probe_tolerance(checked.config, "cuda" if cluster.gpus_per_node else "cpu")
    check_nodes(checked.config, cluster.gpus_per_node)
    check_memory(checked.config, machine)
    return checked.config, tuple(checked.notices), (*details, *checked.summary.splitlines())


def _submit(job_file: Path, withdraw: ExitStack) -> str:
    """Submit the job and return sbatch's output.

    Args:
        job_file: The job script.
        withdraw: Callbacks that undo the preparation of a resume. The caller runs them after an
            exception. If sbatch does not end in time, they are removed, because Slurm may have
            accepted the job.

    Raises:
        ComponentFailure: sbatch failed or did not end in time.
    """
    command = ["sbatch", str(job_file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        withdraw.pop_all()
        raise ComponentFailure(
            f"sbatch {job_file} did not end within {_SUBMIT_SECONDS:g} s. squeue shows whether the "
            "job was submitted; the settings and renamed checkpoints of this launch stay for it."
        ) from error
    if done.returncode != 0:
        raise ComponentFailure(f"sbatch {job_file} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def job_script(
    config: RunConfig, directory: RunDirectory, cluster: Cluster, rollout_nodes: int, stop: int
) -> str:
    """Return the sbatch script of a run, which calls launch/slurm/train.sbatch.

    Args:
        config: The run's settings.
        directory: The run directory.
        cluster: Nodes and Slurm options.
        rollout_nodes: Number of nodes with engines.
        stop: Seconds for which the run may continue after Slurm's stop signal.

    Raises:
        UserError: The time limit or --signal leaves too little time, or a text cannot be written
            into a job script.
    """
    _check_text(directory, cluster)
    options = [
        f"--job-name={config.name}",
        f"--nodes={config.parallel.nodes + rollout_nodes}",
        f"--time={cluster.time_limit}",
        f"--signal=B:USR1@{cluster.notice(stop)}",
        "--requeue",
        "--open-mode=append",
        f"--output={str(directory.logs).replace('%', '%%')}/job-%j.log",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []),
        "--exclusive",
        # Request all memory of the node, because Slurm's default may be a small part of it.
        "--mem=0",
        *cluster.sbatch_options,
    ]
    # Slurm parses quotes in #SBATCH lines as a shell does, with one difference: a backslash escapes
    # the next character even inside single quotes. So it is doubled.
    quoted = (shlex.quote(option.replace("\\", r"\\")) for option in options)
    lines = "\n".join(f"#SBATCH {option}" for option in quoted)
    command = shlex.join(
        [
            *_prefix(),
            "bash",
            str(ROOT / "launch/slurm/train.sbatch"),
            f"--trainer-nodes={config.parallel.nodes}",
            f"--stop-seconds={stop}",
            str(directory.path),
        ]
    )
    return f"#!/usr/bin/env bash\n{lines}\nexec {command}\n"


def _check_text(directory: RunDirectory, cluster: Cluster) -> None:
    """Raise UserError if a job script cannot contain the run's path or the user's options."""
    path = str(directory.path)
    if "\\" in path or not path.isprintable():
        raise UserError(
            f"the run directory is {path!r}; Slurm cannot write logs to a path with a backslash or "
            "a character that is not printable. Choose another name or root."
        )
    for option in (f"--time={cluster.time_limit}", *cluster.sbatch_options):
        is_single = _OPTION.fullmatch(option) and not _SECOND_OPTION.search(option)
        if not is_single or not option.isprintable():
            raise UserError(
                f"an option for sbatch is {option!r}; it must be one printable --NAME=VALUE. "
                "Repeat --sbatch for each option."
            )


def _prefix() -> list[str]:
    """Return the beginning of a command, `env NAME=VALUE ...`, that sets the variables which the
    scripts in `launch/` need; return an empty list if they need none."""
    variables = [f"{name}={value}" for name, value in script_environment().items()]
    return ["env", *variables] if variables else []


def manual_commands(config: RunConfig, directory: RunDirectory, rollout_nodes: int) -> str:
    """Return the commands of all nodes, one per line, for clusters without Slurm."""
    lines = [
        "# one command on each node, in any order; SESSION is any new name, equal on all nodes"
    ]
    for role, count in (("rollout", rollout_nodes), ("trainer", config.parallel.nodes)):
        script = str(ROOT / f"launch/torchrun/{role}.sh")
        command = shlex.join([*_prefix(), "bash", script, str(directory.path)])
        lines += [
            f"{command} --index {index} --count {count} --session SESSION" for index in range(count)
        ]
    return "\n".join(lines)
