"""The command line `megatron-async`.

The exit code is 0 after success, 1 if a component of a run failed, 2 after bad input (the message
names the setting and its value), 130 after Ctrl-C, and 143 after SIGTERM. Each command imports what
it needs inside its function, so that `--help` is fast.
"""

import os
import signal
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from megatron_async.errors import ComponentFailure, Terminated, UserError
from megatron_async.files.disk import check_file_names, translating_disk_errors
from megatron_async.runtime.garbage_collection import gc_disabled

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of language models: Megatron-core trains while "
    "SGLang generates.",
)

ConfigOption = Annotated[
    Path | None, Option("--config", help="YAML file of the run (see configs/).")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[SETTING=VALUE]...",
        help="Settings that override the file, e.g. schedule.concurrency=128 optimizer.lr=1e-6",
    ),
]
SetOption = Annotated[
    list[str] | None, Option("--set", help="SETTING=VALUE; may be given several times.")
]
Wide = Annotated[bool, Option("--wide", help="Print all columns, wider than 80 characters.")]
Assumptions = Annotated[
    bool, Option("--assumptions", help="Print every assumption, not only three.")
]
FromStep = Annotated[
    int | None,
    Option(help="With --resume: step of the checkpoint to return to; default: the newest."),
]
Session = Annotated[
    str | None, Option(help="On several nodes: a new name, equal on all nodes (launch/slurm).")
]
Index = Annotated[int, Option(help="With --session: this node's number, from 0.")]
DryRun = Annotated[
    bool, Option("--dry-run", help="Check everything, show what would be done, create nothing.")
]


