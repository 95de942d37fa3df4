"""Provides stand-ins with which SGLang runs on CPUs that no `sgl-kernel` wheel supports (without
AMX).

SGLang imports GPU packages at module level, of which its CPU code calls only a few small functions.
If such a package is missing, an importable stand-in replaces it. The functions that are called are
implemented here.

Invariants
- Only packages that are not installed are replaced.
- A stand-in can be imported, subclassed and used as a decorator. Calling anything else in it raises
  an error, so that code which needs the package fails visibly.
- Importing this module installs nothing. `install_stand_ins` must run before `sglang` is imported,
  in the server and in each process that it spawns. A forked process inherits the stand-ins.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch

REPLACEABLE = ("torchvision", "sgl_kernel", "triton")


class _PlaceholderType(type):
    """Metaclass whose classes have every attribute that does not begin with two underscores. Its
    value is its name, so that code like `InterpolationMode.BICUBIC` can run at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _accept_anything(self: object, *args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing; constructor of placeholder classes."""


class StandIn(types.ModuleType):
    """Stand-in for a package that is not installed. A capitalized attribute is an empty class, and
    any other attribute is a stand-in for a submodule."""

    __path__: list[str] = []  # noqa: RUF012 - makes the module a package
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[:1].isupper():
            value = _PlaceholderType(name, (), {"__init__": _accept_anything})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, with or without arguments (`@triton.jit`, `@triton.jit(...)`).

        Raises:
            RuntimeError: If it is called in another way.
        """
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        if self.__name__.startswith("triton"):
            return lambda function: function
        raise RuntimeError(f"{self.__name__} was called, but it is not installed on this machine")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that returns a stand-in for every module below the given top-level packages."""

    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._roots:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _REAL_OPERATIONS.get(module.__name__, {}).items():
            setattr(module, name, value)


def assign_req_to_token_pool(
    req_pool_indices_S: torch.Tensor,
    req_to_token_RC: torch.Tensor,
    start_S: torch.Tensor,
    end_S: torch.Tensor,
    out_cache_loc_T: torch.Tensor,
    pool_width: int,
) -> None:
    """Write the new KV-cache slots of each request into its row of the table `req_to_token_RC`: for
    each request, row[start:end] = its share of `out_cache_loc_T`.

    `out_cache_loc_T` has the new slots of all requests one after the other, so T is the sum of all
    end - start.
    """
    offset = 0
    rows = zip(req_pool_indices_S.tolist(), start_S.tolist(), end_S.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc_T[offset : offset + end - start]
        req_to_token_RC[row, start:end] = slots.to(req_to_token_RC.dtype)
        offset += end - start


def _ceil_div(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


_REAL_OPERATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "triton": {"cdiv": _ceil_div, "next_power_of_2": _next_power_of_2},
    "sgl_kernel": {"assign_req_to_token_pool_cpu": assign_req_to_token_pool},
}


def missing_packages(names: Sequence[str] = REPLACEABLE) -> frozenset[str]:
    """Return which of these top-level packages are not installed."""
    return frozenset(name for name in names if importlib.util.find_spec(name) is None)


def install_stand_ins() -> frozenset[str]:
    """Replace packages that are not installed by stand-ins; return their names. Repeated calls do
    nothing."""
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return frozenset()
    missing = missing_packages()
    if missing:
        if "triton" in missing:
            # torch asks once whether triton is installed and caches the result. Let it ask before
            # the stand-ins are installed, because it would take the stand-in for a real triton.
            importlib.import_module("torch.utils._triton").has_triton_package()
        sys.meta_path.append(_StandInFinder(missing))
    return missing
