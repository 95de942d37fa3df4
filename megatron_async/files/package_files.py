"""Files that come with the package and are no Python: launch scripts, example configurations.

In a clone they are `launch/` and `configs/` of the repository. A wheel carries a copy of both in
`megatron_async/_shipped` (setup.py), so that an installed package works from any directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
_IN_WHEEL: Final = _PACKAGE / "_shipped"
ROOT: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def existing(path: Path) -> Path:
    """`path`, or the shipped file of that name if there is none: `configs/quickstart.yaml`."""
    shipped = ROOT / path
    return shipped if not path.exists() and shipped.is_file() else path


def script_environment() -> dict[str, str]:
    """Variables that shipped scripts need beside their defaults, which are those of a clone."""
    if ROOT is not _IN_WHEEL or "MEGATRON_ASYNC_VENV" in os.environ:
        return {}
    return {"MEGATRON_ASYNC_VENV": sys.prefix}
