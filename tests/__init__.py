"""Contains the tests of the project, and helper modules that child processes of runs import.

Child processes of a run do not import from the working directory. Therefore this module adds the
root of the repository to PYTHONPATH.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, *_PATHS]))