def main() -> None:
    """Run the command that the command line names. If it raises an expected error, print only the
    error's message and exit with the error's exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Megatron would print this warning in every process, between the lines of progress. `doctor`
    # reports missing packages and what is used instead.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        check_file_names()
        with translating_disk_errors():
            app(standalone_mode=True)
    except UserError as error:
        _exit_with(f"error: {error}", 2)
    except ComponentFailure as error:
        _exit_with(f"error: {error}", 1)
    except Terminated:
        _exit_with("ended by SIGTERM", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _exit_with("ended by Ctrl-C", 130)
    except SystemExit as ended:
        if ended.code == 130:  # After Ctrl-C, typer exits with this code and prints nothing.
            typer.echo("ended by Ctrl-C", err=True)
        raise


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _exit_with(message: str, code: int) -> None:
    typer.echo(message, err=True)
    raise SystemExit(code)


def _need(config: Path | None, command: str) -> Path:
    """Return `config`, the value of --config; raise UserError if it is missing. `command` is the
    command that needs it."""
    if config is None:
        raise UserError(f"megatron-async {command} requires --config FILE (configs/ has examples)")
    return config


def _check_start(config: Path | None, resume: Path | None, from_step: int | None) -> None:
    """Raise UserError if --config and --resume are combined, or --from-step is used without
    --resume."""
    if from_step is not None and resume is None:
        raise UserError(f"--from-step is {from_step}; it requires --resume RUN, which is not set")
    if resume is not None and config is not None:
        raise UserError(
            f"--config is {config}, which cannot be combined with --resume: {resume} has its own "
            "config.yaml. Remove --config."
        )


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigOption = None,
    resume: Annotated[
        Path | None, Option(help="Run directory to resume, from its newest intact checkpoint.")
    ] = None,
    from_step: FromStep = None,
    dry_run: DryRun = False,
) -> None:
    """Train by RL on this machine: start engines, trainers and all other processes of a run.

    Writes runs/NAME/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, trajectories.sqlite}.
    Ctrl-C ends the run cleanly; `--resume runs/NAME` resumes it with its unfinished trajectories.
    `--from-step N` first returns to an older checkpoint; newer ones are renamed to
    checkpoints/abandoned_*.
    """
    with gc_disabled():
        from megatron_async.commands import train as commands
        from megatron_async.config import load_config

    _check_start(config, resume, from_step)
    if resume is not None:
        commands.resume_command(resume, overrides or [], from_step, dry=dry_run)
    elif dry_run:
        commands.dry_run(load_config(_need(config, "train"), overrides or []))
    else:
        settings = load_config(_need(config, "train"), overrides or [])
        commands.start_run(settings, "megatron-async train")


@app.command()
def sft(
    overrides: Overrides = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None,
        Option(help="Directory for the Hugging Face checkpoint; default: runs/NAME-sft/hf."),
    ] = None,
    session: Session = None,
    index: Index = 0,
    from_teacher: Annotated[
        str | None,
        Option(help="Train on this model's responses that the reward accepts: URL or directory."),
    ] = None,
) -> None:
    """Fine-tune on worked answers (responses to imitate) with the Megatron trainer that RL uses;
    write a Hugging Face checkpoint."""
    from megatron_async.commands.sft import sft_command

    sft_command(_need(config, "sft"), overrides or [], out, session, index, from_teacher)


@app.command()
def gateway(
    model: Annotated[Path | None, Option(help="Model directory; default: model.path.")] = None,
    port: Annotated[
        int, Option(min=0, max=65535, help="Port on the loopback address; 0: any free port.")
    ] = 0,
    overrides: Overrides = None,
    config: ConfigOption = None,
) -> None:
    """Serve a model to agents by the OpenAI chat API, without training."""
    from megatron_async.commands.gateway import gateway_command

    gateway_command(_need(config, "gateway"), overrides or [], model, port)


@app.command("eval")
def evaluate(
    model: Annotated[
        list[Path] | None, Option(help="Hugging Face checkpoint; may be given several times.")
    ] = None,
    samples: Annotated[
        Path | None, Option(help="New JSONL file for the responses (eval.save_samples).")
    ] = None,
    overrides: Overrides = None,
    config: ConfigOption = None,
) -> None:
    """Measure the accuracy of checkpoints on the evaluation sets, with an engine."""
    from megatron_async.commands.evaluation import eval_command

    eval_command(_need(config, "eval"), overrides or [], model or [], samples)


@app.command()
def score(
    data: Annotated[Path, Option(help="File of rows with `input_ids` and `loss_mask`.")],
    out: Annotated[Path, Option(help="New safetensors file for `logprobs` and `cu_seqlens`.")],
    overrides: Overrides = None,
    config: ConfigOption = None,
    session: Session = None,
    index: Index = 0,
) -> None:
    """Compute log-probs of given tokens with the trainer's model, at the layout of `parallel`.

    The temperature is sampling.temperature. The weights are those of model.path, or of
    model.checkpoint if it is set.
    """
    from megatron_async.commands.score import score_command

    score_command(_need(config, "score"), overrides or [], data, out, session, index)


@app.command()
def reward(
    responses: Annotated[Path, Option(help="File of rows with `response` (docs/rewards.md).")],
    overrides: Overrides = None,
    config: ConfigOption = None,
) -> None:
    """Score the responses of a file as a run would; print components, failures and times."""
    from megatron_async.commands.reward import reward_command

    reward_command(_need(config, "reward"), overrides or [], responses)


@app.command()
def init(
    directory: Annotated[Path, Argument(help="New directory.")],
    reward: Annotated[bool, Option("--reward", help="A reward function (default).")] = False,
    environment: Annotated[bool, Option("--environment", help="Multi-turn environment.")] = False,
    agent: Annotated[bool, Option("--agent", help="A program that calls the policy.")] = False,
    tools: Annotated[bool, Option("--tools", help="Methods that the policy may call.")] = False,
    model: Annotated[
        Path | None, Option(help="Model to train; default: the quickstart's, or a random one.")
    ] = None,
) -> None:
    """Write a small project to start from, which trains without changes."""
    from megatron_async.commands.init import init_command

    options = {"reward": reward, "environment": environment, "agent": agent, "tools": tools}
    kinds = [kind for kind, is_set in options.items() if is_set] or ["reward"]
    if len(kinds) > 1:
        raise UserError(f"--{' and --'.join(kinds)} cannot be combined. Choose one of them.")
    init_command(kinds[0], directory, model)


@app.command()
def quickstart(
    overrides: Overrides = None,
    config: Annotated[Path, Option(help="YAML file.")] = Path("configs/quickstart.yaml"),
) -> None:
    """Build a tiny model, fine-tune it, train it by RL, and show what it has learned.

    The settings are for two CPU cores; launch/quickstart.sh runs them on the CPU of GPU machines
    too.
    """
    from megatron_async.commands.quickstart import quickstart as run
    from megatron_async.config import load_config

    run(load_config(config, list(overrides or [])))


@app.command()
def rollout(
    run_directory: Annotated[Path, Argument(help="runs/NAME")],
    ray_address: Annotated[str, Option(help="host:port of a running Ray cluster.")],
) -> None:
    """Run the rollout side of a run in a Ray cluster, for trainers that torchrun starts separately.

    Ends when the trainers have ended. `launch` sets up both sides; this command is the rollout side
    only.
    """
    from megatron_async.launcher.node import drive_rollout
    from megatron_async.launcher.preflight import check_probe_tolerance, check_run
    from megatron_async.launcher.run_lock import hold_run_lock
    from megatron_async.run_directory import RunDirectory

    directory, settings = RunDirectory.launched(run_directory)
    with hold_run_lock(directory, "megatron-async rollout"):
        check_run(settings)
        check_probe_tolerance(settings)
        outcome = drive_rollout(settings, directory, ray_address, None)
    typer.echo(f"the trainers have ended: {outcome.value}")


@app.command()
def launch(
    overrides: Overrides = None,
    config: ConfigOption = None,
    resume: Annotated[Path | None, Option(help="Run directory to resume.")] = None,
    from_step: FromStep = None,
    slurm: Annotated[bool, Option("--slurm", help="Write a job script and submit it.")] = (False),
    dry_run: DryRun = False,
    gpus_per_node: Annotated[int, Option(help="GPUs of a node; 0: nodes without GPUs.")] = 8,
    gpu: Annotated[str, Option(help="GPU of the nodes, such as H100 or H200.")] = "H100",
    engine_nodes: Annotated[
        int | None, Option(min=1, help="Nodes with engines; default: enough for the engines' GPUs.")
    ] = None,
    time_limit: Annotated[str, Option("--time", help="Slurm time limit.")] = "24:00:00",
    sbatch: Annotated[
        list[str] | None, Option(help="Further sbatch options, e.g. `--sbatch=--partition=gpu`.")
    ] = None,
) -> None:
    """Run on several nodes: submit a Slurm job, or print the command to start on every node."""
    from megatron_async.commands.launch import Cluster, launch_run

    cluster = Cluster(gpus_per_node, engine_nodes, time_limit, tuple(sbatch or ()), gpu)
    _check_start(config, resume, from_step)
    if resume is None:
        _need(config, "launch")
    text = launch_run(
        config, resume, overrides or [], cluster, slurm=slurm, dry_run=dry_run, from_step=from_step
    )
    typer.echo(text)


@app.command()
def convert(
    direction: Annotated[Literal["hf-to-megatron", "megatron-to-hf"], Argument()],
    src: Annotated[Path, Option(help="Hugging Face directory; or a checkpoint or runs/NAME.")],
    dst: Annotated[Path, Option(help="New directory.")],
    tp: Annotated[
        int, Option(min=1, help="hf-to-megatron: tensor-parallel size of the files.")
    ] = 1,
    pp: Annotated[int, Option(min=1, help="hf-to-megatron: pipeline-parallel size.")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="Default: the source's.")
    ] = None,
    model: Annotated[
        Path | None,
        Option(help="megatron-to-hf: directory with config and tokenizer; default: the run's."),
    ] = None,
    family: Annotated[str, Option(help="model.family, for a user-defined model family.")] = "",
    shard_gb: Annotated[
        float, Option(min=1e-9, help="megatron-to-hf: limit of an output file, in gigabytes.")
    ] = 5.0,
) -> None:
    """Convert weights between Hugging Face and this trainer's checkpoints, one tensor at a time."""
    from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf

    if direction == "hf-to-megatron":
        hf_to_megatron(
            src, dst, tensor=tp, pipeline=pp, dtype=dtype, family=family, show_progress=True
        )
        typer.echo(f"checkpoint in {dst}; a run starts from it with model.checkpoint={dst}")
    else:
        found = megatron_to_hf(
            src, dst, model=model, dtype=dtype, max_shard_bytes=int(shard_gb * 1e9),
            family=family, show_progress=True,
        )  # fmt: skip
        typer.echo(f"{found.path} is now in {dst}")


