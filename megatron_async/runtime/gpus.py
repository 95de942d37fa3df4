"""Detects a GPU that torch can use, for processes that do not need torch for anything else.

Invariants
- If torch is already imported, only torch is asked.
"""

import sys
from pathlib import Path
from typing import Final

# Device files of NVIDIA's driver (also on Jetson and under Windows) and of AMD's. Without any of
# them, no library finds a device.
_DRIVER_FILES: Final = ("nvidiactl", "nvmap", "dxg", "kfd")


def sees_gpu() -> bool:
    """Return whether torch can use a GPU; import torch only if a GPU driver is installed."""
    if "torch" not in sys.modules and not any(
        Path("/dev", name).exists() for name in _DRIVER_FILES
    ):
        return False
    import torch

    return torch.cuda.is_available()
