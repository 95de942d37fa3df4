"""Tools that some tests need: without them they skip; in CI, which installs them, they fail.

A variable of the environment that is 0 leaves a tool out, in CI too (`launch/test.sh`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest


def needs(
    found: object, what: str, switch: str, environment: Mapping[str, str] = os.environ
) -> pytest.MarkDecorator:
    """Mark tests that need a tool. `found`: it is here; `what`: the reason where they skip."""
    left_out = environment.get(switch) == "0"
    absent = not found and not environment.get("CI")
    return pytest.mark.skipif(
        left_out or absent, reason=f"{switch} is 0" if left_out else f"not installed: {what}"
    )
