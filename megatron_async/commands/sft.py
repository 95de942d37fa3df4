"""Supervised fine-tuning: the same Megatron trainer on worked answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from megatron_async.config import RunConfig, load_config
from megatron_async.errors import UserError
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import check_trainer_here
from megatron_async.launcher.preflight import check_run
from megatron_async.launcher.rank_job import RankJob, check_session, directory_of
from megatron_async.launcher.session import TrainerNode
from megatron_async.run_directory import RunDirectory

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
    from megatron_async.commands.teacher import (  # not for every rank
        check_teacher,
        sample_from_teacher,
    )

    config = load_config(config_file, overrides)
    check_session(config, session, index)
    if session is not None and teacher is not None:
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
    with directory_of(config, SFT, session, index) as (directory, node):
        if teacher is not None:
            config = sample_from_teacher(config, directory, teacher)
            checked = check_run(config, generates=False)
            typer.echo(checked.summary)
            config = checked.config
            directory.save_config(config)
        run_sft(config, directory, out, node)
    if index == 0:
        typer.echo(f"checkpoint in {out}; to go on from it: train with model.path={out}")


def own_name(config: RunConfig) -> RunConfig:
    """The settings under NAME-sft, so that `train` with the same file finds its name free."""
    name = config.name
    return config.model_copy(update={"name": name if name.endswith("sft") else f"{name}-sft"})


def run_sft(
    config: RunConfig, directory: RunDirectory, destination: Path, node: TrainerNode | None = None
) -> None:
    """Train, and leave a Hugging Face directory at `destination`."""
    module = "megatron_async.train_loop.sft_rank"
    RankJob("sft", module, (str(destination),), config.sft.batches).run(config, directory, node)
