"""The quickstart's settings with Adam, as the tables in results/ were measured.

The quickstart itself trains with Muon since 23 November 2026. What a benchmark compares (schedules,
recipes, TRL, a plain torch loop) is compared with the optimizer that all of them have. The model
that those tables begin with is of `launch/quickstart.sh` with `sft.optimizer.name=adam
sft.optimizer.lr=3e-3 sft.steps=900 sft.examples=57600 model.dtype=float32`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.config.load import merge, read_yaml

ROOT = Path(__file__).resolve().parents[1]
OPTIMIZERS: dict[str, Any] = {
    "optimizer": {"name": "adam", "lr": 2e-4, "schedule": "constant", "warmup_steps": 5},
    "sft": {"optimizer": {"name": "adam", "lr": 3e-3}},
}


def quickstart_adam() -> dict[str, Any]:
    """The settings as a mapping for `build_config`."""
    return merge(read_yaml(ROOT / "configs" / "quickstart.yaml"), OPTIMIZERS)
