"""The same step at every layout: log-probs, gradients and losses equal those of one process.

Gradients are read off one step of Adam in its linear regime (see `cases.LINEAR_ADAM`), as the
difference of the exported weights before and after, so that tensor, pipeline and data-parallel
reduction, the tied embedding, the distributed optimizer and the export are all in what is
compared. The batch is packed, ragged and split into several microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    write_model,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
PURPOSES = ("sft", "rl", "lonely")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"ranks": 2, "tensor": 2}},
    "tp2 sequence": {"parallel": {"ranks": 2, "tensor": 2, "sequence": True}},
    "pp2": {"parallel": {"ranks": 2, "pipeline": 2}},
    "dp2 distributed": {"parallel": {"ranks": 2}, "optimizer": {"distributed": True}},
    "dp2 replicated": {"parallel": {"ranks": 2}, "optimizer": {"distributed": False}},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp2 x pp2": {"parallel": {"ranks": 4, "tensor": 2, "pipeline": 2}},
    "tp2 x dp2": {"parallel": {"ranks": 4, "tensor": 2, "sequence": True}},
    "pp2 x dp2": {"parallel": {"ranks": 4, "pipeline": 2}},
}
ONE: dict[str, dict[str, Any]] = {
    "one": {},
    "one replicated": {"optimizer": {"distributed": False}},
    "one large microbatch": {"trainer": {"microbatch_tokens": 4096}},
    "one recomputing all": {"trainer": {"recompute": "all"}},
    "one recomputing a layer": {"trainer": {"recompute": 1}},
    "one recomputing feed-forward": {"trainer": {"recompute": "feed_forward"}},
    "one sequence each": {"trainer": {"microbatch_tokens": 1}},
}


def second_alone(batch: TokenBatch) -> TokenBatch:
    """Its second sequence, which is the longest."""
    low, high = batch.cu_seqlens_S1[1:3]
    parts = {
        name: array[low:high] if name.endswith("_T") else array[1:2]
        for name, array in vars(batch).items()
        if name.endswith(("_T", "_S"))
    }
    return replace(batch, **parts, cu_seqlens_S1=np.array([0, high - low], np.int32))


def measure(model_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, gradients of SFT and RL steps, losses of three SFT steps, on this rank.

    "lonely" is an SFT step on one sequence: with two data-parallel ranks, one has nothing to do.
    """
    optimizer = {**LINEAR_ADAM, **changes.get("optimizer", {})}
    changes = {**changes, "optimizer": optimizer, "sft": {"optimizer": optimizer}}
    config = settings(model_dir, changes)
    found: dict[str, Any] = {}
    for purpose in PURPOSES:
        with trainer_session(config, purpose="rl" if purpose == "rl" else "sft") as trainer:
            before = weights(trainer)
            if purpose == "rl":
                report = trainer.train_batch(ragged_batch())
            else:
                found["logprobs"] = trainer.compute_logprobs(ragged_batch())
                batch = ragged_batch()
                report = trainer.train_sft(second_alone(batch) if purpose == "lonely" else batch)
            after = weights(trainer)
            found[f"{purpose} gradient"] = {
                name: (before[name] - after[name]) / GRADIENT_SCALE for name in before
            }
            found[f"{purpose} norm"] = report.grad_norm
            found[f"{purpose} loss"] = report.loss
            found[f"{purpose} metrics"] = dict(report.metrics)
    found["poisoned"] = poisoned_steps(config)
    small = {"lr": 0.5, "eps": 1.0, "clip_grad": 1.0}
    distributed = optimizer.get("distributed", True)
    small_changes = {**changes, "sft": {"optimizer": {**small, "distributed": distributed}}}
    with trainer_session(settings(model_dir, small_changes), purpose="sft") as trainer:
        found["losses"] = [trainer.train_sft(ragged_batch(step)).loss for step in (0, 0, 1)]
    return found


