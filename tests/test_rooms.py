"""Imports run one way: a room imports the rooms above it in this list, never one below.

Read from the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import parse

PACKAGE = Path(__file__).parents[1] / "megatron_async"
ROOMS = (
    "errors",
    "runtime",
    "files",
    "config",
    "run_directory",
    "process_backends",
    "trajectory",
    "algorithms",
    "store",
    "tasks",
    "scoring",
    "environments",
    "models",
    "weight_sync",
    "scheduler",
    "telemetry",
    "report",
    "engines",
    "rollout",
    "checkpoint",
    "trainer",
    "train_loop",
    "simulate",
    "launcher",
    "commands",
    "cli",
    "__main__",
    "testing",
)
KERNELS = PACKAGE.parent / "kernels" / "megatron_async_kernels"
FOLDERS = sorted(
    {file.parent for root in (PACKAGE, KERNELS) for file in root.rglob("__init__.py")}
    - {PACKAGE, PACKAGE / "models" / "families"}  # a family is found by being there
)
MODULES = {
    ".".join(("megatron_async", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in PACKAGE.rglob("*.py")
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import of ours, wherever in the file it stands."""
    for node in ast.walk(parse(file.read_text())):
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


def test_only_places_import_ray() -> None:
    """In no other file does it matter whether a process of the run is an actor."""
    found = {
        str(file.relative_to(PACKAGE))
        for file in MODULES.values()
        for node in ast.walk(parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "ray" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    }
    assert found == {"process_backends/on_ray.py", "process_backends/ray_cluster.py"}


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_room_names_each_of_its_files(folder: Path) -> None:
    """Its `__init__.py` describes each: a reader finds a place in one hop."""
    described = ast.get_docstring(parse((folder / "__init__.py").read_text())) or ""
    inside = [
        path.stem
        for path in folder.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    ]
    missing = [name for name in inside if not re.search(rf"\b{name}\b", described)]
    assert not missing, f"name {missing} in the docstring of {folder.name}/__init__.py"


def test_a_class_name_occurs_once() -> None:
    """Names with an underscore are of their file alone; all others mean one thing everywhere."""
    places: dict[str, list[str]] = {}
    for file in (*MODULES.values(), *KERNELS.glob("*.py")):
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(PACKAGE.parent)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_only_responses_and_the_samples_of_the_check_call_generate() -> None:
    """One owner of a response's prefix, budget and end (clients of engines are below it)."""
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "engines"
        for node in ast.walk(parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "generate"
    }
    assert callers == {"rollout/responses.py", "rollout/probe.py"}


def test_every_package_is_described_on_the_page_about_the_architecture() -> None:
    table = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    folders = [room for room in ROOMS if (PACKAGE / room).is_dir()]
    assert [room for room in folders if f"`{room}`" not in table] == []
