"""Tests that one grouped product over all experts of a rank gives the results of separate products,
at every layout."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config.model import ModelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Experts
from megatron_async.trainer.capabilities import Capabilities, choose
from megatron_async.trainer.device import device_adapter
from megatron_async.trainer.experts import GroupedLinear
from tests.distributed import run_ranks
from tests.hf_models import save_hf_model
from tests.trainer.cases import (
    GRADIENT_SCALE,
    LINEAR_ADAM,
    ragged_batch,
    relative_difference,
    settings,
    single_process,
    trainer_session,
    weights,
)
from tests.trainer.test_model_pieces import CPU_ONLY, DENSE
from tests.trainer.test_step_layouts import second_alone

TOLERANCE = 1e-6
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {},
    "ep2": {"expert": 2},
    "ep4": {"expert": 4},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "tp2_sp_ep4": {"tensor": 2, "sequence": True, "expert": 4},
}
KINDS = ("sequential", "grouped")


def grouped_layer(count: int, dtype: torch.dtype = torch.float32) -> GroupedLinear:
    config: Any = SimpleNamespace(params_dtype=dtype)
    torch.manual_seed(0)
    with device_adapter():
        return GroupedLinear(count, 16, 24, config=config, init_method=torch.nn.init.normal_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1, 0), (0, 0, 0, 0, 4), (2, 2, 2, 2, 2), (0,) * 5])
def test_grouped_linear_equals_products_of_single_experts(
    counts: Sequence[int], dtype: torch.dtype
) -> None:
    layer = grouped_layer(len(counts), dtype)
    rows_PI = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    out_PO, bias = layer(rows_PI, list(counts))
    parts = zip(rows_PI.split(list(counts)), layer.parameters(), strict=True)
    expected_PO = torch.cat([rows @ weight.T for rows, weight in parts])
    assert bias is None and out_PO.dtype is dtype
    torch.testing.assert_close(out_PO, expected_PO, rtol=0, atol=TOLERANCE)
    inputs = (rows_PI, *layer.parameters())
    cotangent = torch.randn_like(expected_PO)
    found = torch.autograd.grad(out_PO, inputs, cotangent)
    expected = torch.autograd.grad(expected_PO, inputs, cotangent)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_grouped_linear_gradient_is_zero_when_an_expert_has_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some GPUs leave uninitialized memory in the gradient of such an expert."""
    multiply = torch.nn.functional.grouped_mm

    def leave_garbage(left: Any, right: Any, *, offs: Any) -> Any:
        product = multiply(left, right, offs=offs)
        if product.dim() == 3:
            product[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leave_garbage)
    layer = grouped_layer(3)
    layer(torch.randn(4, 16), [3, 0, 1])[0].sum().backward()
    assert layer.weight1.grad is not None and not layer.weight1.grad.any()
    assert all(bool(w.grad.any()) for w in (layer.weight0, layer.weight2))


def train(path: Path, layouts: dict[str, dict[str, Any]]) -> dict[Any, Any]:
    """Run in each rank; return log-probs, gradients, their norm, and the rows of each expert."""
    found = {}
    for layout, parallel in layouts.items():
        for kind in KINDS:
            changes = {
                "model": {"experts": kind},
                "parallel": {"ranks": 4, **parallel},
                "sft": {"optimizer": LINEAR_ADAM},
            }
            with trainer_session(settings(path, changes), purpose="sft") as trainer:
                found[layout, kind] = _step(trainer)
    return found


