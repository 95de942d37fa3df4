"""Tests that gradients equal those of autograd in float64, for random models of every family at
random layouts.

The reference is a transformers model that computes every operation in float64, one sequence at a
time. The trainer computes in float32, packed, and split into microbatches and over ranks. Its
gradient is derived from one step of Adam in its linear regime, as the difference of the exported
weights before and after. Therefore the comparison includes reduction, sharding, gathering and
export. Every second case clips the gradient to half its norm, which is over all parameters,
including experts.

Copies of the new weights that must be equal on several ranks are compared bit for bit.

The relative error of a tensor is ||ours - reference|| / ||reference||. If the reference is exactly
zero (an expert that got no token), our gradient must be exactly zero.

To run more cases, another seed or a larger world manually (about 0.7 s a case on two cores):
    MEGATRON_ASYNC_GRADIENT_CASES=2000 MEGATRON_ASYNC_GRADIENT_SEED=7 \
        MEGATRON_ASYNC_GRADIENT_RANKS=8 pytest tests/trainer/test_gradient_parity.py --timeout 0
(`--junitxml FILE` records each case's worst tensor.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_async.config import RunConfig
from tests.distributed import run_ranks
from tests.trainer.cases import settings, weights
from tests.trainer.random_cases import (
    EXPERT_FAMILIES,
    RandomCase,
    Reference,
    draw_cases,
    reference_gradient,
)
from tests.worlds import world

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("MEGATRON_ASYNC_GRADIENT_CASES", "60"))
SEED = int(os.environ.get("MEGATRON_ASYNC_GRADIENT_SEED", "0"))
RANKS = int(os.environ.get("MEGATRON_ASYNC_GRADIENT_RANKS", "4"))
TOLERANCE = 1e-4
# The first update of this Adam is SCALE * gradient, to one part in 10^7 for gradients up to 1. The
# scale is large, so that rounding of the weight does not remove a small gradient.
SCALE = 1e4
_ADAM = {"lr": SCALE * 1e7, "eps": 1e7, "betas": [0.9, 0.99]}


@dataclass(frozen=True)
class Measured:
    """Results of one case: the relative error of each tensor, and loss and gradient norm of the
    trainer and of the reference.

    `differences` names copies of the new weights that must be equal on several ranks but are not.
    """

    case: RandomCase
    errors: Mapping[str, float]
    norm: float
    reference_norm: float
    loss: float
    reference_loss: float
    differences: Sequence[str]


def measure_cases(folder: str, count: int, seed: int) -> list[Measured]:
    """Run in each rank: compute this rank's share of the references, then measure all cases, layout
    by layout."""
    from megatron_async.trainer.device import device_adapter
    from megatron_async.trainer.parallel import init_parallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cases = draw_cases(count, size, seed)
    for case in cases[
        rank::size
    ]:  # Before the process group exists, because then only rank 0 may save.
        path = Path(folder) / str(case.number)
        torch.save(reference_gradient(case, path), path / "reference.pt")
    trainer = _config(cases[0], folder).trainer
    found = []
    by_layout = sorted(cases, key=lambda case: (repr(case.parallel), case.number))
    layouts = groupby(by_layout, key=lambda case: case.parallel)
    for number, (parallel, its_cases) in enumerate(layouts):
        with device_adapter(), world(size, number):  # Ends the groups and their threads.
            init_parallel(parallel, trainer, seed=1)
            found += [_measure(case, folder) for case in its_cases]
    return found if rank == 0 else []


def _config(case: RandomCase, folder: str, clip_grad: float = 0.0) -> RunConfig:
    optimizer = {**_ADAM, "distributed": case.distributed_optimizer, "clip_grad": clip_grad}
    changes = {
        "parallel": case.parallel.model_dump(),
        "optimizer": optimizer,
        "trainer": {
            "microbatch_tokens": case.microbatch_tokens,
            "recompute": case.recompute,
            "compare_replicas_every_steps": 0,  # Replicas are compared below, case by case.
            "collective_timeout_seconds": 300,  # Covers the slowest rank's references.
        },
        "schedule": {"group_size": 2, "groups_per_batch": 3},
        "algorithm": {"recipe": "pg", "entropy_coef": case.entropy_coef},
    }
    return settings(Path(folder) / str(case.number) / "model", changes)


def _measure(case: RandomCase, folder: str) -> Measured:
    from megatron_async.trainer.replicas import ReplicaCheck
    from megatron_async.trainer.step import PolicyTrainer

    path = Path(folder) / str(case.number) / "reference.pt"
    reference: Reference = torch.load(path, weights_only=False)
    total = float(torch.stack([part.norm() for part in reference.gradient.values()]).norm())
    clip = total / 2 if case.number % 2 else 0.0
    factor = clip / (total + 1e-6) if clip else 1.0  # As Megatron computes it.
    trainer = PolicyTrainer(_config(case, folder, clip))
    report = trainer.train_batch(reference.batch)
    check = ReplicaCheck(trainer.model[0], trainer.optimizer, every_steps=1)
    after = weights(trainer)  # The complete model on rank 0, empty on other ranks.
    ours = {
        name: (reference.weights[name].double() - after[name].double()) / SCALE for name in after
    }
    assert ours.keys() == (reference.gradient.keys() if dist.get_rank() == 0 else set())
    return Measured(
        case=case,
        errors={
            name: _relative_error(ours[name], factor * reference.gradient[name]) for name in ours
        },
        norm=report.grad_norm,
        reference_norm=total,
        loss=report.loss,
        reference_loss=reference.loss,
        differences=[str(found) for found in check.compare()],
    )


def _relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    difference, norm = float((ours - reference).norm()), float(reference.norm())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Measured]:
    folder = tmp_path_factory.mktemp("gradients")
    # A case takes a second or less; ten seconds for each are enough on a busy machine.
    results = run_ranks(
        measure_cases, RANKS, str(folder), COUNT, SEED, timeout_seconds=120 + 10 * COUNT
    )
    return {found.case.number: found for found in results[0]}


@pytest.mark.parametrize("number", range(COUNT))
def test_gradient_of_every_tensor_equals_autograd(
    number: int,
    measured: dict[int, Measured],
    record_property: Callable[[str, object], None],
) -> None:
    found = measured[number]
    worst = sorted(((error, name) for name, error in found.errors.items()), reverse=True)
    record_property("worst", worst[0])
    assert worst[0][0] < TOLERANCE, f"{found.case}: {worst[:5]}"
    assert found.loss == pytest.approx(found.reference_loss, rel=TOLERANCE, abs=1e-6), found.case
    assert not found.differences, found.case
    assert found.norm == pytest.approx(found.reference_norm, rel=TOLERANCE), found.case


@pytest.mark.skipif(COUNT < 60 or RANKS != 4, reason="a manual run may choose fewer cases")
def test_random_cases_contain_every_layout_of_four_ranks(measured: dict[int, Measured]) -> None:
    cases = [found.case for found in measured.values()]
    dense = {case.parallel for case in cases if case.family not in EXPERT_FAMILIES}
    sparse = {case.parallel for case in cases if case.family in EXPERT_FAMILIES}
    # There are 6 combinations of (TP, PP, DP), 3 of them with and without sequence parallelism.
    # Experts need sequence parallelism at TP > 1. They combine with every number of expert ranks
    # that divides the ranks of a stage.
    assert (len(dense), len(sparse)) == (9, 14)
    assert any(case.model["tie_word_embeddings"] and case.parallel.pipeline > 1 for case in cases)
