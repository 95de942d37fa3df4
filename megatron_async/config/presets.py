"""The five schedules and their defaults: named points of `ScheduleConfig`'s space.

Precedence (docs/semantics.md section 3): recipe < schedule preset < YAML file < command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

SCHEDULE_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "sync": {
            "refill": "batch",
            "boundary": "drain",
            "weight_update": "boundary",
            "overlap": False,
            "max_async_level": 0,
            "on_stale": "wait",
        },
        "rapid": {
            "refill": "batch",
            "boundary": "drain",
            "weight_update": "boundary",
            "overlap": False,
            "updates_per_batch": 8,
            "group_size": 4,
            "max_async_level": 0,
            "on_stale": "wait",
        },
        "copris": {
            "refill": "continuous",
            "boundary": "abort",
            "weight_update": "boundary",
            "overlap": False,
            "max_async_level": None,
        },
        "pipeline": {
            "refill": "continuous",
            "boundary": "continue",
            "weight_update": "in_flight",
            "kv": "keep",
            "overlap": True,
            "max_async_level": None,
        },
        "async": {
            "refill": "continuous",
            "boundary": "continue",
            "weight_update": "in_flight",
            "kv": "recompute",
            "overlap": True,
            "max_async_level": 2,
            "on_stale": "drop",
        },
    }
)


def schedule_defaults(preset: str) -> dict[str, Any]:
    """Defaults of one preset, as a nested mapping of settings. Raises KeyError for no preset."""
    return {"schedule": {"preset": preset, **SCHEDULE_PRESETS[preset]}}
