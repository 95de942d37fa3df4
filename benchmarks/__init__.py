"""Benchmarks: each prints a table of numbers measured in one run.

Their runs load environments and rewards from this package in child processes, which import
nothing from the working directory. So the repository's root is on the path of those.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, *_PATHS]))
