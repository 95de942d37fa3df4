"""Layers of Transformer Engine hold what the published checkpoints hold, under names that we know.

Its modules are stand-ins with the signatures and parameter names of release 2.11; Megatron's specs
and wrappers build the layers (tests/trainer/fake_transformer_engine.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.test_fake_gpu import write_config

ROOT = Path(__file__).parents[2]
FAMILIES = ["llama3", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral"]  # Gemma has layers of ours
# Tensors in the published checkpoint -> the parameter and its shape.
Parameters = dict[str, tuple[str, list[int]]]
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
}
DENSE = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
QK_NORMS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
# Two of four experts are on a rank of two.
EXPERTS = {"pre_mlp_layernorm.weight", "mlp.router.weight"} | {
    f"mlp.experts.linear_{part}.weight{expert}" for part in ("fc1", "fc2") for expert in (0, 1)
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Parameters, Parameters]]:
    """For each family, the parameters of local layers and of Transformer Engine's."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_config(family, folder / family)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.fake_transformer_engine", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, tuple[Parameters, Parameters]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_layers_hold_the_same_tensors_in_the_same_shapes(
    family: str, built: dict[str, tuple[Parameters, Parameters]]
) -> None:
    local, engine = (
        {tensors: shape for tensors, (_, shape) in parameters.items()}
        for parameters in built[family]
    )
    assert engine == local
    assert len(local) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama3", ATTENTION | DENSE),
        ("qwen2_tied", ATTENTION | DENSE | {"self_attention.linear_qkv.bias"}),
        ("qwen3", ATTENTION | DENSE | QK_NORMS),
        ("qwen3_moe", ATTENTION | EXPERTS | QK_NORMS),
        ("mixtral", ATTENTION | EXPERTS),
    ],
)
def test_norms_are_in_the_linear_layers_and_experts_are_grouped(
    family: str, expected: set[str], built: dict[str, tuple[Parameters, Parameters]]
) -> None:
    _, engine = built[family]
    layer = "decoder.layers.0."
    names = {name for name, _ in engine.values() if name.startswith(layer)}
    assert names == {layer + name for name in expected}
