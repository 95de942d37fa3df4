"""Tests that the counted memory of a rank of a shipped config equals the memory that the config
states.

`tests/config/stage_memory.py` counts the memory; the planner computes the figures in the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig
from tests.config.test_large_configs import (
    DATA,
    PUBLISHED,
    architecture_of,
    as_started,
    count,
    figure,
    step_gigabytes,
)
from tests.distributed import run_ranks

MAX_DEVIATION = 0.15
"""Largest permitted relative difference of the stated peak from the counted peak. No constant of
the planner is fitted to the counted peak."""


FILES = ("llama3.3-70b", "qwen2.5-32b", "qwen3-30b-a3b")
"""One config for each model family of the shipped configs: all layers of a stage recomputed, some
layers recomputed, and experts."""


def config_and_shape(name: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the config of a shipped file, and the config.json of its model."""
    raw = json.loads((DATA / f"{PUBLISHED[name][0]}.config.json").read_text())
    return as_started(name), raw


def counted_peaks(name: str, folder: Path) -> Any:
    from tests.config.stage_memory import peaks_of_stages

    config, raw = config_and_shape(name)
    return peaks_of_stages(config, raw, folder)


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("name", FILES)
def test_counted_peak_of_each_stage_is_close_to_the_stated_peak(name: str, tmp_path: Path) -> None:
    [stages] = run_ranks(counted_peaks, 1, name, tmp_path, timeout_seconds=580)
    config, _ = config_and_shape(name)
    print(name, *(vars(stage) for stage in stages), sep="\n")
    state, stated = figure(name, r"state ([\d.]+) GB"), figure(name, r"peak ([\d.]+) of")
    # The config states the mean of the stages; the embedding or the head makes one stage larger.
    mean = sum(stage.state for stage in stages) / len(stages) / 1e9
    assert mean == pytest.approx(state, rel=0.01)
    largest = max(stage.largest for stage in stages) / 1e9
    assert largest == pytest.approx(stated, rel=MAX_DEVIATION)
    # After a microbatch, only Megatron's buffer for gathered inputs remains.
    assert max(stage.between - stage.state for stage in stages) < 1e9
    steps = [(stage.optimizer_step - stage.between) / 1e9 for stage in stages]
    step = step_gigabytes(config, count(architecture_of(PUBLISHED[name][0])))
    assert max(steps) == pytest.approx(step, rel=0.1)
