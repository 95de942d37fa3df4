"""`megatron-async`: the command line.

Exit codes: 0 done; 1 a component that ran has failed; 2 bad input (one sentence that names the
setting and its value); 130 ended by Ctrl-C. Heavy imports happen inside the commands, so that
`--help` is instant.
"""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from megatron_async.errors import ComponentFailure, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of language models: Megatron-core trains, SGLang "
    "generates, and neither waits for the other.",
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="YAML file of the run (see configs/).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SETTING=VALUE]...",
        help="Settings that override the file, e.g. schedule.concurrency=128 optimizer.lr=1e-6",
    ),
]
FromStep = Annotated[
    int | None,
    typer.Option(help="With --resume: go on from the kept checkpoint of this step instead."),
]


def main() -> None:
    """Console script: run a command, turn the two known errors into sentences."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # `doctor` says what is missing and what is used instead; Megatron's warnings at every import
    # would bury the progress lines.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    try:
        app(standalone_mode=True)
    except UserError as error:
        _exit_with(f"error: {error}", 2)
    except ComponentFailure as error:
        _exit_with(f"error: {error}", 1)
    except KeyboardInterrupt:
        _exit_with("ended by Ctrl-C", 130)


def _exit_with(sentence: str, code: int) -> None:
    typer.echo(sentence, err=True)
    raise SystemExit(code)


def _need(config: Path | None, command: str) -> Path:
    if config is None:
        raise UserError(f"megatron-async {command} needs --config FILE (configs/ has examples)")
    return config


def _check_from_step(from_step: int | None, resume: Path | None) -> None:
    if from_step is not None and resume is None:
        raise UserError(f"--from-step is {from_step}, and there is no --resume RUN to go back in")


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with this run directory from its newest intact checkpoint."),
    ] = None,
    from_step: FromStep = None,
) -> None:
    """Train by RL: starts engines, trainers and everything between them on this machine.

    Writes runs/NAME/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, trajectories.sqlite}.
    Ctrl-C ends it cleanly; `--resume runs/NAME` goes on, with unfinished trajectories still there.
    With `--from-step N` it goes back first; newer checkpoints become checkpoints/abandoned_*.
    """
    from megatron_async.commands.report import closing_table, summarise, where_things_are
    from megatron_async.commands.rollback import rollback_to
    from megatron_async.config import load_config
    from megatron_async.launcher.claim import claimed, new_run
    from megatron_async.launcher.devices import split_of_this_machine
    from megatron_async.launcher.preflight import (
        check_one_machine,
        check_probe_tolerance,
        check_resume,
        check_run,
    )
    from megatron_async.launcher.supervisor import Supervisor
    from megatron_async.run_directory import RunDirectory

    _check_from_step(from_step, resume)
    with ExitStack() as stack:
        if resume is not None:
            if config is not None:
                raise UserError(
                    f"--resume {resume} has its own config.yaml; --config {config} is idle"
                )
            directory, settings = RunDirectory.find(resume, list(overrides or []), "--resume")
            stack.enter_context(claimed(directory, "megatron-async train --resume"))
        else:
            settings = load_config(_need(config, "train"), list(overrides or []))
        check_one_machine(settings)
        check_run(settings)
        check_probe_tolerance(settings)
        devices = split_of_this_machine(settings)
        if resume is not None:
            check_resume(directory)
            back = None if from_step is None else rollback_to(directory, from_step)
            directory.save_config(settings)
            for place in back.carry_out() if back is not None else ():
                typer.echo(f"set aside: {place}")
        else:
            directory = stack.enter_context(new_run(settings, "megatron-async train"))
        try:
            Supervisor(settings, directory, devices).run()
        except KeyboardInterrupt:
            typer.echo(f"go on with: megatron-async train --resume {directory.path}", err=True)
            raise
    from rich.console import Console

    console = Console(soft_wrap=True)
    console.print(closing_table(summarise(directory), directory))
    console.print(where_things_are(directory), highlight=False)


@app.command()
def sft(
    out: Annotated[Path, typer.Option(help="Where the Hugging Face checkpoint goes.")],
    overrides: Overrides = None,
    config: ConfigOption = None,
    session: Annotated[
        str | None,
        typer.Option(help="On several nodes: a new name, alike on all of them (launch/slurm)."),
    ] = None,
    index: Annotated[int, typer.Option(help="This node's number from 0, with --session.")] = 0,
) -> None:
    """Fine-tune on worked answers with the same Megatron trainer; leaves a HF checkpoint."""
    from megatron_async.commands.sft import SFT, run_sft, run_sft_on_nodes
    from megatron_async.config import load_config
    from megatron_async.launcher.claim import new_run
    from megatron_async.launcher.devices import check_trainer_here
    from megatron_async.launcher.preflight import check_one_machine, check_run

    settings = load_config(_need(config, "sft"), list(overrides or []))
    if session is None:
        if index:
            raise UserError(f"--index is {index}, and there is no --session for it to be part of")
        check_one_machine(settings)
    check_run(settings, generates=False)
    check_trainer_here(settings)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} exists and is not empty")
    if session is None:
        with new_run(settings, SFT) as directory:
            run_sft(settings, directory, out)
    else:
        run_sft_on_nodes(settings, out, session, index)
    if index == 0:
        typer.echo(f"checkpoint in {out}")


@app.command("eval")
def evaluate(
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Hugging Face checkpoint; may be given several times."),
    ] = None,
    overrides: Overrides = None,
    config: ConfigOption = None,
) -> None:
    """Held-out accuracy of one or several checkpoints, measured on an SGLang engine."""
    import tempfile

    from megatron_async.commands.evaluation import evaluate_checkpoints
    from megatron_async.config import load_config
    from megatron_async.launcher.preflight import check_model
    from megatron_async.rollout.evaluate import EvalResult

    settings = load_config(_need(config, "eval"), list(overrides or []))
    paths = list(model or []) or [Path(settings.model.path)]
    for path in paths:
        check_model(path)

    def show(path: Path, result: EvalResult) -> None:
        typer.echo(
            f"{path}: accuracy {100 * result.accuracy:.1f} % of {result.answers} answers, "
            f"{result.length_mean:.1f} tokens each, {result.seconds:.1f} s"
        )

    with tempfile.TemporaryDirectory(prefix="megatron-async-eval-") as logs:
        evaluate_checkpoints(settings, paths, Path(logs), show)


@app.command()
def quickstart(
    overrides: Overrides = None,
    config: Annotated[Path, typer.Option(help="YAML file.")] = Path("configs/quickstart.yaml"),
) -> None:
    """Build a tiny model, fine-tune it, train it by RL, and show what was learned.

    The settings are for two CPU cores; launch/quickstart.sh runs it there on GPU machines too.
    """
    from megatron_async.commands.quickstart import quickstart as run
    from megatron_async.config import load_config

    run(load_config(config, list(overrides or [])))


@app.command()
def rollout(
    run_directory: Annotated[Path, typer.Argument(help="runs/NAME")],
    ray_address: Annotated[str, typer.Option(help="host:port of a running Ray cluster.")],
) -> None:
    """Hold the rollout side of a run in a Ray cluster, for trainers that torchrun starts.

    Ends when the trainers have ended. `launch` sets all of this up; this is the part by itself.
    """
    from megatron_async.launcher.claim import claimed
    from megatron_async.launcher.node import drive_rollout
    from megatron_async.launcher.preflight import check_probe_tolerance, check_run
    from megatron_async.run_directory import RunDirectory

    directory, settings = RunDirectory.find(run_directory, [])
    with claimed(directory, "megatron-async rollout"):
        check_run(settings)
        check_probe_tolerance(settings)
        outcome = drive_rollout(settings, directory, ray_address, None)
    typer.echo(f"the trainers have ended: {outcome.value}")


@app.command()
def launch(
    overrides: Overrides = None,
    config: ConfigOption = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run directory.")] = None,
    from_step: FromStep = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a job script and submit it.")] = (
        False
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, make nothing.")
    ] = False,
    gpus_per_node: Annotated[int, typer.Option(help="0: nodes without GPUs.")] = 8,
    engine_nodes: Annotated[
        int | None, typer.Option(help="Rollout nodes; default: as many as the engines' GPUs need.")
    ] = None,
    time_limit: Annotated[str, typer.Option("--time", help="Slurm time limit.")] = "24:00:00",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="More sbatch options, e.g. --sbatch=--partition=gpu")
    ] = None,
) -> None:
    """Run over several nodes: a Slurm job, or the commands to start by hand on every node."""
    from megatron_async.commands.launch import Cluster, launch_run

    cluster = Cluster(gpus_per_node, engine_nodes, time_limit, tuple(sbatch or ()))
    _check_from_step(from_step, resume)
    if resume is None:
        config = _need(config, "launch")
    elif config is not None:
        raise UserError(f"--resume {resume} has its own config.yaml; --config {config} is idle")
    typer.echo(
        launch_run(
            config,
            resume,
            list(overrides or []),
            cluster,
            slurm=slurm,
            dry_run=dry_run,
            from_step=from_step,
        )
    )


@app.command()
def convert(
    direction: Annotated[str, typer.Argument(metavar="hf-to-megatron|megatron-to-hf")],
    src: Annotated[Path, typer.Option(help="Hugging Face directory; checkpoint or runs/NAME.")],
    dst: Annotated[Path, typer.Option(help="New directory.")],
    tp: Annotated[int, typer.Option(help="hf-to-megatron: tensor-parallel size of the files.")] = 1,
    pp: Annotated[int, typer.Option(help="hf-to-megatron: pipeline-parallel size.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as in the source.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="megatron-to-hf: directory of config and tokenizer; default: the run's."),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(help="megatron-to-hf: largest output file, in gigabytes.")
    ] = 5.0,
) -> None:
    """Convert weights between Hugging Face and this trainer's checkpoints, in a stream."""
    from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf

    if direction == "hf-to-megatron":
        hf_to_megatron(src, dst, tensor=tp, pipeline=pp, dtype=dtype, show_progress=True)
        typer.echo(f"checkpoint in {dst}; a run starts from it with model.checkpoint={dst}")
    elif direction == "megatron-to-hf":
        if shard_gb <= 0:
            raise UserError(f"--shard-gb is {shard_gb}; it must be positive")
        found = megatron_to_hf(
            src, dst, model=model, dtype=dtype, max_shard_bytes=int(shard_gb * 1e9),
            show_progress=True,
        )  # fmt: skip
        typer.echo(f"{found.path} is now in {dst}")
    else:
        raise UserError(
            f"convert direction is {direction!r}; it must be hf-to-megatron or megatron-to-hf"
        )


