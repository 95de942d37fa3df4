"""Tests that settings, engine arguments and variables under which log-probs would not describe the
sampled tokens are refused or removed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.config.sampling_contract import (
    _REFUSED,
    MIN_TEMPERATURE,
    without_breaking_variables,
)
from megatron_async.errors import UserError

BIASED = {"allow_biased_behavior": True}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 1e-9}, r"sampling\.temperature must lie between 0\.01 and 100, got 1e-09"),
        ({"temperature": 5e-3}, "got 0.005"),
        ({"temperature": 0}, "got 0"),
        ({"temperature": -1}, "got -1"),
        ({"temperature": 1e30}, r"got 1e\+30"),
        ({"temperature": float("inf")}, r"sampling\.temperature is inf: .*finite"),
        ({"temperature": float("nan")}, r"sampling\.temperature is nan: .*finite"),
        ({"top_p": float("nan")}, r"sampling\.top_p is nan"),
        ({"top_k": 0, **BIASED}, r"sampling\.top_k must be -1 \(all tokens\) or at least 1, got 0"),
        ({"top_k": 1}, "allow_biased_behavior"),
        ({"top_k": 1, "temperature": 0.7, **BIASED}, r"top_k is 1 and .*temperature is 0\.7"),
    ],
)
def test_sampling_settings_that_log_probs_cannot_describe_are_refused(
    sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_config({"sampling": sampling})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.01}, {"temperature": 100}, {"top_k": 1, **BIASED}, {"top_k": 5, **BIASED}],
)
def test_sampling_settings_that_log_probs_describe_are_accepted(sampling: dict[str, Any]) -> None:
    build_config({"sampling": sampling})


@pytest.mark.parametrize("temperature", [1e-9, -1.0, 1e9])
def test_eval_temperature_is_refused_unless_zero_or_within_the_limits(
    temperature: float,
) -> None:
    with pytest.raises(UserError, match=r"eval\.temperature must be 0 \(greedy\) or lie between"):
        build_config({"eval": {"temperature": temperature}})


@pytest.mark.parametrize(
    "key", [("optimizer", "lr"), ("weights", "timeout_seconds"), ("task", "heldout_share")]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinite_and_nan_settings_are_refused(key: tuple[str, str], value: float) -> None:
    with pytest.raises(UserError, match=rf"{key[0]}\.{key[1]} is {value}"):
        build_config({key[0]: {key[1]: value}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preferred-sampling-params", '{"min_p": 0.1}'], "do not sample by the settings of"),
        (["--preferred-sampling-params={}"], "do not sample"),
        (["--preferred"], "do not sample"),
        (["--log-level", "warning", "--enable-watermark"], "another distribution"),
        (["--json-model-override-args", "{}"], r"change config\.json"),
        (["--dtype", "bfloat16"], r"set engines\.dtype"),
        (["--pp-size=2"], r"one server of engines\.tensor ranks"),
        (["--config", "engine.yaml"], "list its arguments"),
    ],
)
def test_engine_arguments_that_change_the_distribution_are_refused(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=rf"engines\.extra_args has --.*{message}"):
        build_config({"engines": {"extra_args": arguments}})


def test_other_engine_arguments_are_accepted_unchanged() -> None:
    arguments = ["--mem-fraction-static", "0.5", "--enable-torch-compile", "-1", "--"]
    assert build_config({"engines": {"extra_args": arguments}}).engines.extra_args == arguments


def test_variables_that_change_tokens_or_log_probs_are_removed() -> None:
    kept = {"PATH": "/bin", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "256", "SGLANG_USE_AITER": "1"}
    breaking = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGL_RETURN_ORIGINAL_LOGPROB": "1",  # SGLang still accepts this older name.
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS": "true",
        "SGLANG_TEST_RETRACT": "1",
    }
    assert without_breaking_variables({**kept, **breaking}) == kept


# ---------------------------------------------------------------- comparison with SGLang's source


def source_of(path: str) -> str:
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    return (Path(spec.origin).parent / "srt" / path).read_text()


def test_sglang_samples_at_the_smallest_permitted_temperature() -> None:
    [threshold] = re.findall(
        r"^_SAMPLING_EPS = (.+)$", source_of("sampling/sampling_params.py"), re.M
    )
    assert float(threshold) < MIN_TEMPERATURE


def test_refused_arguments_exist_in_sglang_and_have_no_allowed_prefix() -> None:
    fields = re.findall(r'^    "(\w+)",$', source_of("arg_groups/field_order.py"), re.M)
    flags = {"--" + name.replace("_", "-") for name in fields}
    assert len(flags) > 400
    aliases = {"--config", *(f"--{axis}-parallel-size" for axis in ("tensor", "data", "pipeline"))}
    assert set(_REFUSED) - flags == aliases
    prefixes = {f for f in flags - set(_REFUSED) if any(r.startswith(f) for r in _REFUSED)}
    assert not prefixes


# According to SGLang's source, these variables change neither the drawn token nor, except for
# rounding, its log-prob.
HARMLESS = {
    "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER",
    "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS",
    "SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION",
    "SGLANG_DSPARK_USE_GREEDY_DRAFT",
    "SGLANG_DSV4_FP4_LOGITS_BUDGET_MB",
    "SGLANG_ENABLE_DELAY_SAMPLE",
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK",
    "SGLANG_ENABLE_FAST_INPUT_LOGPROBS",
    "SGLANG_ENABLE_LOGPROB_CHUNK",
    "SGLANG_ENABLE_NAN_LOGITS_CHECK",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
    "SGLANG_LOGPROB_CHUNK_SIZE",
    "SGLANG_OPT_DSV41_BF16_INDEX_LOGITS",
    "SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH",
    "SGLANG_OPT_USE_GUMBEL_SAMPLE",
    "SGLANG_RESIZE_RESAMPLE",
    "SGLANG_TRACE_LOGITS_E2E",
    "SGLANG_TRACE_LOGITS_E2E_SYNC",
    "SGLANG_TRACE_SAMPLER_E2E",
}


def test_every_sampling_variable_of_sglang_is_removed_or_listed_as_harmless() -> None:
    """A new SGLang may have a new variable. Then this test fails, and the variable is added to one
    of the lists."""
    names = set(re.findall(r"^    ([A-Z0-9_]+) = Env", source_of("environ.py"), re.M))
    assert len(names) > 500
    relevant = re.compile("LOGPROB|LOGIT|SAMPL|TEMPERATURE|GREEDY|SIMULATE|PERTURB|SKIP_SOFTMAX")
    found = {name for name in names if relevant.search(name)}
    assert 'key.startswith("SGL_")' in source_of("environ.py"), (
        "SGLang no longer reads the older names"
    )
    passed = set(without_breaking_variables(dict.fromkeys(found, "1")))
    assert passed == HARMLESS
