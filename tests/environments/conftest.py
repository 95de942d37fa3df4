"""Lets tests of this folder be coroutines, with the hook of tests/rollout."""

from tests.rollout.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
