"""The two errors that a person sees as one sentence instead of a traceback.

`UserError` ends a command with exit code 2, `ComponentFailure` with exit code 1. Everything else
is a defect and keeps its traceback.
"""

import re
import reprlib
import signal
from typing import Final

ATTEMPT_LINE: Final = "the ranks of the trainer start"
"""Line in the trainer's log at which each start of its ranks begins."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class UserError(Exception):
    """Bad input: one clear sentence that names the setting and its value (exit code 2).

    It is one printable line, whatever the input held: line breaks become blanks, what a terminal
    cannot print is escaped.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(
            "".join(
                c if c.isprintable() else " " if c == "\n" else c.encode("unicode_escape").decode()
                for c in sentence
            )
        )


class ComponentFailure(Exception):
    """A component that ran has died or stopped answering; names what was waited for (exit 1)."""


class ProcessKilled(ComponentFailure):
    """A process was ended by a signal, not by its own doing: starting it again may well work."""


class Terminated(BaseException):
    """SIGTERM has come: what runs is ended in order, as with Ctrl-C."""


def short_repr(value: object) -> str:
    """`repr(value)`, cut to what a sentence can hold."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


_RANK = re.compile(r"^\[rank(\d+)\]:\s?")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::\s*(.*))?$")
# Messages of torchrun: the first when it ends, the second before it restarts the ranks.
_KILLED = re.compile(
    r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: -(?P<signal>\d+)", re.DOTALL
)
_KILLED_BEFORE = re.compile(r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = "Traceback (most recent call last):"
# What a launcher adds about its children, and how a process ends that was asked to.
_NO_CAUSES = ("ChildFailedError", "KeyboardInterrupt", "SystemExit", "SignalException")
_LONGEST_CAUSE = 400


def one_line(error: BaseException | None) -> str:
    """Type and first line of an error, e.g. `ValueError: no such key`."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_CAUSE].removesuffix(": ")


def describe_exit(exit_code: int) -> str:
    """Explain an exit code, which is that of a signal where it is negative."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ""
    if number == signal.SIGKILL:
        hint = ": the kernel does that when memory runs out (`dmesg` shows it), or somebody did"
    return f"was killed by {name}{hint}"


def cause_in_log(text: str) -> str | None:
    """Find in a log why a process ended: the signal that killed a rank of torchrun, else the first
    Python exception, each as one line; None when the log shows neither.

    In a trainer's log, only the text after the last `ATTEMPT_LINE` is searched.
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
    """The last line of every traceback, the last one of a chain for all of it; `rank N: ` before
    it where torch has marked the lines."""
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