def poisoned_steps(config: RunConfig) -> tuple[bool, bool, bool]:
    """Return which batches are skipped.

    One has a sequence that is not finite (which one data-parallel rank alone sees), one a gradient
    that is not finite on the last rank alone; after them comes a sound one.
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


def measure_all(model_dir: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: measure(model_dir, changes) for name, changes in layouts.items()}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def single(model_dir: Path) -> dict[str, dict[str, Any]]:
    return dict(run_ranks(measure_all, 1, model_dir, ONE, timeout_seconds=120)[0])


@pytest.fixture(scope="module")
def double(model_dir: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(measure_all, 2, model_dir, LAYOUTS, timeout_seconds=180)


def test_mixed_layouts_on_four_ranks(model_dir: Path, single: dict[str, dict[str, Any]]) -> None:
    reference = single["one"]
    for name, measured in run_ranks(measure_all, 4, model_dir, FOUR, timeout_seconds=180)[
        0
    ].items():
        for purpose in PURPOSES:
            gradient = f"{purpose} gradient"
            worst = relative_difference(measured[gradient], reference[gradient])
            assert max(worst.values()) < TOLERANCE, (name, purpose, worst)
        assert measured["losses"] == pytest.approx(reference["losses"], rel=TOLERANCE)


@pytest.fixture(params=[*LAYOUTS, *(name for name in ONE if name != "one")])
def measured(
    request: pytest.FixtureRequest,
    single: dict[str, dict[str, Any]],
    double: list[dict[str, dict[str, Any]]],
) -> dict[str, Any]:
    """What rank 0 measured at one layout."""
    found: dict[str, Any] = {**single, **double[0]}[request.param]
    return found


def test_log_probs_are_equal(measured: dict[str, Any], single: dict[str, Any]) -> None:
    reference_T = single["one"]["logprobs"]
    assert np.abs(reference_T).max() > 1
    assert np.abs(measured["logprobs"] - reference_T).max() < TOLERANCE


@pytest.mark.parametrize("purpose", PURPOSES)
def test_gradients_are_equal(
    measured: dict[str, Any], single: dict[str, Any], purpose: str
) -> None:
    reference = single["one"][f"{purpose} gradient"]
    assert min(float(gradient.norm()) for gradient in reference.values()) > 0
    worst = relative_difference(measured[f"{purpose} gradient"], reference)
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("purpose", PURPOSES)
def test_gradient_norm_and_loss_are_equal(
    measured: dict[str, Any], single: dict[str, Any], purpose: str
) -> None:
    reference = single["one"]
    assert measured[f"{purpose} norm"] == pytest.approx(reference[f"{purpose} norm"], rel=TOLERANCE)
    assert measured[f"{purpose} loss"] == pytest.approx(reference[f"{purpose} loss"], rel=TOLERANCE)


def test_the_norm_is_that_of_the_exported_gradient(single: dict[str, Any]) -> None:
    gradient = single["one"]["sft gradient"].values()
    norm = float(torch.stack([tensor.norm() for tensor in gradient]).norm())
    assert single["one"]["sft norm"] == pytest.approx(norm, rel=1e-3)


def test_metrics_do_not_depend_on_the_layout(
    measured: dict[str, Any], single: dict[str, Any]
) -> None:
    reference = single["one"]["rl metrics"]
    assert measured["rl metrics"].keys() == reference.keys()
    for name, value in reference.items():
        assert measured["rl metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_losses_of_several_steps_stay_equal(
    measured: dict[str, Any], single: dict[str, Any]
) -> None:
    assert measured["losses"] == pytest.approx(single["one"]["losses"], rel=TOLERANCE)
    assert measured["losses"][1] < measured["losses"][0]


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(
    double: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in double:
        assert {name: found["poisoned"] for name, found in rank.items()} == dict.fromkeys(
            LAYOUTS, (True, True, False)
        )


def test_every_rank_reports_the_same(double: list[dict[str, dict[str, Any]]]) -> None:
    for name in LAYOUTS:
        first, second = double[0][name], double[1][name]
        np.testing.assert_array_equal(first["logprobs"], second["logprobs"])
        assert first["rl metrics"] == second["rl metrics"]
        assert first["losses"] == second["losses"]
