"""Tests the quantization of weights to fp8 against a float64 reference with a table of all fp8
numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import server_command
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.families import read_architecture, stage_rules
from megatron_async.weight_sync.quantize import (
    BLOCK,
    check_fp8,
    quantization_config,
    quantize,
    quantized_names,
    quantized_tensors,
)
from megatron_async.weight_sync.verify import NameCheck, engine_parameter

Float64 = NDArray[np.float64]


def dequantize(quantized_RC: torch.Tensor, scale_rc: torch.Tensor) -> torch.Tensor:
    """Return the float32 [R, C] weights with which the engine computes."""
    rows, columns = quantized_RC.shape
    scale_RC = scale_rc.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return quantized_RC.to(torch.float32) * scale_RC


def fp8_numbers() -> Float64:
    """Return all finite values of e4m3fn in ascending order, computed from the format: a sign bit,
    4 exponent bits (bias 7) and 3 mantissa bits."""
    values = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 15 and mantissa == 7:
                continue  # This bit pattern is not a number.
            if exponent == 0:
                values.append(mantissa / 8 * 2.0**-6)
            else:
                values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(sorted({*values, *(-value for value in values)}))


NUMBERS = fp8_numbers()


def reference(weight_RC: Float64) -> tuple[Float64, Float64, Float64]:
    """Quantize weights in float64.

    Returns:
        The fp8 number nearest to each weight / scale, the scale of each block, and the distance of
        each weight from a tie between two fp8 numbers (0: a tie; 1: the weight is an fp8 number).
    """
    rows, columns = weight_RC.shape
    quantized_RC, margin_RC = np.zeros_like(weight_RC), np.ones_like(weight_RC)
    scale_rc = np.ones((-(-rows // BLOCK), -(-columns // BLOCK)))
    for r, c in np.ndindex(*scale_rc.shape):
        slices = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
        block = weight_RC[slices]
        if np.abs(block).max() > 0:
            scale_rc[r, c] = np.abs(block).max() / NUMBERS[-1]
        scaled = block / scale_rc[r, c]
        above = np.clip(np.searchsorted(NUMBERS, scaled), 1, len(NUMBERS) - 1)
        low, high = NUMBERS[above - 1], NUMBERS[above]
        quantized_RC[slices] = np.where(scaled - low <= high - scaled, low, high)
        margin_RC[slices] = np.abs((scaled - low) - (high - scaled)) / (high - low)
    return quantized_RC, scale_rc, margin_RC


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 2**16),
    st.sampled_from([1e-8, 0.02, 1e4]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_quantize_rounds_every_weight_to_the_nearest_fp8_number(
    rows: int, columns: int, seed: int, size: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * size).to(dtype)
    quantized, scale = quantize(weight)
    assert quantized.dtype is torch.float8_e4m3fn and quantized.shape == weight.shape
    expected, expected_scale, margin = reference(weight.double().numpy())
    np.testing.assert_allclose(scale.double().numpy(), expected_scale, rtol=2e-7)
    # Closer to a tie, the rounding of the float32 division may decide which number is the nearest.
    clear = margin > 1e-4
    got = quantized.double().numpy()
    assert (got[clear] == expected[clear]).all()
    # bfloat16 has so few numbers that several percent of the weights are ties.
    least_clear = 0.95 if dtype is torch.float32 else 0.8
    assert weight.numel() < 1000 or clear.mean() > least_clear
    error = np.abs(dequantize(quantized, scale).double().numpy() - weight.double().numpy())
    per_weight = np.repeat(np.repeat(expected_scale, BLOCK, 0), BLOCK, 1)[:rows, :columns]
    bound = np.maximum(np.abs(weight.double().numpy()) / 16, per_weight / 1024)
    assert (error <= bound * (1 + 1e-5)).all()


def test_quantize_maps_largest_weight_of_a_block_to_largest_fp8_number() -> None:
    weight = torch.zeros(256, 256)
    weight[3, 200], weight[130, 5] = -0.7, 0.1
    quantized, scale = quantize(weight)
    assert quantized[3, 200].item() == -448 and quantized[130, 5].item() == 448
    assert scale[0, 0] == 1 and scale[1, 1] == 1, "the scale of a block of zeros is 1"
    assert dequantize(quantized, scale)[3, 200].item() == pytest.approx(-0.7, rel=1e-6)


def test_quantized_tensors_names_the_tensor_when_a_weight_is_not_finite() -> None:
    weight = torch.ones(2, 2)
    weight[0, 1] = float("inf")
    with pytest.raises(ComponentFailure, match=r"x\.weight has weights that are not finite"):
        list(quantized_tensors(iter([("x.weight", weight)]), frozenset({"x.weight"})))


def _write_model(folder: Path, **changes: Any) -> Path:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_quantized_names_contains_only_linear_layers(tmp_path: Path) -> None:
    architecture = read_architecture(_write_model(tmp_path))
    names = quantized_names(architecture)
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert not any(
        part in name for name in names for part in ("embed", "norm", "lm_head", "mlp.gate.", "bias")
    )
    settings = quantization_config(architecture)
    assert settings["weight_block_size"] == [128, 128]
    assert settings["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]
    stream = [("model.norm.weight", torch.ones(4)), (min(names), torch.ones(4, 4))]
    found = list(quantized_tensors(iter(stream), names))
    assert [name for name, _ in found] == [
        "model.norm.weight",
        min(names),
        min(names) + "_scale_inv",
    ]


def test_check_fp8_refuses_cpu_engines_and_layouts_that_split_a_block(tmp_path: Path) -> None:
    architecture = read_architecture(_write_model(tmp_path))
    with pytest.raises(UserError, match=r"engines\.quantization is fp8 and engines\.device is cpu"):
        check_fp8(architecture, EngineConfig(quantization="fp8"), "cpu")
    check_fp8(architecture, EngineConfig(quantization="fp8"), "cuda")
    with pytest.raises(UserError, match=r"has 128 rows; engines\.tensor 2 does not divide"):
        check_fp8(architecture, EngineConfig(quantization="fp8", tensor=2), "cuda")


def test_server_command_of_fp8_engine_has_dummy_weights_and_fp8_config(tmp_path: Path) -> None:
    model = _write_model(tmp_path)
    engines = EngineConfig(quantization="fp8", device="cuda")
    command = server_command(engines, model, 1, "cuda")
    assert command[command.index("--load-format") + 1] == "dummy"
    override = json.loads(command[command.index("--json-model-override-args") + 1])
    assert override == {"quantization_config": quantization_config(read_architecture(model))}
    plain = server_command(EngineConfig(), model, 1, "cuda")
    assert "--load-format" not in plain


@pytest.mark.slow
@pytest.mark.one_core
def test_name_check_accepts_scales_that_sglangs_checksums_do_not_list(tmp_path: Path) -> None:
    """SGLang's function that lists checksums runs in a child process, so that its stand-ins do not
    affect other tests."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    architecture = read_architecture(_write_model(tmp_path))
    experts = range(architecture.experts.num if architecture.experts else 1)
    names = [
        name
        for rule, layer in stage_rules(architecture)
        for expert in (experts if rule.expert else [0])
        for name in rule.tensor_names(layer, expert)
    ]
    quantized = quantized_names(architecture)
    child = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import print_names; print_names()"],
        input=json.dumps([[name, name in quantized] for name in names]),
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    known = frozenset(json.loads(child.stdout.splitlines()[-1]))
    assert "model.layers.0.mlp.experts.w13_weight" in known
    assert not any(name.endswith("scale_inv") for name in known)
    stream = ((name, torch.ones(BLOCK, BLOCK)) for name in names)
    sent = [name for name, _ in quantized_tensors(stream, quantized)]
    check = NameCheck(known)
    check.add(sent)
    check.finish()
    with pytest.raises(ComponentFailure, match=r"have no parameter for 'other\.weight_scale_inv'"):
        check.add(["other.weight_scale_inv"])


