"""Marks tests that need a tool: without the tool they are skipped, except in CI, which installs the
tools, where they fail.

If the tool's environment variable is 0, its tests are skipped, also in CI (`launch/test.sh`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest


def needs(
    found: object, what: str, switch: str, environment: Mapping[str, str] = os.environ
) -> pytest.MarkDecorator:
    """Return a mark that skips tests if a tool is missing.

    Args:
        found: Whether the tool is installed.
        what: Name of the tool, for the reason of the skip.
        switch: Environment variable that skips the tests if it is 0.
    """
    switched_off = environment.get(switch) == "0"
    absent = not found and not environment.get("CI")
    return pytest.mark.skipif(
        switched_off or absent,
        reason=f"{switch} is 0" if switched_off else f"not installed: {what}",
    )
