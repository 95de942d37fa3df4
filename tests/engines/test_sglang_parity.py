"""Tests, on a CPU, that functions of this project compute the same as SGLang's own: decode
attention, the output head and YaRN.

Log-probs of the same hidden states are equal in bfloat16 too. A model with YaRN is served at its
whole context, with the trainer's frequencies. Functions of the stand-ins that SGLang needs on a CPU
raise an error when they are called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.attention import decode_in_blocks
from megatron_async.engines.sglang.cpu import (
    StandIn,
    assign_req_to_token_pool,
)
from megatron_async.engines.sglang.process import server_command
from megatron_async.models.architecture import served_context

POOL_SIZE = 400


def _one_by_one(
    query_SHD: torch.Tensor,
    k_PKD: torch.Tensor,
    v_PKE: torch.Tensor,
    slots: list[torch.Tensor],
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Return the softmax attention of each request separately, in float64."""
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
def test_decode_in_blocks_equals_attention_of_each_request_separately(
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
    k_PKD = torch.randn(POOL_SIZE, K, D, generator=generator)
    v_PKE = torch.randn(POOL_SIZE, K, value_size, generator=generator)
    # Slots of no request must not matter, so they have huge values, which padding could read.
    slots = [torch.randint(1, POOL_SIZE, (n,), generator=generator) for n in lengths]
    used = torch.cat(slots).unique()
    free = torch.ones(POOL_SIZE, dtype=torch.bool).index_fill(0, used, False)
    k_PKD[free] = 1e4
    v_PKE[free] = 1e4
    query_SHD = torch.randn(S, H, D, generator=generator)
    rows = torch.randperm(S + 3, generator=generator)[:S]
    req_to_token_RC = torch.zeros(S + 3, 64, dtype=torch.int32)
    for row, slots_C in zip(rows.tolist(), slots, strict=True):
        req_to_token_RC[row, : len(slots_C)] = slots_C.int()
        req_to_token_RC[row, len(slots_C) :] = POOL_SIZE - 1
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


def test_decode_in_blocks_reads_the_cache_in_the_dtype_of_the_query() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(POOL_SIZE, 2, 8, generator=generator)
    v = torch.randn(POOL_SIZE, 2, 8, generator=generator)
    query = torch.randn(3, 4, 8, generator=generator)
    table = torch.randint(1, POOL_SIZE, (3, 20), generator=generator).int()
    arguments = (table, torch.arange(3), torch.tensor([20, 7, 13]), 0.35)
    exact = decode_in_blocks(query, torch.empty(3, 4, 8), k, v, *arguments)
    rounded = decode_in_blocks(query, torch.empty(3, 4, 8), k.bfloat16(), v.bfloat16(), *arguments)
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.05


def compare_attention(_folder: Path) -> None:
    """Compare `decode_in_blocks` with SGLang's own loop on the same pool, with and without a
    sliding window."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    generator = torch.Generator().manual_seed(1)
    k = torch.randn(POOL_SIZE, 2, 16, generator=generator)
    v = torch.randn(POOL_SIZE, 2, 16, generator=generator)
    query = torch.randn(5, 4, 16, generator=generator)
    table = torch.randint(1, POOL_SIZE, (7, 80), generator=generator).int()
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


def test_stand_in_classes_can_be_subclassed_but_its_functions_raise() -> None:
    package = StandIn("some_gpu_package")

    class Mine(package.Transform):  # type: ignore[misc, name-defined]
        """As GPU packages are used at module level."""

    assert isinstance(Mine(1, mode=2), package.Transform)
    assert package.InterpolationMode.BICUBIC == "BICUBIC"
    with pytest.raises(AttributeError):
        _ = package.__wrapped__
    with pytest.raises(RuntimeError, match="some_gpu_package was called"):
        package(3, 4)


def test_assign_req_to_token_pool_writes_each_requests_slots_to_its_row() -> None:
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


FLAG = "--enable-fp32-lm-head"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "auto"), ("cpu", "bfloat16")])
def test_server_command_requests_float32_logits_for_half_precision_engines(
    device: str, dtype: Any, tmp_path: Path
) -> None:
    command = server_command(EngineConfig(dtype=dtype), tmp_path, 1, device)
    assert "--dtype=bfloat16" in command
    assert FLAG in command


def test_server_command_has_no_logits_flag_for_float32_engines(tmp_path: Path) -> None:
    assert FLAG not in server_command(EngineConfig(), tmp_path, 1, "cpu")


def compare_heads(_folder: Path) -> None:
    """Compare SGLang's own `_compute_lm_head`, with and without the flag, with the project's
    kernel."""
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


DATA = Path(__file__).parents[1] / "data"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# As Qwen writes it: max_position_embeddings is the length before scaling.
LENGTH_BEFORE = {**json.loads((DATA / "qwen2.5-72b.config.json").read_text()), "rope_scaling": YARN}
# As other publishers write it: max_position_embeddings is the length after scaling.
LENGTH_AFTER = {**LENGTH_BEFORE, "max_position_embeddings": 131072}
LENGTH_IMPLIED = {**LENGTH_BEFORE, "rope_scaling": {"type": "yarn", "factor": 4.0}}
CONTEXT = 131072


def _override(model: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(model))
    command = server_command(EngineConfig(), folder, 1, "cpu")
    return command[command.index("--json-model-override-args") + 1]


def test_server_command_has_no_model_override_without_yarn(tmp_path: Path) -> None:
    plain = {key: value for key, value in LENGTH_BEFORE.items() if key != "rope_scaling"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "--json-model-override-args" not in server_command(EngineConfig(), tmp_path, 1, "cpu")


def compare_yarn(root: Path) -> None:
    """Compare the context length and the frequencies that SGLang reads with those of the
    trainer."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    from megatron_async.models.families import read_architecture
    from megatron_async.trainer.rotary import inverse_frequencies

    for folder in root.iterdir():
        override = (folder / "override").read_text()
        if folder.name == "before":
            assert ModelConfig(str(folder)).context_len == 32768, "no override is needed"
        config = ModelConfig(str(folder), model_override_args=override)
        assert config.context_len == CONTEXT
        theta, scaling = get_rope_config(config.hf_config)
        a = read_architecture(folder)
        original = scaling["original_max_position_embeddings"]
        assert (scaling["rope_type"], scaling["factor"], theta) == ("yarn", 4.0, a.rope.theta)
        if folder.name != "after":
            assert original == a.rope.original_max_positions == 32768
        served = YaRNScalingRotaryEmbedding(
            a.head_dim, a.head_dim, original, theta, True, scaling["factor"], torch.float32
        )
        assert torch.equal(served._compute_inv_freq(4.0), inverse_frequencies(a.rope, a.head_dim))
        assert abs(served.mscale**2 - a.rope.score_scale) < 1e-12
        assert len(served.cos_sin_cache) == CONTEXT


COMPARED: dict[str, Callable[[Path], None]] = {
    "attention": compare_attention,
    "head": compare_heads,
    "yarn": compare_yarn,
}


def compare_all(folder: str) -> None:
    """Print the traceback of each comparison that fails, as a JSON object by name."""
    from megatron_async.engines.sglang.cpu import install_stand_ins

    install_stand_ins()
    found = {}
    for name, compare in COMPARED.items():
        try:
            compare(Path(folder))
        except Exception:  # noqa: BLE001  # Every error is the result of this comparison.
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tracebacks of failed comparisons by name, from one process for all comparisons.

    On a quiet machine SGLang's imports take ten seconds. The stand-ins that SGLang needs must not
    affect other tests.
    """
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    root = tmp_path_factory.mktemp("yarn")
    for name, model in (
        ("before", LENGTH_BEFORE),
        ("after", LENGTH_AFTER),
        ("implied", LENGTH_IMPLIED),
    ):
        assert served_context(model) == CONTEXT
        (root / name).mkdir()
        (root / name / "override").write_text(_override(model, root / name))
    result = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare_all; compare_all({str(root)!r})"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # On a busy machine, importing SGLang takes minutes.
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("comparison", COMPARED)
def test_project_function_equals_sglangs_own_function(
    comparison: str, failures: dict[str, str]
) -> None:
    assert comparison not in failures, failures[comparison]
