"""Tests of matrix products by oneDNN: equal to float64, and computed by torch wherever oneDNN is
not faster."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from megatron_async_kernels import cpu_matmul
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not cpu_matmul.has_onednn(), reason="this build of torch has no oneDNN"
)

LARGE = (96, 128, 160)
SMALL = (3, 5, 7)


def factors(M: int, K: int, N: int, transposed: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Return random matrices [M, K] and [K, N]; a transposed one is stored by columns."""
    torch.manual_seed(0)
    left = torch.randn(K, M).t() if transposed[0] else torch.randn(M, K)
    right = torch.randn(N, K).t() if transposed[1] else torch.randn(K, N)
    return left, right


@pytest.mark.parametrize("transposed", [(a, b) for a in (False, True) for b in (False, True)])
@pytest.mark.parametrize("sizes", [LARGE, SMALL, (1, 1024, 2048), (4097, 16, 31)])
def test_mm_matches_the_float64_product(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    left, right = factors(*sizes, transposed)
    wanted = (left.double() @ right.double()).float()
    torch.testing.assert_close(cpu_matmul.mm(left, right), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("shape", ["row", "matrix"])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2.0), (0, 3.0)])
def test_addmm_matches_the_float64_result(
    sizes: tuple[int, int, int], shape: str, beta: float, alpha: float
) -> None:
    left, right = factors(*sizes, (False, True))
    added = torch.randn(sizes[2]) if shape == "row" else torch.randn(sizes[0], sizes[2])
    before = added.clone()
    wanted = torch.addmm(
        added.double(), left.double(), right.double(), beta=beta, alpha=alpha
    ).float()
    found = cpu_matmul.addmm(added, left, right, beta=beta, alpha=alpha)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(added, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mm_uses_torch_for_other_dtypes(dtype: torch.dtype) -> None:
    left, right = (factor.to(dtype) for factor in factors(*LARGE, (False, True)))
    assert torch.equal(cpu_matmul.mm(left, right), left @ right)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["unfold", "expand"])
def test_mm_uses_torch_when_elements_overlap_in_memory(side: str, kind: str) -> None:
    plain = torch.randn(160, 160)
    row = torch.randn(400)
    shared = row.unfold(0, 160, 1)[:160] if kind == "unfold" else row[:160].expand(160, -1)
    pair = (shared, plain) if side == "left" else (plain, shared)
    assert torch.equal(cpu_matmul.mm(*pair), torch.mm(*pair))


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"added": shape}
            for shape in ((7,), (96, 7), (95, 160), (1, 96, 160), (1, 1, 160), (0,))
        ),
        *({name: value} for name in ("beta", "alpha") for value in (1j, 2 + 1j, 1e300)),
    ],
    ids=str,
)
def test_addmm_raises_torchs_error_when_arguments_are_invalid(change: dict[str, Any]) -> None:
    left, right = factors(*LARGE, (False, False))
    added, scales = torch.randn(change.pop("added", 160)), change
    with pytest.raises(RuntimeError) as torchs:
        torch.addmm(added, left, right, **scales)
    with pytest.raises(RuntimeError) as ours:
        cpu_matmul.addmm(added, left, right, **scales)
    assert str(ours.value) == str(torchs.value)


def test_mkldnn_flag_turns_onednn_products_off(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, added = *factors(*LARGE, (False, False)), torch.randn(160)
    calls = []
    product = cpu_matmul._onednn
    monkeypatch.setattr(cpu_matmul, "_onednn", lambda *pair: calls.append(1) or product(*pair))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(cpu_matmul.mm(left, right), torch.mm(left, right))
        assert torch.equal(cpu_matmul.addmm(added, left, right), torch.addmm(added, left, right))
        assert calls == []
    cpu_matmul.mm(left, right)
    assert calls == [1]


def test_mkl_is_slow_only_on_amd_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, slow in (("AMD EPYC", torch.backends.mkl.is_available()), ("Intel(R) Xeon", False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {"cpu_name": name})
        assert cpu_matmul.mkl_is_slow() is slow


def test_use_onednn_covers_forward_and_backward_without_a_warning() -> None:
    script = """
import torch
from megatron_async_kernels import cpu_matmul
cpu_matmul.mkl_is_slow = lambda: True
assert cpu_matmul.use_onednn() is cpu_matmul.use_onednn() is not None
calls = []
product = cpu_matmul._onednn
cpu_matmul._onednn = lambda *factors: calls.append(1) or product(*factors)
layer = torch.nn.Linear(128, 160)
exact = torch.nn.Linear(128, 160, dtype=torch.float64)
exact.load_state_dict(layer.state_dict())
x = torch.randn(4, 24, 128)
layer(x).square().sum().backward()
exact(x.double()).square().sum().backward()
torch.testing.assert_close(layer.weight.grad, exact.weight.grad.float(), rtol=1e-4, atol=1e-3)
torch.testing.assert_close(layer.bias.grad, exact.bias.grad.float(), rtol=1e-4, atol=1e-3)
assert len(calls) == 2, calls  # the layer's own and its weight's gradient; x has none
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_use_onednn_bounds_memory_when_every_product_has_a_new_shape() -> None:
    """With the default limits, 400 shapes add 259 MB."""
    script = """
import psutil, torch
from megatron_async_kernels import cpu_matmul
cpu_matmul.mkl_is_slow = lambda: True
cpu_matmul.use_onednn()
torch.set_num_threads(1)
weight = torch.randn(128, 512)
sizes = []
for tokens in range(16, 616):
    torch.randn(tokens, 128) @ weight
    sizes.append(psutil.Process().memory_info().rss >> 20)
print(sizes[-1] - sizes[200])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 100


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
def test_addmm_does_not_read_the_added_matrix_when_beta_is_0(sizes: tuple[int, int, int]) -> None:
    left, right = factors(*sizes, (False, False))
    added = torch.full((sizes[2],), torch.nan)
    found = cpu_matmul.addmm(added, left, right, beta=0)
    torch.testing.assert_close(found, left @ right)
