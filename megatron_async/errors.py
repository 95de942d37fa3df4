"""The two errors that a person sees as one sentence instead of a traceback.

`UserError` ends a command with exit code 2, `ComponentFailure` with exit code 1. Everything else
is a defect and keeps its traceback.
"""

from __future__ import annotations

import reprlib

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


def shown(value: object) -> str:
    """`repr(value)`, cut to what a sentence can hold."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
