"""`megatron-async init`: writes a small project that trains on two CPU cores, as a starting point.

The files come from configs/projects. The data are sums, which the quickstart's model can solve.
"""

import json
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from megatron_async.errors import UserError
from megatron_async.files.disk import writing
from megatron_async.files.package_files import ROOT

QUICKSTART_MODEL: Final = Path("runs/quickstart/sft")
"""Path of the model that `megatron-async quickstart` has fine-tuned, relative to the directory in
which it was started."""
_ROWS: Final = 500


@dataclass(frozen=True)
class Project:
    """A kind of project. `what` describes its Python file, and `settings` are the lines of
    config.yaml that name the file."""

    what: str
    settings: str


PROJECTS: Final = {
    "reward": Project("a reward", "reward: reward.py:score"),
    "environment": Project(
        "an environment of several turns",
        "environment: environment.py:TwoAttempts\nepisode: {max_turns: 2}",
    ),
    "agent": Project(
        "an agent, a program that calls the policy",
        "agent: agent.py:solve\nepisode: {max_turns: 2}",
    ),
    "tools": Project(
        "a class of tools",
        "environment: tools.py:Calculator\nepisode: {tool_parser: qwen25, max_turns: 4}\n"
        'reward: {name: exact, arguments: {answer_marker: "#"}} # of the last answer',
    ),
}


def init_command(kind: str, directory: Path, model: Path | None) -> None:
    """Write a project into a new directory.

    Args:
        kind: Key of `PROJECTS`.
        directory: New directory.
        model: Model to train, which is not copied. None to copy `QUICKSTART_MODEL` into the project
            or, if that does not exist, to create a small model with random weights.

    Raises:
        UserError: The directory exists or cannot be written, or `model` is not a model.
    """
    if directory.exists():
        raise UserError(f"{directory} already exists. Name a new directory.")
    if ":" in str(directory.absolute()):
        raise UserError(
            f"{directory.absolute()} contains a colon, which import paths of code cannot contain. "
            "Name another directory."
        )
    if model is not None and not (model / "config.json").is_file():
        raise UserError(
            f"--model is {model}, which has no config.json. Name the directory of a model."
        )
    with writing(directory, "project"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".megatron-async-init-", dir=directory.parent))
        try:
            unfinished.chmod(0o755)
            about_model = _write_model(unfinished / "model", kind, model)
            _write_files(unfinished, kind, model, about_model)
            # Raises if another process has created the directory meanwhile.
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    typer.echo(f"wrote {directory}. {about_model} Next:")
    typer.echo(f"  cd {shlex.quote(str(directory))}")
    typer.echo("  megatron-async train --config config.yaml --dry-run")


def _write_files(directory: Path, kind: str, model: Path | None, about_model: str) -> None:
    """Write the project's settings, README, Python file and data into `directory`.

    Args:
        directory: Where the files are written.
        kind: Key of `PROJECTS`.
        model: The user's own model; None if the project has a model.
        about_model: Sentences about the model, for the README.
    """
    project, source = PROJECTS[kind], ROOT / "configs" / "projects"
    replaced = {
        "WHAT": project.what,
        "SOURCE": project.settings,
        "FILE": f"{kind}.py",
        "ABOUT_MODEL": about_model,
    }
    if model is not None:
        path = json.dumps(str(model.absolute()), ensure_ascii=False)
        replaced["{path: model}"] = f"{{path: {path}}}"
        replaced[", `model` the policy"] = ""
    for name in ("config.yaml", "README.md", f"{kind}.py"):
        text = (source / name).read_text()
        for placeholder, value in replaced.items():
            text = text.replace(placeholder, value)
        (directory / name).write_text(text)
    (directory / "data.jsonl").write_text("".join(_rows()))


def _write_model(path: Path, kind: str, model: Path | None) -> str:
    """Write the model of a new project to `path`; return a message about the model.

    It is a copy of the quickstart's model or, if that does not exist, a tiny model with random
    weights.

    Args:
        path: Where the model is written.
        kind: Key of `PROJECTS`.
        model: The user's own model, with which the project has no model, so that nothing is
            written.
    """
    from megatron_async.models.tiny_model import build_tiny_model

    if model is not None:
        return f"The model is {model.absolute()}."
    if (QUICKSTART_MODEL / "config.json").is_file():
        shutil.copytree(QUICKSTART_MODEL, path)
        about = "The model is a copy of the model that the quickstart fine-tuned."
    else:
        build_tiny_model(path, seed=1)
        about = (
            "The model has random weights, so rewards will stay near 0. For a model that solves "
            "most rows, run `megatron-async quickstart`, then `init --model runs/quickstart/sft`."
        )
    # The model's chat template ignores tools; this one shows them to the model.
    if kind == "tools":
        shutil.copy(ROOT / "configs" / "projects" / "chat_template.jinja", path)
        return (
            f"{about} It has not learned to call tools; examples/calculator fine-tunes a model to."
        )
    if kind != "reward":
        return (
            f"{about} Conversations add a line break to a prompt, which the model has not learned."
        )
    return about


def _rows() -> list[str]:
    """Return the lines of the project's data file: sums as prompts, with their answers."""
    from megatron_async.tasks.chain_sum import ChainSums

    sums = ChainSums(seed=1, min_terms=4, max_terms=9, max_digits=1)
    entries = map(sums.__getitem__, range(_ROWS))
    return [
        json.dumps(
            {
                "prompt": entry["metadata"]["expression"].replace(" ", "") + "=",
                "answer": entry["answer"],
            }
        )
        + "\n"
        for entry in entries
    ]
