"""Tests of this room may be coroutines, as those of tests/rollout."""

from tests.rollout.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
