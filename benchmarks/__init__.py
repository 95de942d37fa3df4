"""Benchmark programs: each prints tables of numbers that it measures.

Benchmarks start runs whose child processes load environments and rewards from this package. Child
processes import nothing from the working directory, so this module adds the repository's root to
their PYTHONPATH.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, *_PATHS]))
