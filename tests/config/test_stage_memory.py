"""What a rank of a shipped file holds, by the trainer's own code, is what the file states.

`tests/config/stage_memory.py` counts; the figures in the files are the planner's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
@pytest.mark.parametrize("name", PUBLISHED)
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


def depths(folder: Path) -> Any:
    """Peaks of three depths, and without recomputation, of the file that is quickest."""
    from tests.config.stage_memory import stage_peaks

    config, raw = file("qwen2.5-7b")
    few = {"microbatch_tokens": 2048, "logprob_chunk_tokens": 2048, "recompute": "all"}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=few)})
    found = [stage_peaks(config, raw, folder, 0, layers) for layers in (1, 2, 4)]
    kept = config.trainer.model_copy(update={"recompute": "none"})
    config = config.model_copy(update={"trainer": kept})
    return found, [stage_peaks(config, raw, folder, 0, layers) for layers in (1, 2)]


@pytest.mark.slow
@pytest.mark.one_core
def test_two_depths_give_any_other_and_recomputation_is_seen(tmp_path: Path) -> None:
    [(found, kept)] = run_ranks(depths, 1, tmp_path, timeout_seconds=580)
    one, two, four = found
    for mine, expected in zip(vars(two.at(2, one, 1)).values(), vars(four).values(), strict=True):
        assert mine == pytest.approx(expected, rel=1e-3)

    def activations(deep: Any, shallow: Any) -> float:
        """Of one more layer."""
        return float((deep.gradients - deep.state) - (shallow.gradients - shallow.state))

    hidden = 2 * 2048 * 3584 / 2
    assert activations(two, one) == pytest.approx(hidden, rel=1e-3)
    assert activations(kept[1], kept[0]) > 15 * hidden


def test_a_storage_counts_once_and_until_nothing_refers_to_it() -> None:
    from tests.config.stage_memory import StorageCount

    with StorageCount("cpu") as storages:
        whole = torch.zeros(1000)
        part = whole[10:20].view(2, 5)
        part.add_(1)
        assert storages.bytes == 4000
        del whole
        assert storages.bytes == 4000, "a view holds all of it"
        kept = part * 2
        assert storages.bytes == 4040
        del part
        assert (storages.bytes, storages.take_peak()) == (40, 4040)
        assert storages.take_peak() == 4 * kept.numel()
