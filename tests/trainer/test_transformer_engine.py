"""Layers of Transformer Engine hold what the published checkpoints hold, and compute the model.

Its modules are stand-ins with the signatures and parameter names of release 2.11; Megatron's specs
and wrappers build the layers (tests/trainer/fake_transformer_engine.py). What is checked is how we
use them: packed borders, the rotary table, the dummy sequence of sequence parallelism, the scale of
scores, the marks by which gradients are summed. Its kernels are not here.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hf_models import random_stream, reference_logprobs, save_hf_model
from tests.trainer import test_model_parity as parity
from tests.trainer.fake_transformer_engine import CASES, EXPERTS, RECOMPUTE, RECOMPUTED, points
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
EXPERT_LAYER = {"pre_mlp_layernorm.weight", "mlp.router.weight"} | {
    f"mlp.experts.linear_{part}.weight{expert}" for part in ("fc1", "fc2") for expert in (0, 1)
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Parameters]]:
    """Return each family's parameters with local layers, Transformer Engine's, and with its
    attention and experts of torch.
    """
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_config(family, folder / family)
    shown = run_with_stand_ins("names", folder)
    found: dict[str, list[Parameters]] = json.loads(shown.splitlines()[-1])
    return found


def run_with_stand_ins(what: str, folder: Path) -> str:
    module = "tests.trainer.fake_transformer_engine"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, what, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_of_layers_hold_the_same_tensors_in_the_same_shapes(
    family: str, built: dict[str, list[Parameters]]
) -> None:
    local, engine, grouped = (
        {tensors: shape for tensors, (_, shape) in parameters.items()}
        for parameters in built[family]
    )
    assert engine == local == grouped
    assert len(local) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama3", ATTENTION | DENSE),
        ("qwen2_tied", ATTENTION | DENSE | {"self_attention.linear_qkv.bias"}),
        ("qwen3", ATTENTION | DENSE | QK_NORMS),
        ("qwen3_moe", ATTENTION | EXPERT_LAYER | QK_NORMS),
        ("mixtral", ATTENTION | EXPERT_LAYER),
    ],
)
def test_norms_are_in_the_linear_layers_and_experts_are_grouped(
    family: str, expected: set[str], built: dict[str, list[Parameters]]
) -> None:
    layer = "decoder.layers.0."
    for engine in built[family][1:]:
        names = {name for name, _ in engine.values() if name.startswith(layer)}
        assert names == {layer + name for name in expected}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Log-probs of transformers, and by rank: log-probs, differences of gradients."""
    folder = tmp_path_factory.mktemp("computed")
    ids_T, cu_S1 = random_stream(parity.LENGTHS)
    mask_T = parity.mask_of_responses()
    expected = {}
    for name in CASES:
        model = save_hf_model(name, folder / name)
        expected[name] = reference_logprobs(model, ids_T, cu_S1, parity.TEMPERATURE)[mask_T]
    run_with_stand_ins("compute", folder)
    found: dict[str, Any] = pickle.loads((folder / "found.pickle").read_bytes())
    return {**found, "transformers": expected}


@pytest.mark.slow
@pytest.mark.parametrize("experts", EXPERTS)
def test_log_probs_equal_transformers(experts: str, computed: dict[str, Any]) -> None:
    expected = computed["transformers"]
    for case, layout in points(experts):
        last = [rank[case, layout].logprobs_R for rank in computed[experts]]
        last = [logprobs_R for logprobs_R in last if logprobs_R is not None]
        assert len(last) == parity.RANKS // parity.ALL_LAYOUTS[layout].get("pipeline", 1)
        for logprobs_R in last:
            worst = float((logprobs_R - expected[case]).abs().max())
            assert worst < 1e-5, (case, layout)


@pytest.mark.slow
def test_log_probs_and_gradients_equal_those_of_local_layers(computed: dict[str, Any]) -> None:
    expected: set[tuple[Any, ...]] = {("qwen3", "tp2_sp", "none")}
    expected |= {(*point, recompute) for point in RECOMPUTED for recompute in RECOMPUTE}
    for rank in computed["gradients"]:
        assert set(rank) >= expected
        differences = {point: difference for point, (difference, _) in rank.items()}
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
@pytest.mark.parametrize("point", RECOMPUTED)
def test_layers_are_called_again_when_they_are_recomputed(
    point: tuple[str, str], computed: dict[str, Any]
) -> None:
    once, twice, first_twice = [1.0] * 4, [2.0] * 4, [2.0, 1.0, 1.0, 1.0]
    expected = {
        "none": {"linear_qkv": once, "linear_fc1": once},
        "feed_forward": {"linear_qkv": once, "linear_fc1": twice},
        1: {"linear_qkv": first_twice, "linear_fc1": first_twice},
    }
    for rank in computed["gradients"]:
        assert {recompute: rank[*point, recompute][1] for recompute in RECOMPUTE} == expected


def test_the_stream_needs_the_dummy_sequence() -> None:
    """Or sequence parallelism would not lengthen it."""
    assert sum(parity.LENGTHS) % 2
