"""Starting child processes.

Invariants
- A child imports nothing from the directory that the user works in: a file `random.py` or
  `tokenizers.py` there would replace a module of ours, of Python's or of a library's. Code of the
  user's is loaded by its path (`import_path`).
- A child has a session of its own: Ctrl-C at a terminal reaches the process that started it only.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"
"""Has the effect of `-P` on every Python below a process whose command we do not make."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `command`; `options` are those of `subprocess.Popen`. Raises OSError."""
    return subprocess.Popen([*command], start_new_session=True, **options)
