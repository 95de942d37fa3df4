"""Tests the Muon optimizer against torch's Muon, and that its updates are equal at every layout of
ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.checkpoint.manifest import ADAM, MOMENTUM
from megatron_async.trainer.muon import Muon, newton_schulz
from tests.distributed import run_ranks
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session, weights

MUON = {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 9))
def test_newton_schulz_brings_singular_values_close_to_one(
    rows: int, columns: int, seed: int
) -> None:
    values_RC = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    # Singular values are far apart, as those of a momentum, but large enough for five iterations.
    u, s, v = torch.linalg.svd(values_RC, full_matrices=False)
    spread = torch.logspace(0, -1.5, len(s))
    found = torch.linalg.svdvals(newton_schulz(u @ torch.diag(spread) @ v))
    assert found.min() > 0.5
    assert found.max() < 1.3


def test_muon_equals_torch_muon_for_matrices_and_adam_for_vectors() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.randn(24, 40), torch.randn(24)
    ours = [torch.nn.Parameter(x.clone()) for x in (matrix, vector)]
    theirs = [torch.nn.Parameter(x.clone()) for x in (matrix, vector)]
    group = {"params": ours, "lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = Muon([group], {ours[0]: None}, 0.95, torch.bfloat16)
    assert [set(optimizer.state.get(parameter, ())) for parameter in ours] == [{MOMENTUM}, set()]
    muon = torch.optim.Muon(
        theirs[:1], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(theirs[1:], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        muon.step()
        adam.step()
    assert torch.equal(ours[1], theirs[1])
    moved = (theirs[0] - matrix).norm()
    assert (ours[0] - theirs[0]).norm() < 0.01 * moved  # Both optimizers orthogonalize in bfloat16.


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"ranks": 2, "tensor": 2}},
    "pp2": {"parallel": {"ranks": 2, "pipeline": 2}},
    "dp2": {"parallel": {"ranks": 2}},
}


def after_two_steps(model_dir: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, layout in layouts.items():
        config = settings(model_dir, {**layout, "sft": {"optimizer": MUON}})
        with trainer_session(config, purpose="sft") as trainer:
            before = weights(trainer)
            for step in range(2):
                trainer.train_sft(ragged_batch(step))
            found[name] = {key: value - before[key] for key, value in weights(trainer).items()}
    return found


@pytest.mark.slow
def test_muon_updates_are_equal_at_every_layout(model_dir: Path) -> None:
    reference = run_ranks(after_two_steps, 1, model_dir, {"one": {}}, timeout_seconds=60)[0]["one"]
    found = run_ranks(after_two_steps, 2, model_dir, LAYOUTS, timeout_seconds=120)[0]
    assert all(update.any() for update in reference.values())
    for layout, updates in found.items():
        for name, update in updates.items():
            # Five iterations amplify rounding errors by up to 3.4445 to the fifth.
            worst = (update - reference[name]).abs().max() / reference[name].abs().max()
            assert worst < 1e-3, (layout, name, float(worst))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_state_is_momentum_for_layer_matrices_and_adam_for_the_rest(
    model_dir: Path, dtype: str
) -> None:
    config = settings(model_dir, {"optimizer": MUON, "model": {"dtype": dtype}})
    with single_process(), trainer_session(config) as trainer:
        loss = trainer.train_batch(ragged_batch()).loss
        states_of = {
            name: set(trainer.optimizer.chained_optimizers[0].optimizer.state[main])
            for name, parameter in trainer.model[0].named_parameters()
            for main in [getattr(parameter, "main_param", parameter)]
        }
    assert math.isfinite(loss)
    for name, states in states_of.items():
        matrix = ".layers." in name and "layernorm" not in name
        assert states == ({MOMENTUM} if matrix else {"step", *ADAM}), name
