"""Attributes of this process that Linux alone has (man 2 prctl).

The sandbox has its own: it runs where no module of ours is found.
"""

import ctypes
import os
from typing import Final

PDEATHSIG: Final = 1
SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
