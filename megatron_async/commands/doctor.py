"""`megatron-async doctor`: prints what is installed, what a run will use, and why."""

import platform
import sys

from megatron_async.commands.machine_checks import checks, installed, look
from megatron_async.config.model import ModelConfig
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import resolve_device, resolve_dtype
from megatron_async.trainer.capabilities import choose, detect

_PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "ray",
    "transformers",
    "triton",
    "transformer-engine",
    "apex",
    "reasoning-gym",
    "tensorboard",
)


def report_lines() -> list[str]:
    """Return lines on packages, devices, checks of this machine, and chosen backends.

    A missing package is a line too; it does not raise an error.
    """
    lines = [
        f"Python {platform.python_version()} ({sys.executable})",
        f"{platform.system()} {platform.machine()}",
    ]
    for package in _PACKAGES:
        version = installed(package)
        lines.append(f"{package} {version}" if version else f"{package}: not installed")
    found = detect()
    lines.append(f"CUDA: {found.cuda or 'none'}")
    device = resolve_device(EngineConfig())
    rows = [
        *choose(ModelConfig(), found).lines(),
        ("engines", f"SGLang on {device}, {resolve_dtype(EngineConfig(), device)}"),
    ]
    used = ["a run will use:", *(f"  {component}: {choice}" for component, choice in rows)]
    machine = ["this machine:", *(f"  {check}" for check in checks(look()))]
    return [*lines, "", *machine, "", *used]
