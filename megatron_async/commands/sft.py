"""`megatron-async sft`: supervised fine-tuning on worked answers with the Megatron trainer that RL
uses."""

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
    """Fine-tune on this machine, or as node `index` of a session over several machines.

    Args:
        config_file: YAML file with the settings.
        overrides: Settings that replace settings of the file.
        out: Directory for the exported model; None for the run directory.
        session: Session that connects several nodes; None on one machine.
        index: Index of this node in the session.
        teacher: Address or path of a teacher whose responses are the training data; None to use the
            worked answers of the task.

    Raises:
        UserError: Bad input.
        ComponentFailure: A rank failed.
    """
    from megatron_async.commands.teacher import (  # Imported here, because few runs need a teacher.
        check_teacher,
        sample_from_teacher,
    )

    config = load_config(config_file, overrides)
    check_session(config, session, index)
    if session is not None and teacher is not None:
        raise UserError(
            f"--from-teacher {teacher} cannot be combined with --session. Sample on one machine, "
            "then set sft.data to the teacher.jsonl of its run directory."
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
        raise UserError(f"--out is {out}, which exists and is not empty. Name another directory.")
    with directory_of(config, SFT, session, index) as (directory, node):
        if teacher is not None:
            config = sample_from_teacher(config, directory, teacher)
            checked = check_run(config, generates=False)
            typer.echo(checked.summary)
            config = checked.config
            directory.save_config(config)
        run_sft(config, directory, out, node)
    if index == 0:
        typer.echo(f"wrote a checkpoint to {out}. To train it further, set model.path={out}.")


def own_name(config: RunConfig) -> RunConfig:
    """Return the settings with "-sft" added to the run's name, so that `train` with the same file
    can use the name itself. A name that ends with "sft" stays."""
    name = config.name
    return config.model_copy(update={"name": name if name.endswith("sft") else f"{name}-sft"})


def run_sft(
    config: RunConfig, directory: RunDirectory, destination: Path, node: TrainerNode | None = None
) -> None:
    """Fine-tune: run this machine's trainer ranks, which train and then export a Hugging Face model
    to `destination`.

    Args:
        config: The settings.
        directory: The run directory.
        destination: Where the model is written.
        node: This machine's part in a job over several machines; None for a job on one machine.
    """
    module = "megatron_async.train_loop.sft_rank"
    RankJob("sft", module, (str(destination),), config.sft.batches).run(config, directory, node)