@app.command()
def report(run_directory: Annotated[Path, typer.Argument(help="runs/NAME")]) -> None:
    """The closing table of a run, from its metrics file."""
    from rich.console import Console

    from megatron_async.commands.report import closing_table, summarise, where_things_are
    from megatron_async.run_directory import RunDirectory

    directory, _ = RunDirectory.find(run_directory, [])
    console = Console(soft_wrap=True)
    console.print(closing_table(summarise(directory), directory))
    console.print(where_things_are(directory), highlight=False)


@app.command()
def trajectories(
    run_directory: Annotated[Path, typer.Argument(help="runs/NAME")],
    state: Annotated[
        str | None, typer.Option(help="Only this state: partial, finished, scored, batched, ...")
    ] = None,
    show: Annotated[int | None, typer.Option(help="Print this trajectory whole.")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="List the newest so many; 0: all of them.")
    ] = 50,
    exported: Annotated[
        bool, typer.Option("--exported", help="List those too that compaction has exported.")
    ] = False,
    drop: Annotated[
        int | None,
        typer.Option(help="Take this one out of a run that has stopped, with its group, for good."),
    ] = None,
) -> None:
    """List the trajectories of a run, or print one: prompt, segments with versions, reward.

    `--show` finds exported ones by itself.
    """
    from rich.console import Console

    from megatron_async.checkpoint.manifest import list_checkpoints
    from megatron_async.launcher.claim import claimed
    from megatron_async.run_directory import RunDirectory
    from megatron_async.store import exported as exported_store
    from megatron_async.store.drop import drop_group_of
    from megatron_async.store.reader import StoreReader
    from megatron_async.store.view import details, listing
    from megatron_async.tasks.text_task import load_tokenizer
    from megatron_async.trajectory.types import TrajectoryState

    directory, settings = RunDirectory.find(run_directory, [])
    if state is not None and state not in set(TrajectoryState):
        raise UserError(f"--state is {state!r}; it must be one of {', '.join(TrajectoryState)}")
    if drop is not None:
        if show is not None:
            raise UserError(f"--drop {drop} cannot be combined with --show {show}")
        with claimed(directory, "trajectories --drop"):
            newest = next(iter(list_checkpoints(directory.checkpoints)), None)
            committed = None if newest is None else newest.manifest.version
            gone = drop_group_of(directory.store_file, drop, committed)
        typer.echo(f"dropped (user), with its group: {', '.join(map(str, gone))}")
        return
    console = Console(soft_wrap=True)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        if show is not None:
            found = exported_store.find(reader, show)
            tokenizer = load_tokenizer(settings.model.path)
            console.print(details(found, lambda ids: tokenizer.decode(list(ids))))
            return
        wanted = None if state is None else TrajectoryState(state)
        older = exported_store.summaries(reader) if exported else []
        # Its ids are older than most of the store's, but not than all of them.
        listed = sorted([*older, *reader.summaries()], key=lambda s: s.trajectory_id)
        console.print(listing(listed, state=wanted, limit=limit or None))
        missing = "" if exported else exported_store.missing_line(reader)
        if missing:
            console.print(missing, markup=False, highlight=False)


