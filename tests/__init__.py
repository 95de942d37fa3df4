"""Tests, and the crash test, whose runs load modules from here.

Children of a run import nothing from the working directory, so the repository's root is on their
path.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, *_PATHS]))
