"""Tests that every launcher's arguments bind and compile for sm_90, without a GPU.

Triton's own launch path runs up to the launch itself: it binds the arguments, specializes on their
values (alignment, integers equal to 1), and compiles. Only the device is a stand-in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megatron_async_kernels import is_loss, token_logprob, triton_head
from megatron_async_kernels.triton_tiles import head_configs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.loss_cases import CONFIGS, DENOMINATORS, make_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu launches for real"),
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the kernels that were bound and compiled instead of launched."""
    names: list[str] = []
    target = GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(
        triton_head, "_configs", lambda problem: head_configs((9, 0), problem.hidden_TD.dtype)
    )
    monkeypatch.setattr(triton_head, "_check", lambda problem: None)
    monkeypatch.setattr(driver, "_active", device)
    return names


@pytest.mark.parametrize("shape", [(300, 600, 64), (1, 1, 64), (300, 600, 37)])
@pytest.mark.parametrize("entropy", [False, True])
def test_head_launch_binds_and_compiles_every_kernel(
    compiled: list[str], shape: tuple[int, int, int], entropy: bool
) -> None:
    """The shapes have aligned rows (descriptors), sizes of 1, and rows that need pointers."""
    tokens, vocab, hidden = shape
    hidden_TD = torch.zeros(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.zeros(vocab, hidden, dtype=torch.bfloat16, requires_grad=True)
    outputs = token_logprob(
        hidden_TD,
        weight_VD,
        torch.zeros(tokens, dtype=torch.int64),
        return_entropy=entropy,
        weight_grad_out=torch.zeros(vocab, hidden),
        deterministic=True,
        backend="triton",
    )
    (outputs[0].sum() + outputs[1].sum() if entropy else outputs.sum()).backward()  # type: ignore[union-attr]
    products = ["accumulate_product_kernel"] * 2
    merge = ["combine_kernel"] if shape != (1, 1, 64) else []
    assert compiled == ["head_stats_kernel", *merge, "dlogits_kernel", *products]


@pytest.mark.parametrize("lengths", [[1], [3, 0, 5000]])
def test_loss_launch_binds_and_compiles_every_kernel(
    compiled: list[str], lengths: list[int]
) -> None:
    inputs = make_inputs(lengths, dtype=torch.float32)
    is_loss(inputs, CONFIGS["ppo"], DENOMINATORS, backend="triton", check=False)
    is_loss(inputs, CONFIGS["gspo"], DENOMINATORS, backend="triton", check=False)
    one_pass = ["token_pass_kernel", "sequence_kernel"]
    two_passes = ["sequence_pass_kernel", "sequence_kernel", "token_pass_kernel"]
    assert compiled == one_pass + two_passes
