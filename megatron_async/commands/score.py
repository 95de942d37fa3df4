"""`megatron-async score`: computes the log-probs of given tokens with the trainer's model, in any
parallel layout."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import typer

from megatron_async.config import load_config
from megatron_async.errors import UserError
from megatron_async.files.disk import writing
from megatron_async.launcher.devices import check_trainer_here
from megatron_async.launcher.preflight import check_policy
from megatron_async.launcher.rank_job import RankJob, check_session, directory_of
from megatron_async.train_loop.score_rank import read_sequences


def score_command(
    config_file: Path,
    overrides: Sequence[str],
    data: Path,
    out: Path,
    session: str | None,
    index: int,
) -> None:
    """Compute the log-probs of the token sequences in `data` and write them to `out`.

    Args:
        config_file: YAML file with the settings.
        overrides: Settings that replace settings of the file.
        data: JSON Lines or Parquet file whose rows are sequences, with the columns `input_ids` and
            `loss_mask`.
        out: New safetensors file.
        session: Session that connects several nodes; None on one machine.
        index: Index of this node in the session.

    Raises:
        UserError: Bad input.
        ComponentFailure: A rank failed.
    """
    config = load_config(config_file, overrides)
    check_session(config, session, index)
    architecture = check_policy(config, tokenizer=False)
    check_trainer_here(config)
    if out.exists():
        raise UserError(f"--out is {out}, which already exists. Remove it, or name another file.")
    count = sum(1 for _ in read_sequences(data, architecture.vocab_size))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{config.name}-score" if session is None else f"{config.name}-score-{session}"
    config = config.model_copy(update={"name": name})
    job = RankJob(
        "score", "megatron_async.train_loop.score_rank", (str(data.absolute()), str(out.absolute()))
    )
    with directory_of(config, "megatron-async score", session, index) as (directory, node):
        job.run(config, directory, node)
    # With several nodes the directory stays, because other nodes may still write their logs.
    if session is None:
        shutil.rmtree(directory.path)
    if index == 0:
        typer.echo(f"wrote the log-probs of {count:,} sequences to {out}")