def _step(trainer: Any) -> dict[str, Any]:
    rows: list[list[int]] = []
    for module in trainer.model[0].modules():
        if isinstance(module, GroupedLinear):
            module.register_forward_pre_hook(lambda _, arguments: rows.append(arguments[1]))
    logprobs_T = trainer.compute_logprobs(ragged_batch())
    before = weights(trainer)
    report = trainer.train_sft(second_alone(ragged_batch()))
    gradients = {
        name: (before[name] - after) / GRADIENT_SCALE for name, after in weights(trainer).items()
    }
    return {
        "logprobs": logprobs_T,
        "norm": report.grad_norm,
        "gradients": gradients,
        "empty experts": sum(row.count(0) for row in rows),
        "grouped": bool(rows),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Train on one sequence only, so that most experts have no row and some ranks have no row at
    all."""
    path = tmp_path_factory.mktemp("experts")
    save_hf_model("qwen3_moe", path, num_experts=32, num_hidden_layers=2)
    return run_ranks(train, 4, path, LAYOUTS, timeout_seconds=240)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_experts_give_the_step_of_sequential_experts(
    layout: str, results: list[dict[Any, Any]]
) -> None:
    for rank in results:
        sequential, grouped = (rank[layout, kind] for kind in KINDS)
        assert grouped["grouped"] and not sequential["grouped"]
        worst = np.abs(grouped["logprobs"] - sequential["logprobs"]).max()
        assert worst < TOLERANCE
        assert grouped["norm"] == pytest.approx(sequential["norm"], rel=TOLERANCE)
        if grouped["gradients"]:  # Rank 0 has the gradients of the complete model.
            differences = relative_difference(grouped["gradients"], sequential["gradients"])
            assert max(differences.values()) < TOLERANCE
    assert sum(rank[layout, "grouped"]["empty experts"] for rank in results) > 10


def test_expert_inputs_are_freed_after_a_step_with_each_recomputation(tmp_path: Path) -> None:
    """Without a countermeasure, Megatron's dispatcher would keep the inputs through its routing
    probabilities."""
    save_hf_model("qwen3_moe", tmp_path, num_hidden_layers=2)
    inputs: list[weakref.ref[torch.Tensor]] = []

    def note_input(_: object, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(weakref.ref(arguments[0]))

    for recompute in ("none", "feed_forward", 1, "all"):
        config = settings(tmp_path, {"trainer": {"recompute": recompute}})
        with single_process(), trainer_session(config, purpose="sft") as trainer:
            for layer in trainer.model[0].decoder.layers:
                layer.mlp.router.register_forward_pre_hook(note_input)
            assert not trainer.train_sft(ragged_batch()).skipped
            assert len(inputs) >= 4
            assert not any(reference() is not None for reference in inputs), recompute
            inputs.clear()


def moe(ffn_size: int) -> Any:
    return replace(DENSE, experts=Experts(8, 2, ffn_size, False))


GPU = Capabilities("13.0", "H100", None, None, None)
ENGINE = Capabilities("13.0", "H100", "2.11.0", None, None)


@pytest.mark.parametrize(
    ("setting", "found", "dtype", "ffn_size", "chosen"),
    [
        ("auto", CPU_ONLY, "float32", 24, "grouped"),
        ("auto", CPU_ONLY, "float32", 25, "sequential"),
        ("auto", CPU_ONLY, "bfloat16", 20, "sequential"),
        ("auto", GPU, "bfloat16", 24, "grouped"),
        ("auto", GPU, "float32", 24, "sequential"),
        ("auto", ENGINE, "bfloat16", 24, "grouped"),
        ("auto", ENGINE, "float32", 24, "transformer_engine"),
        ("sequential", ENGINE, "bfloat16", 24, "sequential"),
        ("transformer_engine", ENGINE, "bfloat16", 24, "transformer_engine"),
    ],
)
def test_choose_groups_experts_when_torch_supports_their_width_and_dtype(
    setting: Any, found: Capabilities, dtype: Any, ffn_size: int, chosen: str
) -> None:
    model = ModelConfig(experts=setting, dtype=dtype)
    assert choose(model, found, moe(ffn_size)).experts == chosen


@pytest.mark.parametrize(
    ("setting", "found", "ffn_size", "message"),
    [
        ("grouped", CPU_ONLY, 25, "model.experts is grouped.* width of its experts is 25"),
        ("grouped", GPU, 24, "model.experts is grouped.* model.dtype is float32"),
        ("transformer_engine", CPU_ONLY, 24, "model.experts is transformer_engine.* no CUDA"),
    ],
)
def test_choose_refuses_kinds_of_experts_that_are_unavailable(
    setting: Any, found: Capabilities, ffn_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(ModelConfig(experts=setting, dtype="float32"), found, moe(ffn_size))


def test_choose_ignores_the_experts_setting_when_the_model_has_no_experts() -> None:
    assert choose(ModelConfig(experts="grouped"), CPU_ONLY, DENSE).experts == "sequential"