@app.command()
def simulate(
    overrides: Overrides = None,
    config: ConfigOption = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="SETTING=VALUE; may be given several times.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="SETTING=V1,V2,...; several sweeps make a cartesian product."),
    ] = None,
    presets: Annotated[
        str, typer.Option(help="Schedules to compare: sync,copris,... or all; empty = the file's.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG with the figures.")] = None,
) -> None:
    """Run the real scheduler on a virtual clock: throughput, idle shares, lag, recomputation."""
    from megatron_async.commands.simulate import simulate_command

    given = [*(overrides or []), *(setting or [])]
    simulate_command(_need(config, "simulate"), given, sweep or [], presets, plot)


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="SETTING=VALUE; may be given several times.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are simulated and shown.")] = 5,
) -> None:
    """The best split of simulate.gpus GPUs, parallel sizes that fit, and N'; with runner-ups."""
    from megatron_async.commands.simulate import plan_command

    plan_command(_need(config, "plan"), [*(overrides or []), *(setting or [])], top)


@app.command("fit-lengths")
def fit_lengths(
    file: Annotated[
        Path,
        typer.Argument(help="Recorded lengths, e.g. runs/NAME/export/trajectories.jsonl."),
    ],
    cut: Annotated[
        int | None,
        typer.Option(min=1, help="Limit at which responses were cut; default: as FILE says."),
    ] = None,
) -> None:
    """Fit a log-normal and a Weibull to recorded response lengths, for simulate and plan."""
    from megatron_async.commands.simulate import fit_command

    fit_command(file, cut)