def print_names() -> None:
    """Read [Hugging Face name, is fp8] pairs; print the names for which SGLang has checksums."""
    from megatron_async.engines.sglang.cpu import install_stand_ins

    install_stand_ins()
    from sglang.srt.utils import weight_checker

    model = _sglang_model(json.load(sys.stdin))
    entries = weight_checker._build_check_entries(
        dict(model.named_parameters()), set(), weight_checker._build_quantized_set(model)
    )
    print(json.dumps([entry.name for entry in entries]))


def _sglang_model(names: Iterable[tuple[str, bool]]) -> torch.nn.Module:
    """Return modules whose fp8 parameters were created by SGLang's own quantization methods."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod

    fp8_config = Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
    )
    common = {"params_dtype": torch.bfloat16, "weight_loader": None}

    def linear() -> torch.nn.Module:
        module: Any = torch.nn.Module()
        module.quant_method = Fp8LinearMethod(fp8_config)
        module.quant_method.create_weights(
            module, BLOCK, [BLOCK], BLOCK, BLOCK, skip_block_quant_check=True, **common
        )
        return module

    def experts() -> torch.nn.Module:
        module: Any = torch.nn.Module()
        module.moe_tp_size, module.moe_runner_config = 1, SimpleNamespace(is_gated=True)
        module.quant_method = Fp8MoEMethod(fp8_config)
        module.quant_method.create_weights(module, 4, BLOCK, BLOCK, with_bias=False, **common)
        return module

    model = torch.nn.Module()
    for name, is_fp8 in names:
        path, _, parameter = engine_parameter(name).rpartition(".")
        parent = model
        *parents, leaf = path.split(".")
        for part in parents:
            parent = parent.get_submodule(part) if hasattr(parent, part) else _add(parent, part)
        if not hasattr(parent, leaf):
            made = torch.nn.Module()
            if is_fp8:
                made = experts() if leaf == "experts" else linear()
            parent.add_module(leaf, made)
        if not is_fp8:
            module = parent.get_submodule(leaf)
            module.register_parameter(parameter, torch.nn.Parameter(torch.ones(1)))
    return model


def _add(parent: torch.nn.Module, name: str) -> torch.nn.Module:
    parent.add_module(name, torch.nn.Module())
    return parent.get_submodule(name)
