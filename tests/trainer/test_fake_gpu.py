"""Tests the trainer's GPU code without a GPU: devices, shapes, and the tensors that NCCL gets.

`tests/config/test_stage_memory.py` covers the model families of the shipped configs.

Each case is one rank of TP 2 x DP 2 with sequence parallelism (experts over 2 ranks). The model is
built, wrapped and given its optimizer. Two microbatches run forward and backward with
recomputation, and the optimizer makes its step. No value is computed (tests/trainer/fake_gpu.py).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_async.config import build_config
from megatron_async.trainer import capabilities
from megatron_async.trainer.capabilities import Capabilities
from megatron_async.trainer.forward import Microbatch, PolicyRunner
from megatron_async.trainer.optimizer import (
    build_optimizer,
    guarded_step,
    wrap_data_parallel,
    zero_gradients,
)
from megatron_async.trainer.packed import PackedInputs, TokenLogprobs
from megatron_async.trainer.parallel import init_parallel
from megatron_async.trainer.policy_model import build_policy
from tests.distributed import run_ranks
from tests.hf_models import CASES, EXPERT_CASES, SHAPE

FAMILIES = ["qwen3", "gemma3", "mixtral"]
TOKENS = 16
# Each of a tensor rank's 8 tokens is routed to two experts.
ROUTED = 16
NO_ENGINE = Capabilities(
    cuda="13.0",
    device_name="NVIDIA H100 80GB HBM3",
    transformer_engine=None,
    apex=None,
    triton="3.8.0",
)


@dataclass(frozen=True)
class Found:
    """Devices and types of a family's tensors after an update."""

    parameters: set[str]
    main_gradients: set[tuple[str, torch.dtype]]
    moments: set[str]
    applied: bool


def one_update(case: str, folder: Path) -> Found:
    """Make an update of one family in a process that has no process group yet, and return where its
    tensors are."""
    from tests.trainer.fake_gpu import fake_gpu, fake_world

    kernel = importlib.import_module("megatron_async_kernels.token_logprob")
    config = build_config(
        {
            "model": {"path": str(write_config(case, folder / case)), "dtype": "bfloat16"},
            "parallel": {
                "ranks": 4,
                "tensor": 2,
                "sequence": True,
                "expert": 2 if case in EXPERT_CASES else 1,
            },
            "trainer": {"recompute": "all"},
        }
    )
    with (
        fake_gpu(ROUTED),
        fake_world(config.parallel),
        mock.patch.object(capabilities, "detect", lambda: NO_ENGINE),
        # Triton's kernels need real memory; the torch version has the same interface.
        mock.patch.object(kernel, "resolve_backend", lambda *_: "chunked"),
        mock.patch.object(torch, "_assert_async", lambda *_: None),
    ):
        layout = init_parallel(config.parallel, config.trainer, seed=1)
        [model] = build_policy(config.model, config.parallel, trainer=config.trainer, seed=0)
        parameters = {str(parameter.device) for parameter in model.parameters()}
        wrapped = wrap_data_parallel(model, config.optimizer, bf16=True)
        optimizer = build_optimizer(wrapped, config.optimizer, bf16=True)
        zero_gradients(wrapped, optimizer)
        runner = PolicyRunner(wrapped, layout, token_budget=64, hidden_size=SHAPE["hidden_size"])
        batch: Any = SimpleNamespace(num_tokens=TOKENS, temperature=1.0)
        index_R = torch.arange(5, device=layout.device)
        micro = Microbatch(packed(layout.device), batch, index_R)

        def loss(output: TokenLogprobs, _micro: Microbatch) -> Tensor:
            assert output.entropy_R is not None
            return output.logprobs_R.sum() + output.entropy_R.sum()

        runner._run([micro, micro], batch, loss, forward_only=False, entropy=True)
        applied, _ = guarded_step(optimizer, rate=1e-6, loss_is_finite=True)
        moments = {
            str(value.device)
            for part in optimizer.chained_optimizers
            for state in part.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        }
        gradients = {(str(p.main_grad.device), p.main_grad.dtype) for p in model.parameters()}
        return Found(parameters, gradients, moments, applied)


def write_config(case: str, folder: Path) -> Path:
    from transformers import AutoConfig

    kind, _, changes = (CASES | EXPERT_CASES)[case]
    kind = "gemma3_text" if kind == "gemma3" else kind
    shape = {**SHAPE, **changes, "num_hidden_layers": 2}
    if "layer_types" in changes:
        shape["layer_types"] = changes["layer_types"][:2]
    AutoConfig.for_model(kind, **shape).save_pretrained(folder)
    return folder


def packed(device: torch.device) -> PackedInputs:
    """Return three packed sequences, the longest of 7 tokens, with 5 rows for the output head."""

    def integers(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return PackedInputs(
        integers(TOKENS), integers(TOKENS), integers(4, torch.int32), 7, integers(5)
    )


def every_family(folder: Path) -> dict[str, Found]:
    return {case: one_update(case, folder) for case in FAMILIES}


@pytest.mark.slow
@pytest.mark.one_core
def test_update_of_each_family_succeeds_on_a_fake_gpu(tmp_path: Path) -> None:
    [found] = run_ranks(every_family, 1, tmp_path, timeout_seconds=540)
    expected = Found(
        parameters={"cuda:0"},
        main_gradients={("cuda:0", torch.float32)},
        moments={"cuda:0"},
        applied=True,
    )
    assert found == dict.fromkeys(FAMILIES, expected)
