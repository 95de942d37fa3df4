"""The two errors that a person sees as one sentence instead of a traceback.

`UserError` ends a command with exit code 2, `ComponentFailure` with exit code 1. Everything else
is a defect and keeps its traceback.
"""


class UserError(Exception):
    """Bad input: one clear sentence that names the setting and its value (exit code 2)."""


class ComponentFailure(Exception):
    """A component that ran has died or stopped answering; names what was waited for (exit 1)."""


class ProcessKilled(ComponentFailure):
    """A process was ended by a signal, not by its own doing: starting it again may well work."""
