"""Tests of this room may be coroutines: each runs on an event loop of its own, for 30 s at most."""

from __future__ import annotations

import inspect

import pytest

from tests.rollout.stand_ins import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function to its end; pytest calls the others."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
