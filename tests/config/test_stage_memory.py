"""What a rank of a shipped file holds, by the trainer's own code, is what the file states.

`tests/config/stage_memory.py` counts; the figures in the files are the planner's.
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

OFF = 0.15
"""As far as the stated peak may be from what is counted. Nothing in the planner is fitted to it."""


FILES = ("llama3.3-70b", "qwen2.5-32b", "qwen3-30b-a3b")
"""Each family of the shipped files; all layers of a stage recomputed, some, and experts."""


def file(name: str) -> tuple[RunConfig, dict[str, Any]]:
    """Of the file, and the config.json of its model."""
    raw = json.loads((DATA / f"{PUBLISHED[name][0]}.config.json").read_text())
    return as_started(name), raw


def stated_peaks(name: str, folder: Path) -> Any:
    from tests.config.stage_memory import peaks_of_stages

    config, raw = file(name)
    return peaks_of_stages(config, raw, folder)


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("name", FILES)
def test_the_peak_of_each_stage_is_near_the_stated_one(name: str, tmp_path: Path) -> None:
    [stages] = run_ranks(stated_peaks, 1, name, tmp_path, timeout_seconds=580)
    config, _ = file(name)
    print(name, *(vars(stage) for stage in stages), sep="\n")
    state, stated = figure(name, r"state ([\d.]+) GB"), figure(name, r"peak ([\d.]+) of")
    # A mean stage is what is stated; the embedding or the head makes one larger.
    mean = sum(stage.state for stage in stages) / len(stages) / 1e9
    assert mean == pytest.approx(state, rel=0.01)
    largest = max(stage.most for stage in stages) / 1e9
    assert largest == pytest.approx(stated, rel=OFF)
    # Nothing of a microbatch outlives it but Megatron's buffer for gathered inputs.
    assert max(stage.between - stage.state for stage in stages) < 1e9
    steps = [(stage.optimizer_step - stage.between) / 1e9 for stage in stages]
    step = step_gigabytes(config, count(architecture_of(PUBLISHED[name][0])))
    assert max(steps) == pytest.approx(step, rel=0.1)
