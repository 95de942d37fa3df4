"""Tests that a family's rules name exactly the checkpoint's tensors, and unsupported
settings fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_async.errors import UserError
from megatron_async.models.architecture import Rope, served_context
from megatron_async.models.families import read_architecture, rules_of
from megatron_async.models.model_files import SafetensorsDirectory
from tests.hf_models import CASES, EXPERT_CASES, save_hf_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0}


def _write(folder: Path, **changes: Any) -> Path:
    config = {**LLAMA, **changes}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )
    return folder


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("case", [*CASES, *EXPERT_CASES])
def test_rules_of_a_family_name_every_tensor_with_its_shape(case: str, tmp_path: Path) -> None:
    save_hf_model(case, tmp_path)
    architecture = read_architecture(tmp_path)
    expected: dict[str, tuple[int, ...]] = {}
    experts = architecture.experts.num if architecture.experts else 1
    for rule in rules_of(architecture):
        if rule.exported:
            for layer in range(architecture.num_layers):
                for expert in range(experts):
                    names = rule.tensor_names(layer, expert)
                    expected.update(zip(names, rule.shapes, strict=True))
    with SafetensorsDirectory(tmp_path) as directory:
        assert expected == {name: directory.shape(name) for name in directory.file_of}


def test_rope_is_equal_in_transformers_4_and_5_configs(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = read_architecture(_write(tmp_path, rope_theta=500000.0, rope_scaling=scaling))
    new = read_architecture(_write(tmp_path, rope_parameters={**scaling, "rope_theta": 500000.0}))
    assert old.rope == new.rope
    assert old.rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


THETA = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("scaling", [YARN, LINEAR, LLAMA3], ids=["yarn", "linear", "llama3"])
@pytest.mark.parametrize(
    "theta",
    [
        {"rope_parameters": THETA, "rope_theta": 10000.0},
        {"rope_parameters": {}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default"}},
    ],
    ids=["theta in both", "theta outside", "no theta"],
)
def test_rope_equals_that_of_transformers_when_config_has_both_spellings(
    family: str, scaling: dict[str, Any], theta: dict[str, Any], tmp_path: Path
) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 2048}
    folder = _write(tmp_path, model_type=family, rope_scaling=scaling, **theta, **more)
    ours = read_architecture(folder).rope
    theirs = AutoConfig.from_pretrained(folder)
    assert (ours.theta, ours.kind, ours.factor) == tuple(
        theirs.rope_parameters[name] for name in ("rope_theta", "rope_type", "factor")
    )
    original = theirs.rope_parameters.get("original_max_position_embeddings")
    assert scaling is LINEAR or ours.original_max_positions == original
    config = json.loads((folder / "config.json").read_text())
    assert served_context(config) == (2048 if scaling is LLAMA3 else int(ours.factor * 2048))


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (YARN, {"rope_theta": 5e5}),
        ({**YARN, "rope_theta": 5e5}, THETA),
        (LINEAR, YARN),
        (LINEAR, {**LINEAR, "factor": 2.0}),
        (YARN, {**YARN, "beta_fast": 16}),
        (LLAMA3, {**LLAMA3, "original_max_position_embeddings": 4096}),
    ],
)
def test_read_architecture_names_both_ropes_when_they_differ(
    scaling: dict[str, Any], parameters: dict[str, Any], tmp_path: Path
) -> None:
    folder = _write(tmp_path, rope_scaling=scaling, rope_parameters=parameters)
    with pytest.raises(UserError, match=r"rope_scaling is .* with .*, and rope_parameters is .*"):
        read_architecture(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "default"},
            },
            "rope_theta": 3e6,
        },
        {
            "rope_parameters": {"full_attention": THETA, "sliding_attention": THETA},
            "rope_scaling": LINEAR,
            "rope_local_base_freq": 2e4,
        },
        {"rope_scaling": LINEAR, "rope_theta": 3e6, "rope_local_base_freq": 2e4},
    ],
)
def test_gemma3_ropes_equal_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = _write(tmp_path, model_type="gemma3_text", max_position_embeddings=4096, **changes)
    found, theirs = read_architecture(folder), AutoConfig.from_pretrained(folder).rope_parameters
    assert found.local_rope is not None
    for ours, name in ((found.rope, "full_attention"), (found.local_rope, "sliding_attention")):
        assert (ours.theta, ours.kind) == (theirs[name]["rope_theta"], theirs[name]["rope_type"])
        assert ours.factor == theirs[name].get("factor", 1.0)
    assert served_context(json.loads((folder / "config.json").read_text())) == 4096


def test_yarn_uses_models_context_when_it_states_no_original_context(tmp_path: Path) -> None:
    model = _write(tmp_path, max_position_embeddings=32768, rope_scaling=YARN)
    assert read_architecture(model).rope == Rope(1e4, "yarn", 4.0, original_max_positions=32768)
    stated = {**YARN, "original_max_position_embeddings": 8192, "beta_fast": 16, "beta_slow": 2}
    found = read_architecture(_write(tmp_path, rope_scaling=stated)).rope
    assert (found.original_max_positions, found.beta_fast, found.beta_slow) == (8192, 16, 2)


def test_gemma3_local_layers_follow_the_pattern_without_layer_types(tmp_path: Path) -> None:
    old = read_architecture(
        _write(
            tmp_path,
            model_type="gemma3_text",
            num_hidden_layers=7,
            sliding_window=8,
            rope_local_base_freq=10000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )
    assert old.local_layers == (True,) * 5 + (False, True)
    assert old.rope == Rope(1e6, "linear", 8.0)
    assert old.local_rope == Rope(1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": ...}, "model_type None"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": THETA}, "rope type 'dynamic'"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"type": "longrope"}}, "rope_parameters has"),
        ({"rope_scaling": {**LINEAR, "type": "yarn"}}, "rope_scaling.type is 'yarn'"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 9}, "embeddings is 9"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is 0.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor is 1.2"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale is 1.0"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate is False"),
        ({"rope_scaling": {**YARN, "beta_slow": 32}}, "beta_slow is 32.0; it must be below"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 9}, "embeddings is 9"),
        ({"rope_scaling": YARN, "model_type": "gemma3_text"}, "rope_type is 'yarn'"),
    ],
)
def test_read_architecture_names_the_setting_when_it_is_not_supported(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_architecture(_write(tmp_path, **changes))


def test_read_architecture_names_the_fault_when_config_is_missing_or_damaged(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"is not a directory \(seen from"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match="is not valid JSON"):
        read_architecture(tmp_path)


USER_DEFINED = Path(__file__).parents[2] / "examples" / "own_family" / "mistral.py"


def test_read_architecture_uses_user_defined_family_of_import_path(tmp_path: Path) -> None:
    model = _write(tmp_path, model_type="mistral")
    with pytest.raises(UserError, match=r"'mistral' .* your own family in model\.family"):
        read_architecture(model)
    architecture = read_architecture(model, f"{USER_DEFINED}:FAMILY")
    assert architecture.family == f"{USER_DEFINED}:FAMILY"
    ours = rules_of(read_architecture(_write(tmp_path, model_type="llama")))
    assert rules_of(architecture) == ours
    with pytest.raises(UserError, match=r"not a models\.families\.Family"):
        read_architecture(model, f"{USER_DEFINED}:architecture")
