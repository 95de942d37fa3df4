"""Hooks of the documentation site: reference pages from the code, links to files of the repository.

Nothing generated is kept in the repository, so that it cannot be out of date.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUT_OF_DOCS = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+)((?:examples|benchmarks|launch|configs|megatron_async|kernels|tests)"
    r"[^)#]*)(?:#[^)]*)?\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show links to files outside docs/ as links into `repo_url`, or without one as their paths."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        target = (folder / (match[2] + match[3])).resolve()
        if not target.exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {match[3]}, which is not there")
        path = str(target.relative_to(ROOT))
        if config.repo_url:
            return f"[{match[1]}]({config.repo_url}/blob/main/{path})"
        return f"`{path}`" if match[1] == path else f"{match[1]} (`{path}`)"

    return _OUT_OF_DOCS.sub(shown, markdown)


def settings_page() -> str:
    """Every setting: name, type, default, range, description."""
    from megatron_async.config import RunConfig

    lines = [
        "# Settings",
        "",
        "Every setting of a configuration file, by section. An unknown one is refused. Any can be "
        "given on the command line: `section.setting=value`.",
        "",
        *_section(RunConfig, ""),
    ]
    return "\n".join(lines) + "\n"


def _section(model: Any, prefix: str) -> list[str]:
    from pydantic import BaseModel

    rows, below = [], []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            below += ["", f"## `{prefix}{name}`", "", _one_line(inner.__doc__ or "")]
            below += ["", *_section(inner, f"{prefix}{name}.")]
            continue
        limits = ", ".join(filter(None, map(_limit, field.metadata)))
        rows.append(
            f"| `{prefix}{name}` | {_code(_type(inner))} | {_code(_default(field))} | "
            f"{_code(limits)} | {_one_line(field.description or '')} |"
        )
    head = ["| setting | type | default | range | |", "|---|---|---|---|---|"] if rows else []
    return [*head, *rows, *below]


def _limit(limit: Any) -> str:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if hasattr(limit, name):
            return f"{sign} {getattr(limit, name)}"
    return "not empty" if hasattr(limit, "min_length") else ""


def _type(annotation: Any) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return name.replace("typing.", "").replace("megatron_async.config.", "")


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.default_factory() if field.default_factory is not None else field.default
    return repr(getattr(default, "value", default))


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from megatron_async.cli import app

    lines = ["# Commands", "", "`megatron-async COMMAND --help` shows the same.", ""]
    return "\n".join([*lines, *_command(typer.main.get_command(app), "megatron-async")]) + "\n"


def _command(command: Any, path: str) -> list[str]:
    inner = getattr(command, "commands", {})
    if inner:
        return [line for name, one in inner.items() for line in _command(one, f"{path} {name}")]
    lines = [f"## `{path}`", "", command.help or "", ""]
    rows = []
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        plain = isinstance(parameter.default, str | int | float | Path) and parameter.default
        default = _code(str(parameter.default)) if plain else ""
        rows.append(f"| {names} | {default} | {_one_line(parameter.help or '')} |")
    if rows:
        lines += ["| argument or option | default | |", "|---|---|---|", *rows, ""]
    return lines
