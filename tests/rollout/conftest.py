"""Runs coroutine tests of this folder, each on a new event loop and for at most 60 s.

A test module may set `SECONDS` to another limit and `LOOPS` to another loop factory. Other test
folders import this hook.
"""

from __future__ import annotations

import asyncio
import inspect

import pytest

from megatron_async.config.rollout import EngineConfig


@pytest.fixture(autouse=True)
def frequent_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check engines at least every 0.1 s, whatever `engines.hang_timeout_seconds` is."""
    interval = property(lambda settings: min(0.1, settings.hang_timeout_seconds / 24))
    monkeypatch.setattr(EngineConfig, "health_interval_seconds", interval)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function to its end; leave other tests to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    body = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    with asyncio.Runner(loop_factory=getattr(pyfuncitem.module, "LOOPS", None)) as runner:
        runner.run(asyncio.wait_for(body, getattr(pyfuncitem.module, "SECONDS", 60)))
    return True
