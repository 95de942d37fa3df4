"""Tests that a step at layouts of two ranks has the log-probs, losses and metrics of a step in one
process.

`test_gradient_parity.py` compares gradients of RL steps at every layout with autograd. This module
adds a step of supervised fine-tuning in which one data-parallel rank has no sequence, metrics,
several steps, skipped steps, and a forward pass between a gradient and its application. Gradients
are derived from one step of Adam in its linear regime (see `cases.LINEAR_ADAM`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_async.config import RunConfig
from megatron_async.trajectory.batch import TokenBatch
from tests.distributed import run_ranks
from tests.trainer.cases import (
    GRADIENT_SCALE,
    LINEAR_ADAM,
    ragged_batch,
    relative_difference,
    settings,
    trainer_session,
    weights,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"ranks": 2, "tensor": 2}},
    "tp2 sequence": {"parallel": {"ranks": 2, "tensor": 2, "sequence": True}},
    "pp2": {"parallel": {"ranks": 2, "pipeline": 2}},
    "dp2 distributed": {"parallel": {"ranks": 2}, "optimizer": {"distributed": True}},
    "dp2 replicated": {"parallel": {"ranks": 2}, "optimizer": {"distributed": False}},
}
Measured = dict[str, dict[str, Any]]


def second_alone(batch: TokenBatch) -> TokenBatch:
    """Return a batch that has only the second sequence of `batch`, which is the longest."""
    low, high = batch.cu_seqlens_S1[1:3]
    parts = {
        name: array[low:high] if name.endswith("_T") else array[1:2]
        for name, array in vars(batch).items()
        if name.endswith(("_T", "_S"))
    }
    return replace(batch, **parts, cu_seqlens_S1=np.array([0, high - low], np.int32))


def measure(model_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Measure log-probs, one SFT step on one sequence, one RL step, and three SFT steps."""
    optimizer = {**LINEAR_ADAM, **changes.get("optimizer", {})}
    changes = {**changes, "optimizer": optimizer, "sft": {"optimizer": optimizer}}
    config = settings(model_dir, changes)
    found: dict[str, Any] = {"poisoned": poisoned_steps(config)}
    found["undisturbed"] = weights_after_forward_passes(config, passes=0)
    found["disturbed"] = weights_after_forward_passes(config, passes=2)
    with trainer_session(config, purpose="sft") as trainer:
        found["logprobs"] = trainer.compute_logprobs(ragged_batch())
        before = weights(trainer)
        report = trainer.train_sft(second_alone(ragged_batch()))
        after = weights(trainer)
        found["gradient"] = {name: (before[name] - after[name]) / GRADIENT_SCALE for name in before}
        found["norm"], found["loss"] = report.grad_norm, report.loss
    with trainer_session(config) as trainer:
        found["metrics"] = dict(trainer.train_batch(ragged_batch()).metrics)
    small = {"lr": 0.5, "eps": 1.0, "clip_grad": 1.0}
    distributed = optimizer.get("distributed", True)
    small_changes = {**changes, "sft": {"optimizer": {**small, "distributed": distributed}}}
    with trainer_session(settings(model_dir, small_changes), purpose="sft") as trainer:
        found["losses"] = [trainer.train_sft(ragged_batch(step)).loss for step in (0, 0, 1)]
    return found


def weights_after_forward_passes(config: RunConfig, passes: int) -> dict[str, Any]:
    """Return the weights after two updates of one batch. Before each update, when its gradient is
    complete, compute the log-probs of another batch `passes` times."""
    schedule = config.schedule.model_copy(update={"updates_per_batch": 2})
    with trainer_session(config.model_copy(update={"schedule": schedule})) as trainer:

        def before_update() -> None:
            found = [trainer.compute_logprobs(ragged_batch(1)) for _ in range(passes)]
            assert all(logprobs_T.min() < -1 for logprobs_T in found)

        trainer.train_batch(ragged_batch(), before_update)
        return weights(trainer)


def poisoned_steps(config: RunConfig) -> tuple[bool, bool, bool]:
    """Return whether each of three batches is skipped.

    The first batch has a sequence that is not finite, on one data-parallel rank only. The second
    has a gradient that is not finite, on the last rank only. The third is sound.
    """
    batch = ragged_batch()
    logprobs_T = batch.rollout_logprobs_T.copy()
    logprobs_T[np.flatnonzero(batch.loss_mask_T)[0]] = np.inf
    with trainer_session(config) as trainer:
        first = trainer.train_batch(replace(batch, rollout_logprobs_T=logprobs_T)).skipped
        parameter = next(trainer.model[0].parameters())
        factor = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        handle = parameter.register_hook(lambda gradient: gradient * factor)
        second = trainer.train_batch(batch).skipped
        handle.remove()
        return first, second, trainer.train_batch(batch).skipped


def measure_all(model_dir: Path, layouts: dict[str, dict[str, Any]]) -> Measured:
    return {name: measure(model_dir, changes) for name, changes in layouts.items()}


@pytest.fixture(scope="module")
def single(model_dir: Path) -> dict[str, Any]:
    """Return the measurements of one process."""
    found: Measured = run_ranks(measure_all, 1, model_dir, {"one": {}}, timeout_seconds=120)[0]
    return found["one"]


@pytest.fixture(scope="module")
def double(model_dir: Path) -> list[Measured]:
    """Return the measurements of two ranks at each layout, one mapping for each rank."""
    return run_ranks(measure_all, 2, model_dir, LAYOUTS, timeout_seconds=180)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_at_every_layout_equals_the_step_of_one_process(
    layout: str, single: dict[str, Any], double: list[Measured]
) -> None:
    measured = double[0][layout]
    assert np.abs(single["logprobs"]).max() > 1
    assert np.abs(measured["logprobs"] - single["logprobs"]).max() < TOLERANCE
    assert min(float(gradient.norm()) for gradient in single["gradient"].values()) > 0
    worst = relative_difference(measured["gradient"], single["gradient"])
    assert max(worst.values()) < TOLERANCE, worst
    for name in ("norm", "loss", "losses"):
        assert measured[name] == pytest.approx(single[name], rel=TOLERANCE), name
    assert measured["losses"][1] < measured["losses"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_metrics_are_equal_at_every_layout(
    layout: str, single: dict[str, Any], double: list[Measured]
) -> None:
    measured, reference = double[0][layout]["metrics"], single["metrics"]
    assert measured.keys() == reference.keys()
    for name, value in reference.items():
        assert measured[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_pass_between_gradient_and_update_changes_no_bit(
    layout: str, double: list[Measured]
) -> None:
    """The trainer verifies weights at this point."""
    for rank in double:
        found = rank[layout]
        assert found["disturbed"].keys() == found["undisturbed"].keys()
        for name, tensor in found["undisturbed"].items():
            assert tensor.equal(found["disturbed"][name]), name


def test_step_that_is_not_finite_on_one_rank_is_skipped_on_all(double: list[Measured]) -> None:
    for rank in double:
        assert {name: found["poisoned"] for name, found in rank.items()} == dict.fromkeys(
            LAYOUTS, (True, True, False)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_report_is_equal_on_every_rank(layout: str, double: list[Measured]) -> None:
    first, second = (rank[layout] for rank in double)
    np.testing.assert_array_equal(first["logprobs"], second["logprobs"])
    assert first["metrics"] == second["metrics"]
    assert first["losses"] == second["losses"]