@app.command()
def report(
    run_directory: Annotated[list[Path], Argument(help="runs/NAME; several runs are compared.")],
    out: Annotated[
        Path | None, Option(help="File for the page; default: report.html in the first run.")
    ] = None,
) -> None:
    """Print the closing table of a run, and write a report page (one HTML file)."""
    from megatron_async.commands.report import report_command

    report_command(run_directory, out)


@app.command()
def trace(
    run_directory: Annotated[Path, Argument(help="runs/NAME")],
    out: Annotated[Path | None, Option(help="File; default: trace.json in the run.")] = None,
) -> None:
    """Write requests, weight updates, trainer phases and scores of the newest steps, for
    Perfetto."""
    from megatron_async.commands.trace import trace_command

    trace_command(run_directory, out)


@app.command()
def trajectories(
    run_directory: Annotated[Path, Argument(help="runs/NAME")],
    state: Annotated[
        str | None, Option(help="Only this state: partial, finished, scored, batched, ...")
    ] = None,
    show: Annotated[int | None, Option(help="ID of a trajectory to print completely.")] = None,
    limit: Annotated[int, Option(min=0, help="Number of trajectories to list; 0: all.")] = 50,
    exported: Annotated[
        bool, Option("--exported", help="Also list trajectories that compaction has exported.")
    ] = False,
    drop: Annotated[
        int | None,
        Option(help="ID of a trajectory to drop permanently, with its group, from a stopped run."),
    ] = None,
) -> None:
    """List the trajectories of a run, or print one: prompt, segments with versions, reward.

    `--show` also finds exported trajectories.
    """
    from megatron_async.commands.trajectories import drop_command, list_command, show_command

    if drop is not None and show is not None:
        raise UserError(f"--drop {drop} cannot be combined with --show {show}")
    if drop is not None:
        drop_command(run_directory, drop)
    elif show is not None:
        show_command(run_directory, show)
    else:
        list_command(run_directory, state, limit, exported)


