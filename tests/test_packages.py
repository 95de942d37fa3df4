"""Tests the order of imports: a package imports only packages above it in the list `PACKAGES`.

Imports are read from the source, so that imports inside functions count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import parse

PACKAGE = Path(__file__).parents[1] / "megatron_async"
PACKAGES = (
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
    - {PACKAGE, PACKAGE / "models" / "families"}  # Families are found by their files.
)
MODULES = {
    ".".join(("megatron_async", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in PACKAGE.rglob("*.py")
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import of this product's modules, anywhere in the file."""
    for node in ast.walk(parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name in MODULES]
            yield from ((node.lineno, name) for name in found or [node.module])


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_is_in_a_listed_package() -> None:
    assert {package_of(module) for module in MODULES} - {""} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_packages_above_it(package: str) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for module, file in MODULES.items()
        if package_of(module) == package
        for line, name in imports(file)
        if package_of(name) and PACKAGES.index(package_of(name)) > PACKAGES.index(package)
    ]
    assert not wrong


def test_only_process_backends_import_ray() -> None:
    """In all other files, it must not matter whether a process of the run is a Ray actor."""
    found = {
        str(file.relative_to(PACKAGE))
        for file in MODULES.values()
        for node in ast.walk(parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "ray" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    }
    assert found == {"process_backends/on_ray.py", "process_backends/ray_cluster.py"}


def test_modules_have_no_circular_imports() -> None:
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
def test_package_docstring_names_each_file_of_the_package(folder: Path) -> None:
    """The docstring of `__init__.py` describes each file, so that a reader finds a file in one
    step."""
    described = ast.get_docstring(parse((folder / "__init__.py").read_text())) or ""
    inside = [
        path.stem
        for path in folder.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    ]
    missing = [name for name in inside if not re.search(rf"\b{name}\b", described)]
    assert not missing, f"name {missing} in the docstring of {folder.name}/__init__.py"


def test_public_class_names_are_unique() -> None:
    """Names with an underscore are private to their file; every other class name has one meaning in
    all packages."""
    files_of: dict[str, list[str]] = {}
    for file in (*MODULES.values(), *KERNELS.glob("*.py")):
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_of.setdefault(node.name, []).append(str(file.relative_to(PACKAGE.parent)))
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_only_responses_and_probe_call_generate() -> None:
    """One module must own the prefix, token budget and end of a response. Clients of engines are
    not checked, because they are below this module."""
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


def test_architecture_page_describes_every_package() -> None:
    table = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    folders = [package for package in PACKAGES if (PACKAGE / package).is_dir()]
    assert [package for package in folders if f"`{package}`" not in table] == []
