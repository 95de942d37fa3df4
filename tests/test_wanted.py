"""No test of CI skips because a tool that it installs could not be installed."""

from __future__ import annotations

import pytest

from tests.wanted import needs


@pytest.mark.parametrize(
    ("found", "environment", "skips"),
    [
        (True, {}, False),
        (False, {}, True),
        (True, {"CI": "1"}, False),
        (False, {"CI": "1"}, False),
        (True, {"TOOL": "0"}, True),
        (False, {"CI": "1", "TOOL": "0"}, True),
    ],
)
def test_a_tool_that_is_missing_skips_its_tests_but_in_ci(
    found: bool, environment: dict[str, str], skips: bool
) -> None:
    assert needs(found, "a tool", "TOOL", environment).args == (skips,)