@app.command()
def simulate(
    overrides: Overrides = None,
    config: ConfigOption = None,
    setting: SetOption = None,
    sweep: Annotated[
        list[str] | None, Option(help="SETTING=V1,V2,...; several sweeps form a Cartesian product.")
    ] = None,
    presets: Annotated[
        str, Option(help="Schedules to compare: sync,copris,... or all; empty = the file's.")
    ] = "",
    plot: Annotated[Path | None, Option(help="Write a PNG with the figures.")] = None,
    figures: Annotated[
        bool, Option("--figures", help="Print only memory, disk space and times of a run.")
    ] = False,
    wide: Wide = False,
    assumptions: Assumptions = False,
) -> None:
    """Run the real scheduler on a virtual clock: print throughput, idle shares, lag and
    recomputation."""
    from megatron_async.commands.simulate import figures_command, simulate_command

    changes = (overrides or []) + (setting or [])
    if figures:
        figures_command(_need(config, "simulate"), changes)
    else:
        file = _need(config, "simulate")
        simulate_command(file, changes, sweep or [], presets, plot, wide, assumptions)


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    setting: SetOption = None,
    presets: Annotated[
        str,
        Option(help="Schedules to search: sync,copris,... or all; empty = the file's, or all."),
    ] = "",
    top: Annotated[int, Option(min=1, help="Number of layouts to simulate and show.")] = 5,
    wide: Wide = False,
    assumptions: Assumptions = False,
) -> None:
    """Find the best division of GPUs, parallel sizes, and number of concurrent requests."""
    from megatron_async.commands.simulate import plan_command

    changes = (overrides or []) + (setting or [])
    plan_command(_need(config, "plan"), changes, presets, top, wide, assumptions)


@app.command("fit-lengths")
def fit_lengths(
    file: Annotated[Path, Argument(help="A run (runs/NAME), or a file of recorded lengths.")],
    cut: Annotated[
        int | None, Option(min=1, help="Limit that cut responses, in tokens; default: FILE's.")
    ] = None,
) -> None:
    """Fit a log-normal and a Weibull distribution to recorded response lengths, for simulate and
    plan."""
    from megatron_async.commands.simulate import fit_command

    fit_command(file, cut)


@app.command("profile-engine")
def profile_engine(
    url: Annotated[str, Option(help="Address of a running SGLang server.")],
    out: Annotated[Path, Option(help="New YAML file for simulate.cost_model.")],
    batches: Annotated[str, Option(help="Numbers of concurrent requests.")] = "1,4,16,64",
    contexts: Annotated[str, Option(help="Lengths of the prompts, in tokens.")] = "16,128",
    new_tokens: Annotated[int, Option(min=8, help="Decode steps of each measurement.")] = 64,
    api_key: Annotated[str, Option(help="The server's key, if it requires one.")] = "",
) -> None:
    """Measure decode steps and prefill of a running engine, and write its cost model."""
    from megatron_async.simulate.profile_engine import profile_command

    profile_command(url, out, batches, contexts, new_tokens, api_key)


@app.command()
def replay(
    run_directory: Annotated[Path, Argument(help="runs/NAME")],
    lineage: Annotated[
        int | None, Option(help="Only this lineage of the run; default: all.")
    ] = None,
    timeline: Annotated[bool, Option(help="Print what happened, batch by batch.")] = True,
) -> None:
    """Feed recorded events to the scheduler again; report the first action that differs, if any."""
    from megatron_async.commands.replay import replay_command

    replay_command(run_directory, lineage, timeline)


@app.command()
def settings(
    section: Annotated[
        str, Argument(help="Section or setting, e.g. schedule or engines.count.")
    ] = "",
    overrides: Overrides = None,
    of: Annotated[
        Path | None, Option("--of", help="Configuration file whose values are printed too.")
    ] = None,
) -> None:
    """Print every setting: name, type, range, default, meaning; with --of also its value in a
    file."""
    from megatron_async.commands.settings import settings_command

    settings_command(section, of, overrides or [])


@app.command()
def doctor(overrides: Overrides = None, config: ConfigOption = None) -> None:
    """Print what is installed, what a run will use, and why.

    With --config, also print what `train --dry-run` prints; the exit code is 2 if `train` would
    refuse.
    """
    from megatron_async.commands.doctor import report_lines
    from megatron_async.commands.train import dry_run, show
    from megatron_async.config import load_config

    for line in report_lines():
        show(line)
    if config is not None:
        show("")
        dry_run(load_config(config, list(overrides or [])))


if __name__ == "__main__":
    main()
