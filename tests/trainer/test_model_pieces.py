"""Tests parts of the policy model against plain references, and the devices of a trainer."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from megatron_async.commands.quickstart import quick_dtype
from megatron_async.config import build_config
from megatron_async.config.model import ModelConfig, ParallelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture, Experts, Rope
from megatron_async.models.layout import check_layout
from megatron_async.trainer.attention_kernels import Stream, packed_attention
from megatron_async.trainer.capabilities import Capabilities, choose
from megatron_async.trainer.device import device_adapter
from megatron_async.trainer.rotary import Rotation, inverse_frequencies, rotary_angles, rotate
from tests.hf_models import build_hf_model

DENSE = Architecture(
    family="qwen3",
    num_layers=6,
    hidden_size=64,
    ffn_size=96,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=1000,
    max_positions=128,
    norm_eps=1e-6,
    rope=Rope(1e4),
    tied_head=False,
)
CPU_ONLY = Capabilities(None, None, None, None, None)
GPU = Capabilities("12.9", "a GPU", "2.9", None, "3")


class TestAttention:
    @pytest.mark.parametrize("window", [None, 1, 3])
    def test_packed_attention_equals_softmax_over_visible_keys(self, window: int | None) -> None:
        torch.manual_seed(0)
        lengths = [4, 1, 7]
        total, heads, groups, dim = sum(lengths), 4, 2, 8
        query, key, value = (
            torch.randn(total, count, dim, dtype=torch.float64, requires_grad=True)
            for count in (heads, groups, groups)
        )
        cu_S1 = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
        out = packed_attention(Stream(query, key, value, cu_S1, 7, 0.3, window))

        sequence_T = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
        visible = (sequence_T[:, None] == sequence_T[None, :]) & (distance >= 0)
        if window is not None:
            visible &= distance < window
        per_query = heads // groups
        scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(per_query, dim=1)).mul(
            0.3
        )
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        expected = torch.einsum("hts,shd->thd", weights, value.repeat_interleave(per_query, dim=1))

        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.manual_seed(1)
        cotangent = torch.randn_like(out)
        found = torch.autograd.grad(out, (query, key, value), cotangent)
        reference = torch.autograd.grad(expected, (query, key, value), cotangent)
        for left, right in zip(found, reference, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


class TestRope:
    @pytest.mark.parametrize("case", ["qwen3", "llama3"])
    def test_rotary_angles_equal_transformers_at_long_positions(self, case: str) -> None:
        model = build_hf_model(case)
        rotary = model.model.rotary_emb
        positions = torch.tensor([0, 1, 63, 1000, 30000])
        cos, sin = rotary(torch.zeros(1), positions[None])
        rope = Rope(1e4) if case == "qwen3" else Rope(1e4, "llama3", 8.0, 1.0, 4.0, 64)
        angles = rotary_angles(inverse_frequencies(rope, model.config.head_dim), positions)
        angles = angles[:, 0, 0]
        assert torch.equal(angles.cos(), cos[0])
        assert torch.equal(angles.sin(), sin[0])

    @pytest.mark.parametrize("changes", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}])
    def test_yarn_of_qwen2_5_equals_transformers_beyond_its_original_context(
        self, changes: dict[str, float]
    ) -> None:
        """Frequencies must be equal bit for bit. The factor that scales both cosine and sine is
        squared in the scores."""
        scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, **changes}
        config = Qwen2Config(
            hidden_size=8192,
            num_attention_heads=64,
            max_position_embeddings=32768,
            rope_parameters={**scaling, "original_max_position_embeddings": 32768},
        )
        rotary = Qwen2RotaryEmbedding(config)
        rope = Rope(1e6, "yarn", 4.0, original_max_positions=32768, **changes)
        frequencies = inverse_frequencies(rope, 128)
        assert torch.equal(frequencies, rotary.inv_freq)
        assert rope.score_scale == pytest.approx(rotary.attention_scaling**2, rel=1e-12)
        positions = torch.tensor([0, 1, 32767, 32768, 131071])
        cos, _ = rotary(torch.zeros(1), positions[None])
        ours = rotary_angles(frequencies, positions)[:, 0, 0].cos() * rope.score_scale**0.5
        torch.testing.assert_close(ours, cos[0], rtol=0, atol=1e-7)
        ratio = (inverse_frequencies(Rope(1e6), 128) / frequencies).tolist()
        assert ratio[0] == 1 and ratio[-1] == pytest.approx(4)
        assert any(1.1 < value < 3.9 for value in ratio)

    def test_rotate_computes_bfloat16_in_float32_and_rounds_once(self) -> None:
        """Megatron's own function rounds sines and cosines first, and exceeds the limit of this
        test."""
        generator = torch.Generator().manual_seed(0)
        positions = torch.tensor([0, 1, 63, 1000, 30000])
        frequencies = inverse_frequencies(Rope(1e6), 64)
        exact = torch.randn(5, 3, 64, generator=generator).bfloat16()
        angles = rotary_angles(frequencies, positions).squeeze(1)
        cos, sin = angles.cos().double(), angles.sin().double()
        half = torch.cat((-exact[..., 32:], exact[..., :32]), -1)
        expected = exact.double() * cos + half.double() * sin
        ours = rotate(exact, Rotation.of(frequencies, positions))
        megatrons = _apply_rotary_pos_emb_bshd(exact[:, None], angles[:, None])[:, 0]
        # One rounding to bfloat16 changes a number by at most 2^-8 of its value.
        limit = expected.abs() * 2.0**-8 + 1e-6
        assert ours.dtype is torch.bfloat16
        assert bool(((ours.double() - expected).abs() <= limit).all())
        assert bool(((megatrons.double() - expected).abs() > limit).any())


class TestLayout:
    @pytest.mark.parametrize(
        ("parallel", "message"),
        [
            ({"ranks": 3, "tensor": 3}, "parallel.tensor is 3.*num_attention_heads 8"),
            ({"ranks": 8, "tensor": 8}, "parallel.tensor is 8.*num_key_value_heads 4"),
            ({"ranks": 4, "pipeline": 4}, "parallel.pipeline is 4.*num_hidden_layers 6"),
            ({"ranks": 2, "context": 2}, "parallel.context is 2; only 1"),
            ({"ranks": 2, "expert": 2}, "parallel.expert is 2, but qwen3 has no experts"),
        ],
    )
    def test_check_layout_error_names_the_setting_and_its_value(
        self, parallel: dict[str, int], message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            check_layout(DENSE, ParallelConfig(**parallel))

    @pytest.mark.parametrize(
        ("parallel", "message"),
        [
            ({"ranks": 4, "expert": 4}, "parallel.expert is 4.*6 experts"),
            ({"ranks": 2, "expert": 3}, "parallel.expert is 3.*2 ranks of a pipeline stage"),
            ({"ranks": 2, "tensor": 2}, "parallel.sequence is false"),
        ],
    )
    def test_check_layout_refuses_impossible_expert_layouts(
        self, parallel: dict[str, int], message: str
    ) -> None:
        from dataclasses import replace

        sparse = replace(DENSE, experts=Experts(6, 2, 16, True))
        with pytest.raises(UserError, match=message):
            check_layout(sparse, ParallelConfig(**parallel))


class TestCapabilities:
    def test_choose_selects_transformer_engine_when_it_is_usable(self) -> None:
        assert choose(ModelConfig(), GPU).layers == "transformer_engine"
        assert choose(ModelConfig(attention_backend="sdpa"), GPU).layers == "local"

    def test_choose_refuses_transformer_engine_when_cuda_is_missing(self) -> None:
        with pytest.raises(UserError, match="attention_backend is transformer_engine, but no CUDA"):
            choose(ModelConfig(attention_backend="transformer_engine"), CPU_ONLY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter does nothing with CUDA")
class TestDeviceAdapter:
    def test_device_adapter_restores_torch_even_after_an_error(self) -> None:
        from megatron.core.tensor_parallel import random as megatron_random

        before = (torch.cuda.synchronize, torch.cuda.Stream, megatron_random._get_cuda_rng_state)
        with pytest.raises(ZeroDivisionError), device_adapter(), device_adapter():
            _ = 1 / 0
        after = (torch.cuda.synchronize, torch.cuda.Stream, megatron_random._get_cuda_rng_state)
        assert after == before
        assert torch.zeros(1).type() == "torch.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")

    def test_device_adapter_can_be_entered_by_another_thread(self) -> None:
        def device_type() -> str:
            with device_adapter():
                return torch.zeros(1, device="cuda").device.type

        with device_adapter(), ThreadPoolExecutor(1) as pool:
            assert pool.submit(device_type).result(timeout=30) == "cpu"
            assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_process_group_is_refused_when_processes_exceed_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_async.config.model import TrainerConfig
    from megatron_async.trainer.parallel import start_process_group

    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"parallel\.ranks is 2, but 3 trainer process"):
        start_process_group(ParallelConfig(ranks=2), TrainerConfig())


@pytest.fixture
def other_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in of PyPI's `apex`, a web toolkit that can be imported but has no
    optimizers."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("apex", "apex.optimizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


@pytest.mark.usefixtures("other_apex")
def test_detect_ignores_an_unrelated_apex_package() -> None:
    from megatron_async.trainer.capabilities import detect

    found = replace(detect.__wrapped__(), cuda="13.0")
    assert found.apex is not None and not found.usable_apex


def test_version_of_reports_broken_package_when_its_parts_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine checks the versions of its own parts with assertions."""
    from megatron_async.trainer.capabilities import _version_of

    (tmp_path / "two_parts.py").write_text("assert False, 'package version mismatch'\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = _version_of("two_parts", "two-parts")
    assert found == "broken: AssertionError: package version mismatch"


_IMPORTED = """
import sys, torch
compile = torch.compile
from megatron_async.trainer.device import import_megatron
import_megatron()
import megatron_async.trainer.step
assert "megatron.core" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was imported"
assert torch.compile is compile
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron compiles if there is a GPU")
def test_rank_on_a_cpu_does_not_import_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("found", "setting", "chosen"),
    [
        ({"avx512_bf16": True}, "auto", "bfloat16"),
        ({"amx_bf16": True}, "auto", "bfloat16"),
        ({"avx512_bf16": False}, "auto", "auto"),
        ({}, "auto", "auto"),
        ({"avx512_bf16": True}, "float32", "float32"),
    ],
)
def test_quick_dtype_is_bfloat16_when_the_processor_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], setting: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quick_dtype(build_config({"model": {"dtype": setting}})) == chosen
