"""Lets the tests of this folder be coroutines, as in tests/rollout."""

from tests.rollout.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
