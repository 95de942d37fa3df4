"""Sets attributes of this process that only Linux has (man 2 prctl).

The program that runs a policy's code in a sandbox has a copy of this code, because it cannot import
modules of this project.
"""

import ctypes
import os
from typing import Final

PDEATHSIG: Final = 1
"""Option: the signal that this process receives when its parent dies."""
SUBREAPER: Final = 36
"""Option: whether descendants of this process whose parent has died become its children."""
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set the attribute `option` of this process to `value`.

    Raises:
        OSError: If the kernel refuses.
    """
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
