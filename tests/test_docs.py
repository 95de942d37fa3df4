"""Tests the code that the documentation shows: configurations load, Python runs, and commands
exist.

A block after `<!-- not run: REASON -->` is left out. Python blocks with a title are files of the
tutorial, which `test_tutorial.py` runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from megatron_async.cli import app
from megatron_async.config.load import build_config, build_simulation
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.import_path import anchored
from megatron_async.store.schema import export_file
from tests.documented_metrics import undocumented

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *(ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "kernels/README.md")),
]
_BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n+)?^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Return the blocks of this language that are to be run."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            in_tutorial = language == "python" and "title=" in match[3]
            if match[1] is None and match[2] == language and not in_tutorial:
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[4]))
    return found


def commands(language: str) -> Iterator[tuple[Block, list[str]]]:
    """Yield each `megatron-async` command line as its block and its words."""
    for block in blocks(language):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "megatron-async" in words:
                yield block, words[words.index("megatron-async") + 1 :]


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_documented_configuration_loads(block: Block) -> None:
    settings = anchored(yaml.safe_load(block.text), block.page.parent)
    settings.pop("base", None)
    (build_simulation if "simulate" in settings else build_config)(settings)


@pytest.mark.parametrize(
    "page", sorted({block.page for block in blocks("python")}), ids=lambda p: p.name
)
def test_documented_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page run in order, in one namespace, as a reader would run them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page == page:
            code = "\n" * block.line + block.text
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize(("block", "words"), commands("bash"), ids=lambda x: str(x)[:60])
def test_documented_command_and_its_options_exist(block: Block, words: list[str]) -> None:
    command: Any = None
    group = COMMANDS
    while words and words[0].split("|")[0] in group:
        command = group[words.pop(0).split("|")[0]]
        group = getattr(command, "commands", {})
    assert command is not None, f"{block}: {words[:1]} is not a command"
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    used = {w.strip("[]").partition("=")[0] for w in words if w.strip("[").startswith("--")}
    assert used <= known, f"{block}: {sorted(used - known)}"


def test_every_metric_of_the_code_is_documented() -> None:
    groups = "rollout|train|time|weights|eval|reward|actor|loss|ref|off_policy|staleness"
    name = re.compile(rf'f?"((?:{groups})/[\w{{}}/]+)"')
    found = {
        metric.replace("{lag}", "{k}")
        for file in (ROOT / "megatron_async").rglob("*.py")
        for metric in name.findall(file.read_text())
    }
    names = {metric for metric in found if not re.search(r"/$|{name}$|^weights/llama", metric)}
    assert undocumented(names) == []


def test_documented_run_directory_lists_the_files_of_a_run() -> None:
    """The files are those of `RunDirectory` and the store, except files that only a failed or
    running run has."""
    directory = RunDirectory(Path("runs/first"))
    paths = [directory.config_file, directory.metrics_file, directory.tensorboard]
    paths += [directory.checkpoints, directory.store_file, directory.events, directory.logs]
    paths += [directory.hf_export, export_file(directory.store_file).parent]
    page = (ROOT / "docs" / "getting-started.md").read_text()
    assert [p.name for p in paths if not re.search(rf"`{re.escape(p.name)}/?`", page)] == []


@pytest.mark.parametrize("name", ["AGENTS.md", "CONTRIBUTING.md", "README.md"])
def test_files_and_folders_named_by_a_top_level_page_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(r"\]\((?!https?:)([^)#]+)", text))
    code = "\n".join(re.findall(r"`[^`\n]+`|^```.*?^```", text, re.M | re.S))
    named |= set(re.findall(r"(?<![\w./=-])[a-z_]+/[\w./-]*\w", code))
    created = ("models/", "data/", "runs/")  # The commands on the page create these folders.
    found = [ROOT / path for path in named if not path.startswith(created)]
    assert len(found) > 5
    assert [str(path) for path in found if not path.exists()] == []


def test_agents_page_has_at_most_sixty_lines() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def test_steps_of_the_architecture_page_link_to_existing_functions() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\d+\. (.+)$", page.split("## Packages")[0], re.M)
    assert len(steps) >= 8
    for step in steps:
        links = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", step)
        assert links, step
        for name, file in links:
            source = (ROOT / file).read_text()
            *owner, function = name.split(".")
            assert re.search(rf"^ *(async )?def {function}\(", source, re.M), name
            assert all(re.search(rf"^class {part}\b", source, re.M) for part in owner), name


def test_readme_is_short_and_shows_the_two_setup_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600
    assert text.index("quickstart.sh") < text.index("launch/test.sh")
