"""SGLang on a CPU: batched decode attention equals one per request; stand-ins are loud."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.engines.sglang.attention import decode_in_blocks
from megatron_async.engines.sglang.cpu import (
    StandIn,
    assign_req_to_token_pool,
)

POOL = 400


def _one_by_one(
    query_SHD: torch.Tensor,
    k_PKD: torch.Tensor,
    v_PKE: torch.Tensor,
    slots: list[torch.Tensor],
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Softmax attention of each request by itself, in float64."""
    results = []
    for query_HD, slots_C in zip(query_SHD.double(), slots, strict=True):
        seen_C = slots_C if window is None else slots_C[-(window + 1) :]
        groups = query_HD.shape[0] // k_PKD.shape[1]
        keys_CHD = k_PKD[seen_C].double().repeat_interleave(groups, dim=1)
        values_CHE = v_PKE[seen_C].double().repeat_interleave(groups, dim=1)
        scores_HC = torch.einsum("hd,chd->hc", query_HD, keys_CHD) * scaling
        results.append(torch.einsum("hc,che->he", scores_HC.softmax(-1), values_CHE))
    return torch.stack(results)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (4, 4)]),
    value_size=st.sampled_from([8, 12]),
    window=st.sampled_from([None, 0, 5, 100]),
    block_bytes=st.sampled_from([1, 4096, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_it_equals_attention_request_by_request(
    lengths: list[int],
    heads: tuple[int, int],
    value_size: int,
    window: int | None,
    block_bytes: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    H, K = heads
    S, D = len(lengths), 8
    k_PKD = torch.randn(POOL, K, D, generator=generator)
    v_PKE = torch.randn(POOL, K, value_size, generator=generator)
    # What no request owns must not matter: huge values where padding could read.
    slots = [torch.randint(1, POOL, (n,), generator=generator) for n in lengths]
    used = torch.cat(slots).unique()
    free = torch.ones(POOL, dtype=torch.bool).index_fill(0, used, False)
    k_PKD[free] = 1e4
    v_PKE[free] = 1e4
    query_SHD = torch.randn(S, H, D, generator=generator)
    rows = torch.randperm(S + 3, generator=generator)[:S]
    req_to_token_RC = torch.zeros(S + 3, 64, dtype=torch.int32)
    for row, slots_C in zip(rows.tolist(), slots, strict=True):
        req_to_token_RC[row, : len(slots_C)] = slots_C.int()
        req_to_token_RC[row, len(slots_C) :] = POOL - 1
    got = decode_in_blocks(
        query_SHD,
        torch.empty(S, H, value_size),
        k_PKD,
        v_PKE,
        req_to_token_RC,
        rows,
        torch.tensor(lengths),
        0.3,
        window,
        block_bytes,
    )
    expected = _one_by_one(query_SHD, k_PKD, v_PKE, slots, 0.3, window)
    assert (got.double() - expected).abs().max() < 1e-5


def test_a_cache_in_another_type_is_read_in_the_type_of_the_query() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(POOL, 2, 8, generator=generator)
    v = torch.randn(POOL, 2, 8, generator=generator)
    query = torch.randn(3, 4, 8, generator=generator)
    table = torch.randint(1, POOL, (3, 20), generator=generator).int()
    arguments = (table, torch.arange(3), torch.tensor([20, 7, 13]), 0.35)
    exact = decode_in_blocks(query, torch.empty(3, 4, 8), k, v, *arguments)
    rounded = decode_in_blocks(query, torch.empty(3, 4, 8), k.bfloat16(), v.bfloat16(), *arguments)
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.05


@pytest.mark.slow
@pytest.mark.one_core
def test_it_equals_the_backend_that_it_replaces() -> None:
    """In a process of its own: the stand-ins that SGLang needs must not reach other tests."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    result = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare_with_loop; compare_with_loop()"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def compare_with_loop() -> None:
    """SGLang's own loop on the same pool, with and without a sliding window."""
    from megatron_async.engines.sglang.cpu import install_stand_ins

    install_stand_ins()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    generator = torch.Generator().manual_seed(1)
    k = torch.randn(POOL, 2, 16, generator=generator)
    v = torch.randn(POOL, 2, 16, generator=generator)
    query = torch.randn(5, 4, 16, generator=generator)
    table = torch.randint(1, POOL, (7, 80), generator=generator).int()
    rows, lengths = torch.tensor([6, 0, 3, 1, 5]), torch.tensor([80, 1, 17, 33, 80])
    loop = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    for window in (None, 9):
        expected = loop._run_sdpa_forward_decode(
            query,
            torch.empty_like(query),
            k,
            v,
            table,
            rows,
            lengths,
            scaling=0.25,
            enable_gqa=True,
            causal=False,
            sliding_window_size=window,
        )
        got = decode_in_blocks(
            query, torch.empty_like(query), k, v, table, rows, lengths, 0.25, window
        )
        assert (got - expected).abs().max() < 1e-5


def test_classes_of_a_stand_in_can_be_subclassed_and_named_but_functions_raise() -> None:
    package = StandIn("some_gpu_package")

    class Mine(package.Transform):  # type: ignore[misc, name-defined]
        """As GPU packages are used at module level."""

    assert isinstance(Mine(1, mode=2), package.Transform)
    assert package.InterpolationMode.BICUBIC == "BICUBIC"
    with pytest.raises(AttributeError):
        _ = package.__wrapped__
    with pytest.raises(RuntimeError, match="some_gpu_package was called"):
        package(3, 4)


def test_slots_of_all_requests_go_to_their_rows() -> None:
    table = torch.zeros(4, 6, dtype=torch.int32)
    assign_req_to_token_pool(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 0]),
        torch.tensor([4, 2]),
        torch.tensor([11, 12, 13, 21, 22]),
        6,
    )
    assert table.tolist() == [[21, 22, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 13, 0, 0], [0] * 6]
