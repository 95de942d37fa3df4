"""Hooks of the documentation site: reference pages from the code, links to files of the repository.

Nothing generated is kept in the repository, so that it cannot be out of date.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUT_OF_DOCS = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+)((?:examples|benchmarks|launch|configs|megatron_async|kernels|tests"
    r"|LICENSE|CONTRIBUTING)"
    r"[^)#]*)(?:#[^)]*)?\)"
)
_NAMES = re.compile(
    r'(?<!<pre>)(?<!</span>)<code>[^<]+</code>|<span class="doc doc-object-name[^<]+'
)


class _Lists(Preprocessor):
    """Begin a list also where its first item follows a line of text, as GitHub does."""

    def run(self, lines: list[str]) -> list[str]:
        out: list[str] = []
        in_list = False
        for line in lines:
            if re.match(r"([-*+]|1\.) ", line):
                if not in_list:
                    out.append("")
                in_list = True
            in_list = in_list and bool(line.strip())
            out.append(line)
        return out


class _ListExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Lists(md), "lists", 22)  # code in fences is taken out at 25


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let pages and docstrings have lists without a blank line before them."""
    config.markdown_extensions.append(_ListExtension())  # type: ignore[arg-type]
    return config


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Find pictures; let code wrap after a name's dots and slashes, not in an option (site.css)."""

    def wrapping(code: re.Match[str]) -> str:
        whole = re.sub(r"(?<!\w)--[\w-]+", r"<span class=option>\g<0></span>", code[0])
        return re.sub(r"(?<=[^\W\d])([./])(?=\w{5})", r"\1<wbr>", whole)

    # MkDocs moves a page into a separate folder, and leaves addresses in HTML as they are.
    up = "" if page.is_homepage else "../"
    html = re.sub(r'((?:src|srcset)=")(?=pictures/)', rf"\1{up}", html)
    return _NAMES.sub(wrapping, html)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": front_page(),
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


def front_page() -> str:
    """README.md, with its links seen from docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text)
    return text.replace("](docs/", "](")


def settings_page() -> str:
    """Every setting: name, type, default, range, description."""
    from megatron_async.config import build_config
    from megatron_async.config.reference import sections_of, sections_with
    from megatron_async.config.reward import BUILT_IN
    from megatron_async.scoring.rewards.reward import arguments_of

    lines = [
        "# Settings",
        "",
        "This page lists every setting of a configuration file, by section. Unknown settings are "
        "refused. You can give any setting on the command line: `section.setting=value`. "
        "`megatron-async settings` shows the same list, and `megatron-async settings --of FILE` "
        "shows it with the values of a file. A section `name[]` has the settings of each element "
        "of the list or mapping `name`. The defaults are those of a run without a recipe and "
        "without a preset; [recipes and presets](../algorithms.md) have other defaults. The "
        "sections `simulate` have the settings of a [simulation](../simulator.md), not of a run.",
    ]
    arguments = [
        section
        for name in BUILT_IN
        for section in sections_of(arguments_of(name), f"reward[].arguments ({name})")
    ]
    for section in (*sections_with(build_config({}).model_dump()), *arguments):
        if section.name:
            lines += ["", f"## `{section.name}`", "", _one_line(section.description)]
        lines += ["", "| setting | type | default | range | description |", "|---|---|---|---|---|"]
        lines += [
            f"| `{s.name.rpartition(').')[2]}` | {_code(s.type)} | {_code(s.default)}{s.source} | "
            f"{_code(s.range)} | {_one_line(s.description)} |"
            for s in section.settings
        ]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """`text` as code; the table extension takes no `|` in code for the end of a cell."""
    return f"`{text}`".replace("\n", "\\n") if text else ""


def _one_line(text: str) -> str:
    """`text` for a cell: outside of code `<` begins no tag."""
    line = " ".join(text.split()).replace("|", "\\|")
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", line)


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
        text = _one_line(parameter.help or parameter.metavar or "")
        rows.append(f"| {names} | {default} | {text} |")
    if rows:
        lines += ["| argument or option | default | description |", "|---|---|---|", *rows, ""]
    return lines
