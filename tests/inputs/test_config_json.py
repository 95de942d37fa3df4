"""Tests that any config.json either gives the model that it describes, or is refused with a message
of one line before a run starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config import RunConfig, build_config
from megatron_async.errors import UserError
from megatron_async.launcher.preflight import check_run
from megatron_async.models.architecture import DTYPES, Architecture, Rope
from megatron_async.models.families import read_architecture
from megatron_async.models.model_files import check_weights
from megatron_async.models.shape import shape_of
from tests.fuzz import accepted, damaged, fuzzed, json_texts
from tests.inputs.model_directories import CONFIGS, write_model

ROPE_KEYS = (
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config}
    | {"rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "text_config"}
    | {"sliding_window_pattern", "rope_local_base_freq", "hidden_act", "mlp_bias"}
    | {"decoder_sparse_step", "quantization_config", "auto_map"}
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in CONFIGS}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Iterator[Path]:
    """The directory of the llama model, whose config.json a test may change."""
    yield folders["llama"]
    (folders["llama"] / "config.json").write_text(json.dumps(CONFIGS["llama"]))


def _run_config(folder: Path) -> RunConfig:
    return build_config({"model": {"path": str(folder)}, "task": {"answer_marker": "#"}})


def _json_text(config: Mapping[str, Any], changes: Mapping[str, str | None]) -> str:
    """Return `config` as JSON text in which `changes` replace the texts of values, or with None
    remove the key."""
    texts = {key: json.dumps(value) for key, value in config.items()} | dict(changes)
    return "{" + ",".join(f'"{k}":{v}' for k, v in texts.items() if v is not None) + "}"


def _assert_plausible(architecture: Architecture) -> None:
    """Assert that a model can be built with every number of the architecture."""
    for rope in (architecture.rope, architecture.local_rope or Rope(1.0)):
        for value in (rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor):
            assert 0 < value < math.inf
    for name in ("hidden_size", "num_layers", "vocab_size", "max_positions", "head_dim"):
        value = getattr(architecture, name)
        assert type(value) is int and 1 <= value < 1 << 31
    assert type(architecture.tied_head) is bool and architecture.dtype in DTYPES
    assert 0 < architecture.norm_eps < math.inf
    assert 0 < (architecture.attention_scale or 1.0) < math.inf


_changes = st.dictionaries(st.sampled_from(KEYS), st.none() | json_texts, min_size=1, max_size=3)
_rope_changes = st.tuples(
    st.sampled_from(["rope_scaling", "rope_parameters"]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), st.none() | json_texts, max_size=3),
)


@fuzzed(350)
@given(st.sampled_from(sorted(CONFIGS)), _changes, st.none() | _rope_changes)
def test_fuzzed_config_json_is_accepted_or_refused_when_keys_change(
    folders: dict[str, Path], family: str, changes: dict[str, str | None], rope: Any
) -> None:
    config = CONFIGS[family]
    if rope is not None:
        key, inner = rope
        base = config.get(key) or CONFIGS["llama"]["rope_scaling"]
        changes = {**changes, key: _json_text(base, inner)}
    folder = folders[family]
    (folder / "config.json").write_text(_json_text(config, changes))
    architecture = accepted(lambda: read_architecture(folder))
    accepted(lambda: shape_of(_run_config(folder)))
    if architecture is not None:
        _assert_plausible(architecture)
        accepted(lambda: check_weights(folder, architecture))


@fuzzed(150)
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_fuzzed_config_json_is_accepted_or_refused_when_bytes_change(
    folders: dict[str, Path], family: str, data: st.DataObject
) -> None:
    """Calls all checks of the command `train`."""
    folder = folders[family]
    undamaged = json.dumps(CONFIGS[family], indent=1).encode()
    (folder / "config.json").write_bytes(data.draw(damaged(undamaged)))
    accepted(lambda: check_run(_run_config(folder)))
    accepted(lambda: shape_of(_run_config(folder)))


@pytest.mark.parametrize("family", CONFIGS)
def test_check_run_accepts_an_undamaged_model(folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    check_run(_run_config(folder))
    assert shape_of(_run_config(folder)).hidden == CONFIGS[family]["hidden_size"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_scaling": '{"type": "linear"}'}, r"rope_scaling\.factor is None; .*positive"),
        ({"rope_scaling": '["linear"]'}, r"rope_scaling is \['linear'\]; it must be a mapping"),
        (
            {"rope_scaling": '{"full_attention": {"rope_theta": 5.0}}'},
            "must be one rope for all layers",
        ),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor is 0.5, which is not supported"),
        ({"final_logit_softcapping": "30.0"}, "final_logit_softcapping is 30.0, which is not"),
        ({"quantization_config": '{"quant_method": "fp8"}'}, "quantization_config is .*not supp"),
        ({"rope_theta": "null"}, "rope_theta is None; it must be a positive number"),
        ({"hidden_size": "9" * 30}, r"hidden_size is 9+\.*9+; .* from 1 to 2147483647"),
        ({"hidden_size": "9" * 5000}, "is not valid JSON: it holds a number of thousands"),
        ({"vocab_size": "NaN"}, "is not valid JSON: NaN is not a JSON number"),
        ({"architectures": "[" * 200_000}, "is not valid JSON: it is nested too deeply"),
        ({"model_type": r'"\ud800"'}, r"model_type '\\ud800' in .* is not supported"),
        ({"tie_word_embeddings": '"false"'}, "tie_word_embeddings is 'false'; .* true or false"),
        ({"dtype": '"int8"'}, "dtype is 'int8'; it must be one of float32, bfloat16, float16"),
        ({"hidden_size": "16"}, r"embed_tokens\.weight has shape \(128, 8\); .* \(128, 16\)"),
        ({"num_hidden_layers": "3"}, r"layers\.2\..* is missing; config\.json requires 3 layers"),
        ({"num_hidden_layers": "1"}, r"layers\.1\..* is unknown .* the 1 layers that config\.json"),
    ],
)
def test_check_run_refuses_an_invalid_config_json(
    folder: Path, changes: dict[str, str], sentence: str
) -> None:
    (folder / "config.json").write_text(_json_text(CONFIGS["llama"], changes))
    with pytest.raises(UserError, match=sentence) as caught:
        check_run(_run_config(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_check_run_refuses_a_single_active_expert_with_normalized_weight(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    (folder / "config.json").write_text(json.dumps({**CONFIGS[family], "num_experts_per_tok": 1}))
    with pytest.raises(UserError, match="num_experts_per_tok is 1; it must be 2 or more if"):
        check_run(_run_config(folder))


def test_config_json_must_be_utf8_and_may_have_a_byte_order_mark(
    folder: Path,
) -> None:
    undamaged = json.dumps(CONFIGS["llama"]).encode()
    (folder / "config.json").write_bytes(undamaged.replace(b"default", b"\xff") + b"\xff")
    with pytest.raises(UserError, match=r"config\.json is not UTF-8 text"):
        check_run(_run_config(folder))
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + undamaged)
    check_run(_run_config(folder))


@pytest.mark.parametrize("family", CONFIGS)
def test_missing_config_values_have_the_defaults_of_transformers(
    folders: dict[str, Path], family: str
) -> None:
    """Covers settings whose wrong value the shape of no tensor would reveal."""
    from transformers import AutoConfig

    omitted = {"rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "norm_topk_prob"}
    remaining = {key: value for key, value in CONFIGS[family].items() if key not in omitted}
    (folders[family] / "config.json").write_text(json.dumps(remaining))
    architecture = read_architecture(folders[family])
    transformers_config = AutoConfig.from_pretrained(folders[family])
    assert architecture.norm_eps == transformers_config.rms_norm_eps
    if family == "gemma3_text":
        ropes = {"full_attention": architecture.rope, "sliding_attention": architecture.local_rope}
        thetas = {name: rope.theta for name, rope in ropes.items() if rope is not None}
        assert thetas == {
            n: r["rope_theta"] for n, r in transformers_config.rope_parameters.items()
        }
    else:
        assert architecture.rope == Rope(transformers_config.rope_parameters["rope_theta"])
    if family == "qwen3_moe":
        assert architecture.experts is not None
        assert architecture.experts.normalize_top_k == transformers_config.norm_topk_prob
