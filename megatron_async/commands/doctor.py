"""`megatron-async doctor`: what is installed, what will be used, and why."""

from __future__ import annotations

import platform
import sys

from megatron_async.commands.machine_checks import checks, installed, look
from megatron_async.config import RunConfig
from megatron_async.config.model import ModelConfig
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import resolve_device, resolve_dtype
from megatron_async.launcher.derived import Machine, derive, layout_lines
from megatron_async.launcher.preflight import as_it_would_start
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
    """Return a line for each fact; never raises for a package that is missing."""
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
    used = ["what will be used:", *(f"  {part}: {what}" for part, what in rows)]
    machine = ["this machine:", *(f"  {check}" for check in checks(look()))]
    return [*lines, "", *machine, "", *used]


def config_lines(config: RunConfig) -> list[str]:
    """Return what a run of this file would be on this machine: layout, settings, what is amiss."""
    machine = Machine.here(config)
    derived = derive(config, machine)
    checked = as_it_would_start(derived.config)
    return [
        f"{config.name} on {machine.title}:",
        *(f"  {line}" for line in layout_lines(checked.config, machine)),
        "derived settings:",
        *(f"  {line}" for line in derived.lines()),
        "checks before a start:",
        *(f"  {line}" for line in (*checked.summary.splitlines(), *checked.notices)),
    ]
