"""Supervised fine-tuning: the same Megatron trainer on worked answers.

`run_sft` supervises the ranks (`train_loop.sft_rank`) on one machine, `run_sft_on_nodes` on each of
several.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import typer

from megatron_async.config import RunConfig, load_config
from megatron_async.engines.nodes import node_address
from megatron_async.errors import UserError
from megatron_async.launcher.claim import new_run
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import check_trainer_here
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.preflight import check_one_machine, check_run
from megatron_async.launcher.processes import torchrun
from megatron_async.launcher.session import RENDEZVOUS_SECONDS, Session, TrainerNode, check_name
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.progress import Progress

SFT: Final = "megatron-async sft"


def sft_command(
    config_file: Path,
    overrides: Sequence[str],
    out: Path | None,
    session: str | None,
    index: int,
    teacher: str | None = None,
) -> None:
    """Fine-tune here, or as node `index` of `session`. Raises UserError or ComponentFailure."""
    from megatron_async.commands.teacher import check_teacher, taught  # not for every rank

    config = load_config(config_file, overrides)
    if session is None:
        if index:
            raise UserError(f"--index is {index}, and there is no --session for it to be part of")
        check_one_machine(config)
    elif teacher is not None:
        raise UserError(
            f"--from-teacher {teacher} cannot be combined with --session: sample on one machine, "
            "then set sft.data to the teacher.jsonl of its run directory"
        )
    if teacher is not None:
        check_teacher(config, teacher)
        config = derive(config, Machine.here(config)).config
    checked = check_run(config, generates=teacher is not None)
    if index == 0:
        typer.echo(checked.summary)
    config = own_name(checked.config)
    check_trainer_here(config)
    out = out or RunDirectory.of(config).hf_export
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} exists and is not empty")
    if session is None:
        with new_run(config, SFT, resumable=False) as directory:
            if teacher is not None:
                config = taught(config, directory, teacher)
                typer.echo(check_run(config, generates=False).summary)
                directory.save_config(config)
            run_sft(config, directory, out)
    else:
        run_sft_on_nodes(config, out, session, index)
    if index == 0:
        typer.echo(f"checkpoint in {out}; to go on from it: train with model.path={out}")


def own_name(config: RunConfig) -> RunConfig:
    """The settings under NAME-sft, so that `train` with the same file finds its name free."""
    name = config.name
    return config.model_copy(update={"name": name if name.endswith("sft") else f"{name}-sft"})


def run_sft(
    config: RunConfig, directory: RunDirectory, destination: Path, node: TrainerNode | None = None
) -> None:
    """Train in torchrun ranks, show progress, leave a Hugging Face directory at `destination`.

    `node`: this one of several, of which the first shows the progress. Raises UserError or
    ComponentFailure with the sentence of the rank that failed.
    """
    first = node is None or node.index == 0
    if first:
        directory.take_failure()
    with torchrun(
        config.parallel.ranks // (1 if node is None else node.count),
        "megatron_async.train_loop.sft_rank",
        *(str(directory.path), str(destination)),
        log_file=directory.logs / ("sft.log" if node is None else f"sft-{node.index}.log"),
        environment=trainer_environment(os.environ, one_machine=node is None),
        rendezvous=None if node is None else node.rendezvous(),
    ) as child:
        shown = config.telemetry.progress if first else "off"
        progress = Progress(directory.metrics_file, config.sft.steps, shown)
        code = progress.follow(child.exit_code, lambda: None)
    if code != 0:
        if first:
            directory.raise_failure(child.log_file)
        raise child.failure("sft")


def run_sft_on_nodes(config: RunConfig, destination: Path, session_name: str, index: int) -> None:
    """`run_sft` on one of `parallel.nodes` nodes, each of which calls this with its `index`.

    Node 0 makes the run directory, which all see. Raises UserError or ComponentFailure.
    """
    count = config.parallel.nodes
    if not 0 <= index < count:
        raise UserError(f"--index is {index}; parallel.nodes is {count}, so it is 0 to {count - 1}")
    check_name(session_name)
    directory = RunDirectory.of(config)
    with ExitStack() as stack:
        if index == 0:
            what = f"{SFT}, session {session_name}"
            stack.enter_context(new_run(config, what, resumable=False))
            session = Session.join(directory, session_name)
            stack.callback(session.close)
            session.begin()
        else:  # the directory may be another run's, and only the first node finds out
            session = Session.begun(directory, session_name, RENDEZVOUS_SECONDS)
        run_sft(config, directory, destination, TrainerNode(session, index, count, node_address()))
