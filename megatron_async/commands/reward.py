"""`megatron-async reward`: scores the responses of a file as a run would, without a run."""

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
    """Score the responses of a file and print each score with its components, failures and time;
    then print what the scorers have logged.

    Args:
        config_file: YAML file with the reward's settings.
        overrides: Settings that replace settings of the file.
        responses: File whose rows each contain a problem, or the index of one of the task, and one
            or more responses to it.

    Raises:
        UserError: A row is not valid; raised before anything is scored.
        typer.Exit: With code 1, if a score failed.
    """
    config = load_config(config_file, overrides)
    lines, jobs = zip(*_read(config, responses), strict=True)
    with private_directory() as logs:
        found = asyncio.run(scored(config.scorers.logging_to(logs), jobs))
        logged = "".join(file.read_text(errors="replace") for file in logs.iterdir())
    for line, scores in zip(lines, found, strict=True):
        for score in scores:
            typer.echo(f"{line}: {_described(score)}")
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
    """Yield a pair for each row of `file`: a text such as "line 3", and the payload of the row's
    problem with the responses to it."""
    rows = open_rows(str(file), "", "--responses")
    data, source = config.task.files()[0], None
    columns = Columns.of(data.layout, data.columns, config.task.prompt_template)
    for number, row in enumerate(rows):
        if isinstance(row, UserError):
            raise row
        where, response, index = rows.where(number), row.pop("response", None), row.get("index")
        texts = response if isinstance(response, list) else [response]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{where}: `response` must be a text, or a list of texts to the same prompt, got "
                f"{short_repr(response)}"
            )
        if row.keys() != {"index"}:
            problem = columns.problem(row, where)
        elif type(index) is int and index >= 0:
            source = source or build_source(config.task)
            problem = source.train(index)
        else:
            raise UserError(
                f"{where}: `index` must be an integer of at least 0, got {short_repr(index)}"
            )
        yield f"line {re.split(':|, row ', where)[-1]}", (problem.payload, texts)


def _described(score: ResponseScore) -> str:
    """Format a response's score with its components, time and failures."""
    reward = "no score" if score.reward is None else f"{score.reward:.4g}"
    components = ", ".join(f"{name} {value:.4g}" for name, value in score.detail.items())
    text = f"{reward}{f' ({components})' if components else ''}, {score.seconds:.3f} s"
    return "\n    ".join([text, *score.failures])
