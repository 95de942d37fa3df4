"""Provides presets at test size, and a Hypothesis strategy for all legal schedules."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_async.config import build_config
from megatron_async.config.schedule import PresetName, ScheduleConfig

PRESETS: tuple[PresetName, ...] = ("sync", "rapid", "copris", "pipeline", "async")
SMALL: dict[str, Any] = {
    "groups_per_batch": 2,
    "group_size": 2,
    "concurrency": 6,
    "updates_per_batch": 1,
}


def preset(name: str, **changes: Any) -> ScheduleConfig:
    """Return a preset with two groups of two trajectories per batch, and six requests in flight."""
    return build_config({"schedule": {"preset": name, **SMALL, **changes}}).schedule


def _valid(settings: dict[str, Any]) -> bool:
    try:
        ScheduleConfig(**settings)
    except ValidationError:
        return False
    return True


sizes = {
    "groups_per_batch": st.integers(1, 4),
    "group_size": st.integers(2, 3),
    "concurrency": st.one_of(st.integers(1, 14), st.just("auto")),
    "buffer_order": st.sampled_from(["oldest_first", "newest_first", "longest_first"]),
    "dynamic_sampling": st.booleans(),
}


def presets() -> st.SearchStrategy[ScheduleConfig]:
    """Return a strategy for the five presets at random small sizes."""
    return st.builds(
        lambda name, changes: preset(name, **changes),
        st.sampled_from(PRESETS),
        st.fixed_dictionaries(sizes),
    )


def composed() -> st.SearchStrategy[ScheduleConfig]:
    """Return a strategy for all legal schedules."""
    settings = st.fixed_dictionaries(
        {
            **sizes,
            "refill": st.sampled_from(["continuous", "batch"]),
            "boundary": st.sampled_from(["drain", "abort", "continue", "pause"]),
            "weight_update": st.sampled_from(["boundary", "in_flight"]),
            "kv": st.sampled_from(["keep", "recompute"]),
            "max_async_level": st.one_of(st.none(), st.integers(0, 3)),
            "on_stale": st.sampled_from(["wait", "drop", "restart", "mask"]),
            "max_waiting_batches": st.integers(1, 3),
            "overflow": st.sampled_from(["block", "drop_oldest"]),
            "oversample": st.sampled_from([1.0, 1.0, 1.5, 2.0]),
            "overlap": st.booleans(),
        }
    )
    return settings.filter(_valid).map(lambda chosen: ScheduleConfig(**chosen))
