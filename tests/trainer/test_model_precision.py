"""bfloat16, the precision of GPU runs: every family runs forward and backward and stays close.

Runs on the GPU where there is one (with the layers that `capabilities.choose` picks there), on the
CPU elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_async.config.model import ModelConfig, ParallelConfig, Recompute, TrainerConfig
from tests.hf_models import CASES, EXPERT_CASES, random_stream, reference_logprobs, save_hf_model


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """One process as its own process group, and its device."""
    from megatron_async.trainer.parallel import parallel_session

    with parallel_session(ParallelConfig(), TrainerConfig(), seed=0) as layout:
        yield layout.device


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize(
    ("case", "recompute"),
    [(case, "none") for case in (*CASES, *EXPERT_CASES)]
    + [("qwen3", "all"), ("gemma3", "all"), ("qwen3_moe", "all")],
)
def test_bfloat16_is_near_float32(
    case: str, recompute: Recompute, device: torch.device, tmp_path: Path
) -> None:
    from megatron_async.models.load import load_hf_weights
    from megatron_async.trainer.packed import TokenLogprobs, pack_inputs
    from megatron_async.trainer.policy_model import build_policy

    model = save_hf_model(case, tmp_path, initializer_range=0.05)
    ids_T, cu_S1 = random_stream((9, 30, 1, 17))
    mask_T = torch.ones_like(ids_T)
    mask_T[cu_S1[:-1].long()] = 0
    (policy,) = build_policy(
        ModelConfig(path=str(tmp_path), dtype="bfloat16"),
        ParallelConfig(),
        trainer=TrainerConfig(recompute=recompute),
        seed=0,
    )
    load_hf_weights([policy], tmp_path)
    policy.train()
    packed = pack_inputs(*(stream.to(device) for stream in (ids_T, cu_S1, mask_T)))
    output = policy(packed, return_entropy=True)
    assert isinstance(output, TokenLogprobs)
    assert output.logprobs_R.dtype is torch.float32
    expected_R = reference_logprobs(model, ids_T, cu_S1, 1.0)[mask_T.bool()]
    # bfloat16 keeps eight bits: about 1 % of a log-prob of 5 nats.
    assert (output.logprobs_R.cpu() - expected_R).abs().mean() < 0.05
    output.logprobs_R.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.dtype is torch.bfloat16, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
