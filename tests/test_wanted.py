"""Tests that missing tools skip tests, but not in CI, which must install the tools."""

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
def test_needs_skips_when_a_tool_is_missing_except_in_ci(
    found: bool, environment: dict[str, str], skips: bool
) -> None:
    assert needs(found, "a tool", "TOOL", environment).args == (skips,)
