"""Loads a user's code by import path: `package.module:name`, or `file.py:name` for a single file.

Invariants
- A file is imported once per process, under a module name made from its absolute path. Modules next
  to the file can be imported, but never replace an installed module.
- Every problem with the path or the code becomes one message that names the setting and, for an
  exception in the user's code, the file and line.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_async.errors import UserError

_FORM = re.compile(r"(?P<module>[\w.]+|[^:]+\.py):(?P<name>[A-Za-z_]\w*)")


def is_import_path(text: str) -> bool:
    """Return whether `text` has the form of an import path; nothing is imported."""
    return _FORM.fullmatch(text) is not None


def anchored(value: Any, folder: Path) -> Any:
    """Return `value` with each relative path in `file.py:name` made absolute, starting at `folder`.

    Mappings and lists are searched at any depth.
    """
    if isinstance(value, dict):
        return {key: anchored(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [anchored(inner, folder) for inner in value]
    if isinstance(value, str) and ".py:" in value and is_import_path(value):
        file, _, name = value.rpartition(":")
        return f"{(folder / Path(file).expanduser()).resolve()}:{name}"
    return value


def load_object(path: str, setting: str) -> Any:
    """Import and return the object that the import path `path` names.

    Args:
        path: `package.module:name` or `file.py:name`.
        setting: Name of the setting that has the path, for error messages.

    Raises:
        UserError: If the path is invalid, the module cannot be imported, or the name does not
            exist.
    """
    match = _FORM.fullmatch(path)
    if match is None:
        raise UserError(
            f"{setting} is {path!r}; it must be package.module:name or path/to/file.py:name"
        )
    where, name = match["module"], match["name"]
    try:
        module = _module_of_file(Path(where)) if where.endswith(".py") else _module(where)
    except UserError as error:
        raise UserError(f"{setting} is {path!r}: {error}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise any exception
        file = str(Path(where).resolve()) if where.endswith(".py") else ""
        raise UserError(f"{setting} is {path!r}: {described(error, file)}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{setting} is {path!r}: {where} has no {name!r}{hint}") from error


def described(error: BaseException, file: str = "") -> str:
    """Return an exception of a user's code as one line: its type, message, file and line.

    Args:
        error: The exception.
        file: The user's own file. If given, the result names the line in this file, and not one in
            a library that the file calls or that calls it.
    """
    name = type(error).__name__
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return f"{name}: {error.msg} at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno}" for f in frames if file in ("", f.filename)] or [file]
    return f"{name}: {error}" + "".join(f" at {place}" for place in places[-1:] if place)


def file_of(found: Any) -> str:
    """Return the path of the file that defines a function or class; empty if there is none."""
    try:
        return inspect.getfile(inspect.unwrap(found))
    except TypeError:  # a callable object, or one that is not written in Python
        return ""


def _module(name: str) -> ModuleType:
    """Import and return the installed module `name`.

    Raises:
        UserError: If there is no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            file = Path(f"{name.replace('.', '/')}.py")
            hint = f"; name the file, as {file}:..." if file.is_file() else ""
            raise UserError(f"there is no module {name!r} on the Python path{hint}") from error
        raise


def _module_of_file(file: Path) -> ModuleType:
    """Import and return the Python file `file` as a module; later calls return the same module.

    Raises:
        UserError: If there is no such file.
    """
    file = file.resolve()
    name = f"megatron_async_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    # Register the module before it is executed, because `dataclass` looks up the module of a class
    # in `sys.modules`.
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
