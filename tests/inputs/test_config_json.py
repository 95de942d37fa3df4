"""Any config.json: the model it describes, or one sentence, before anything starts."""

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
    *("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
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
    """The llama model; its config.json may be changed."""
    yield folders["llama"]
    (folders["llama"] / "config.json").write_text(json.dumps(CONFIGS["llama"]))


def _run_config(folder: Path) -> RunConfig:
    return build_config({"model": {"path": str(folder)}, "task": {"answer_marker": "#"}})


def _text(config: Mapping[str, Any], changes: Mapping[str, str | None]) -> str:
    """`config` with texts of values in place of some, and None for a key that is left out."""
    texts = {key: json.dumps(value) for key, value in config.items()} | dict(changes)
    return "{" + ",".join(f'"{k}":{v}' for k, v in texts.items() if v is not None) + "}"


def _plausible(architecture: Architecture) -> None:
    """No number in it is one that a model could not be built with."""
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
def test_fuzz_changed_keys(
    folders: dict[str, Path], family: str, changes: dict[str, str | None], rope: Any
) -> None:
    config = CONFIGS[family]
    if rope is not None:
        key, inner = rope
        base = config.get(key) or CONFIGS["llama"]["rope_scaling"]
        changes = {**changes, key: _text(base, inner)}
    folder = folders[family]
    (folder / "config.json").write_text(_text(config, changes))
    architecture = accepted(lambda: read_architecture(folder))
    accepted(lambda: shape_of(_run_config(folder)))
    if architecture is not None:
        _plausible(architecture)
        accepted(lambda: check_weights(folder, architecture))


@fuzzed(150)
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_fuzz_damaged_bytes(folders: dict[str, Path], family: str, data: st.DataObject) -> None:
    """Everything that `train` checks."""
    folder = folders[family]
    whole = json.dumps(CONFIGS[family], indent=1).encode()
    (folder / "config.json").write_bytes(data.draw(damaged(whole)))
    accepted(lambda: check_run(_run_config(folder)))
    accepted(lambda: shape_of(_run_config(folder)))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_undamaged_directory_passes(folders: dict[str, Path], family: str) -> None:
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
def test_a_config_that_cannot_be_is_one_sentence(
    folder: Path, changes: dict[str, str], sentence: str
) -> None:
    (folder / "config.json").write_text(_text(CONFIGS["llama"], changes))
    with pytest.raises(UserError, match=sentence) as caught:
        check_run(_run_config(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_one_expert_whose_weight_is_always_one_is_refused_at_the_start(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    (folder / "config.json").write_text(json.dumps({**CONFIGS[family], "num_experts_per_tok": 1}))
    with pytest.raises(UserError, match="num_experts_per_tok is 1; it must be 2 or more if"):
        check_run(_run_config(folder))


def test_a_config_that_is_not_utf8_is_one_sentence_and_a_byte_order_mark_is_read(
    folder: Path,
) -> None:
    whole = json.dumps(CONFIGS["llama"]).encode()
    (folder / "config.json").write_bytes(whole.replace(b"default", b"\xff") + b"\xff")
    with pytest.raises(UserError, match=r"config\.json is not UTF-8 text"):
        check_run(_run_config(folder))
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + whole)
    check_run(_run_config(folder))


@pytest.mark.parametrize("family", CONFIGS)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    folders: dict[str, Path], family: str
) -> None:
    """Of the settings that no tensor's shape would give away."""
    from transformers import AutoConfig

    left_out = {"rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "norm_topk_prob"}
    kept = {key: value for key, value in CONFIGS[family].items() if key not in left_out}
    (folders[family] / "config.json").write_text(json.dumps(kept))
    ours = read_architecture(folders[family])
    theirs = AutoConfig.from_pretrained(folders[family])
    assert ours.norm_eps == theirs.rms_norm_eps
    if family == "gemma3_text":
        ropes = {"full_attention": ours.rope, "sliding_attention": ours.local_rope}
        thetas = {name: rope.theta for name, rope in ropes.items() if rope is not None}
        assert thetas == {n: r["rope_theta"] for n, r in theirs.rope_parameters.items()}
    else:
        assert ours.rope == Rope(theirs.rope_parameters["rope_theta"])
    if family == "qwen3_moe":
        assert ours.experts is not None
        assert ours.experts.normalize_top_k == theirs.norm_topk_prob
