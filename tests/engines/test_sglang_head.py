"""Engines and trainer make the same log-probs of the same hidden states, in bfloat16 too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import server_command

FLAG = "--enable-fp32-lm-head"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "auto"), ("cpu", "bfloat16")])
def test_the_logits_of_half_precision_engines_stay_in_float32(
    device: str, dtype: Any, tmp_path: Path
) -> None:
    command = server_command(EngineConfig(dtype=dtype), tmp_path, 1, device)
    assert "--dtype=bfloat16" in command
    assert FLAG in command


def test_an_engine_in_float32_needs_nothing_for_that(tmp_path: Path) -> None:
    assert FLAG not in server_command(EngineConfig(), tmp_path, 1, "cpu")


@pytest.mark.slow
@pytest.mark.one_core
def test_the_trainers_head_computes_as_sglangs() -> None:
    """In a process of its own: the stand-ins that SGLang needs must not reach other tests."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    result = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare_heads; compare_heads()"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # importing SGLang takes a quiet machine ten seconds, a busy one minutes
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)


def compare_heads() -> None:
    """SGLang's own `_compute_lm_head`, as the flag that it parses sets it, against our kernel."""
    from megatron_async.engines.sglang.cpu import install_stand_ins

    install_stand_ins()
    from megatron_async_kernels import token_logprob
    from sglang.srt.arg_groups.fields.exec_ import ExecFeatures
    from sglang.srt.layers.logits_processor import LogitsProcessor

    assert FLAG.removeprefix("--").replace("-", "_") in ExecFeatures.__struct_fields__
    generator = torch.Generator().manual_seed(0)
    tokens, width, vocabulary = 64, 256, 4096
    hidden_TD = torch.randn(tokens, width, generator=generator).bfloat16()
    weight_VD = (torch.randn(vocabulary, width, generator=generator) / 6).bfloat16()
    targets_T = torch.randint(vocabulary, (tokens,), generator=generator)
    trainer_T = token_logprob(hidden_TD, weight_VD, targets_T)
    assert isinstance(trainer_T, torch.Tensor)

    def engine(use_fp32: bool) -> torch.Tensor:
        processor: Any = SimpleNamespace(
            use_fp32_lm_head=use_fp32, use_fp32_lm_head_output=False, rl_on_policy_target=None
        )
        head: Any = SimpleNamespace(weight=weight_VD, use_intel_amx_backend=False)
        logits_TV = LogitsProcessor._compute_lm_head(processor, hidden_TD, head)
        return logits_TV.float().log_softmax(-1).gather(1, targets_T[:, None])[:, 0]

    exact, rounded = ((engine(flag) - trainer_T).abs() for flag in (True, False))
    print(f"mean difference: {exact.mean():.1e} with the flag, {rounded.mean():.1e} without")
    assert exact.max() < 1e-5
    assert rounded.mean() > 1e-3
