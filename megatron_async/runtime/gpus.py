"""Detects a GPU that torch can use, for processes that do not need torch for anything else.

Invariants
- If torch is already imported, its result is used, and no device files are looked for.
"""

import sys
from pathlib import Path
from typing import Final

# Device files of NVIDIA's driver (the second and third name: on Jetson and under Windows) and of
# AMD's driver. If none of them exists, torch cannot find a GPU.
_DRIVER_FILES: Final = ("nvidiactl", "nvmap", "dxg", "kfd")


def sees_gpu() -> bool:
    """Return whether torch can use a GPU; import torch only if a GPU driver is installed."""
    if "torch" not in sys.modules and not any(
        Path("/dev", name).exists() for name in _DRIVER_FILES
    ):
        return False
    import torch

    return torch.cuda.is_available()
