"""The command line that goes into a result file: whoever runs it gets such a file again.

Where the file was written (`--out`) is left out: it is where the reader finds it, or was a path of
one machine.
"""

from __future__ import annotations

import shlex
import sys


def command_line(module: str) -> str:
    """`python -m MODULE`, with this process's arguments but `--out`."""
    given, kept = iter(sys.argv[1:]), list[str]()
    for argument in given:
        if argument == "--out":
            next(given, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["python", "-m", module, *kept])