@app.command("profile-engine")
def profile_engine(
    url: Annotated[str, typer.Option(help="Of a running SGLang server.")],
    out: Annotated[Path, typer.Option(help="YAML file for simulate.cost_model.")],
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Prompt tokens of each request.")] = "16,128",
    new_tokens: Annotated[int, typer.Option(min=8, help="Decode steps of a measurement.")] = 64,
    api_key: Annotated[str, typer.Option(help="The server's key, if it asks for one.")] = "",
) -> None:
    """Measure decode steps and prefill of a running engine; write its cost model."""
    from megatron_async.simulate.profile_engine import profile_command

    profile_command(url, out, batches, contexts, new_tokens, api_key)


@app.command()
def replay(
    run_directory: Annotated[Path, typer.Argument(help="runs/NAME")],
    lineage: Annotated[
        int | None, typer.Option(help="Only this line of the run; default: all of them.")
    ] = None,
    timeline: Annotated[bool, typer.Option(help="Print what happened, batch by batch.")] = True,
) -> None:
    """Feed recorded events to the scheduler again: the same actions, or the first that differs."""
    from megatron_async.commands.replay import replay_command

    replay_command(run_directory, lineage, timeline)


@app.command()
def doctor() -> None:
    """What is installed, what will be used, and why."""
    from megatron_async.commands.doctor import report_lines

    for line in report_lines():
        typer.echo(line)


if __name__ == "__main__":
    main()
