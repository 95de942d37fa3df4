"""Changes modules in the processes of a run without hooks in the product.

A run is started with a directory on PYTHONPATH. The `sitecustomize.py` in this directory calls
`change_on_import` in every Python process, before any module of the product is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def injected(folder: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """Write `sitecustomize.py` into `folder`; return the variables that make a process read it.

    Args:
        folder: Directory that only this file is written to; it is created.
        changes: Maps the name of a module to the function (`module:function`) that changes it. The
            function receives the module as soon as the module has been imported.
    """
    folder.mkdir(exist_ok=True)
    call = f"from {__name__} import {change_on_import.__name__}\n\n"
    call += f"{change_on_import.__name__}({dict(changes)!r})\n"
    (folder / "sitecustomize.py").write_text(call)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}


def change_on_import(changes: Mapping[str, str]) -> None:
    """Let the import of each module that is a key of `changes` call the module's function."""
    sys.meta_path.insert(0, _Finder(dict(changes)))


class _Finder(MetaPathFinder):
    def __init__(self, changes: dict[str, str]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        module, function = self._changes.pop(name).split(":")
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(imported: ModuleType) -> None:
            execute(imported)
            getattr(importlib.import_module(module), function)(imported)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
