"""`megatron-async reward`: a reward tried on responses of a file, without a run."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from megatron_async.config import RunConfig, load_config
from megatron_async.errors import UserError, short_repr
from megatron_async.files.private_directory import private_directory
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.pool import scored
from megatron_async.tasks.build import build_source
from megatron_async.tasks.layouts import Columns
from megatron_async.tasks.rows import open_rows


def reward_command(config_file: Path, overrides: Sequence[str], responses: Path) -> None:
    """Print each response's score, parts, failures and time; then what the scorers have logged.

    Raises UserError, for a bad line before anything is scored; Exit 1 when a score has failed.
    """
    config = load_config(config_file, overrides)
    places, jobs = zip(*_read(config, responses), strict=True)
    with private_directory() as logs:
        found = asyncio.run(scored(config.scorers.logging_to(logs), jobs))
        logged = "".join(file.read_text(errors="replace") for file in logs.iterdir())
    for place, scores in zip(places, found, strict=True):
        for score in scores:
            typer.echo(f"{place}: {_described(score)}")
    every = [score for scores in found for score in scores]
    mean = sum(score.reward or 0.0 for score in every) / len(every)
    failed = sum(bool(score.failures) for score in every)
    typer.echo(f"{len(every)} responses, mean score {mean:.4g}, {failed} failed")
    typer.echo(logged, err=True, nl=False)
    if failed:
        raise typer.Exit(1)


def _read(
    config: RunConfig, file: Path
) -> Iterator[tuple[str, tuple[Mapping[str, Any], Sequence[str]]]]:
    """Yield the place of each line, its problem's payload and the responses to it."""
    rows = open_rows(str(file), "", "--responses")
    data, source = config.task.files()[0], None
    columns = Columns.of(data.layout, data.columns, config.task.prompt_template)
    for number, row in enumerate(rows):
        if isinstance(row, UserError):
            raise row
        where, given, index = rows.where(number), row.pop("response", None), row.get("index")
        texts = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(text, str) for text in texts):
            what = "a text, or a list of those to one prompt"
            raise UserError(f"{where}: `response` must be {what}, got {short_repr(given)}")
        if row.keys() != {"index"}:
            problem = columns.problem(row, where)
        elif type(index) is int and index >= 0:
            source = source or build_source(config.task)
            problem = source.train(index)
        else:
            raise UserError(
                f"{where}: `index` must be a whole number from 0, got {short_repr(index)}"
            )
        yield f"line {re.split(':|, row ', where)[-1]}", (problem.payload, texts)


def _described(score: ResponseScore) -> str:
    reward = "no score" if score.reward is None else f"{score.reward:.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in score.detail.items())
    text = f"{reward}{f' ({parts})' if parts else ''}, {score.seconds:.3f} s"
    return "\n    ".join([text, *score.failures])
