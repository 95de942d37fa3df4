"""Imports run one way: a room imports the rooms above it in this list, never one below.

Read from the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_async"
ROOMS = (
    "errors",
    "disk",
    "file_lock",
    "import_path",
    "shipped",
    "config",
    "run_directory",
    "trajectory",
    "algorithms",
    "store",
    "tasks",
    "models",
    "weight_sync",
    "scheduler",
    "telemetry",
    "engines",
    "rollout",
    "checkpoint",
    "trainer",
    "train_loop",
    "simulate",
    "launcher",
    "commands",
    "cli",
    "testing",
)
MODULES = {
    ".".join(("megatron_async", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in PACKAGE.rglob("*.py")
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import of ours, wherever in the file it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name in MODULES]
            yield from ((node.lineno, name) for name in found or [node.module])


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_lies_in_a_room() -> None:
    assert {room_of(module) for module in MODULES} - {""} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_runs_down(room: str) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for module, file in MODULES.items()
        if room_of(module) == room
        for line, name in imports(file)
        if room_of(name) and ROOMS.index(room_of(name)) > ROOMS.index(room)
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = {module: {name for _, name in imports(file)} for module, file in MODULES.items()}
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in finished:
            for name in edges[module]:
                visit(name, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())
