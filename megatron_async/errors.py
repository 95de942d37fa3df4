"""Defines the two errors that a user sees as one message instead of a traceback.

`UserError` ends a command with exit code 2, `ComponentFailure` with exit code 1. Every other
exception is a defect and keeps its traceback. This module also finds in the log of a process why
the process ended.
"""

import re
import reprlib
import signal
from typing import Final

ATTEMPT_LINE: Final = "the ranks of the trainer start"
"""Line that is written to the trainer's log at each start of the trainer's ranks."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class UserError(Exception):
    """Raised for bad input, with one message that names the setting and its value; exit code 2.

    The message becomes one printable line: line breaks become spaces, and characters that a
    terminal cannot print are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(
                c if c.isprintable() else c.encode("unicode_escape").decode()
                for c in message.replace("\n", " ")
            )
        )


class ComponentFailure(Exception):
    """Raised when a component has died or stopped responding; the message names it; exit code 1."""


class ProcessKilled(ComponentFailure):
    """Raised when a signal has killed a process. Unlike other failures, this one may not occur
    again if the process is restarted."""


class Terminated(BaseException):
    """Raised when this process receives SIGTERM, so that it ends its child processes and cleans up,
    as after Ctrl-C."""


def short_repr(value: object) -> str:
    """Return `repr(value)`, shortened to fit into an error message."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not convert a number of more than 4300 digits to text.
        return "a number of thousands of digits"


_RANK = re.compile(r"^\[rank(\d+)\]:\s?")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::\s*(.*))?$")
# Two messages of torchrun that name a killed rank: `_KILLED` is printed when torchrun ends,
# `_KILLED_BEFORE` before it restarts the ranks.
_KILLED = re.compile(
    r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: -(?P<signal>\d+)", re.DOTALL
)
_KILLED_BEFORE = re.compile(r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = "Traceback (most recent call last):"
# Exceptions that do not explain a failure: torchrun raises ChildFailedError to report failed child
# processes, and the others end a process on request.
_NO_CAUSES = ("ChildFailedError", "KeyboardInterrupt", "SystemExit", "SignalException")
_LONGEST_CAUSE = 400


def one_line(error: BaseException | None) -> str:
    """Return an error's type and the first line of its message, e.g. `ValueError: no such key`."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_CAUSE].removesuffix(": ")


def describe_exit(exit_code: int) -> str:
    """Return a description of how a process ended, such as "was killed by SIGTERM".

    A negative exit code is the number of the signal that killed the process.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ""
    if number == signal.SIGKILL:
        hint = ": the kernel does that when memory runs out (`dmesg` shows it), or a user"
    return f"was killed by {name}{hint}"


def cause_in_log(text: str) -> str | None:
    """Return one line that says why a process ended, found in its log `text`; None if not found.

    If a signal killed a rank of torchrun, the line says which signal and rank. Otherwise it is the
    first Python exception in the log. In a trainer's log, only the text after the last
    `ATTEMPT_LINE` is searched.
    """
    text = text.rpartition(ATTEMPT_LINE)[2]
    killed = _KILLED.search(text) or _KILLED_BEFORE.search(text)
    if killed:
        return f"rank {killed['rank']} {describe_exit(-int(killed['signal']))}"
    for exception in _exceptions(text):
        if exception.partition(":")[0].rpartition(".")[2] not in _NO_CAUSES:
            return exception[:_LONGEST_CAUSE]
    return None


def _exceptions(text: str) -> list[str]:
    """Return the last line of every traceback in a log.

    If tracebacks are chained (an exception was raised while another was handled), only the last
    traceback of the chain counts. If torch has marked the lines of a traceback with a rank,
    the returned line starts with `rank N: `.
    """
    found: list[str] = []
    inside = chained = False
    for line in text.splitlines():
        marked = _RANK.match(line)
        bare = line[marked.end() :] if marked else line
        if _TRACEBACK in bare:
            inside = True
        elif inside and bare and not bare[0].isspace():
            exception = _EXCEPTION.match(bare)
            inside = False
            if exception:
                short_repr = f"rank {marked[1]}: {bare}" if marked else bare
                found = [*(found[:-1] if chained else found), short_repr]
                chained = False
        elif bare.startswith(_CHAINED):
            chained = True
    return found
