"""Detection of a GPU that torch can use, for processes that need torch for nothing else.

Invariants
- Where torch has been imported, it alone is asked.
"""

import sys
from pathlib import Path
from typing import Final

# Of NVIDIA's driver (on Jetson and under Windows too) and of AMD's: without one no library of
# theirs finds a device.
_DRIVER_FILES: Final = ("nvidiactl", "nvmap", "dxg", "kfd")


def sees_gpu() -> bool:
    """Return what `torch.cuda.is_available` does; torch is imported only where a driver is."""
    if "torch" not in sys.modules and not any(
        Path("/dev", name).exists() for name in _DRIVER_FILES
    ):
        return False
    import torch

    return torch.cuda.is_available()
