"""Tests that any YAML file of settings and any override either gives a configuration that can be
dumped and read again, or is refused with a message of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config import RunConfig, build_config, dump, load_config
from megatron_async.errors import UserError
from megatron_async.simulate.engine_costs import read_engine_costs
from tests.fuzz import accepted, damaged, fuzzed, json_texts

CONFIGS = Path(__file__).parents[2] / "configs"


def _settings(model: type[Any] = RunConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings and sections of `model`, each after `prefix`."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if hasattr(field.annotation, "model_fields"):
            names += _settings(field.annotation, f"{prefix}{name}.")
    return names


SETTINGS = _settings()
# PyYAML takes a second for the longest texts.
_yaml_values = json_texts.filter(lambda text: len(text) < 10_000) | st.sampled_from(
    [
        "!!int ''",
        "!!float x",
        "!!bool x",
        "!!timestamp x",
        "!!binary x",
        "!!set {a}",
        "!!python/object:os.system {}",
        "2001-99-99",
        "2001-01-01",
        "0x" + "f" * 9000,
        "1_0",
        ".inf",
        "-.inf",
        ".nan",
        "~",
        "yes",
        "&a [*a]",
        "&a {b: *a}",
        "*nothing",
        "{a: 1, a: 2}",
        "? [a]",
        "{[1]: 2}",
        "{1: 2}",
        "1:30:00",
        '"\\0"',
        '"\\ud800"',
        "|",
        ">",
        "@",
        "`",
        "%",
        "&a [&b [&c [0,0],*c,*c,*c],*b,*b,*b]",
        "=",
        "<<",
        "{<<: {a: 1}, a: 2}",
        "- 1",
    ]
)
_names = st.sampled_from(SETTINGS) | st.text(max_size=6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "run.yaml"


def _assert_round_trip(config: RunConfig | None) -> None:
    """Assert that an accepted configuration can be written to a run directory and read again."""
    if config is not None:
        text = dump(config)
        text.encode()
        assert build_config(yaml.safe_load(text)) == config
        json.dumps(config.model_dump(mode="json"), allow_nan=False)


def _nested(name: str, value: str) -> str:
    """Return a dotted setting name and the text of its value as one line of YAML with nested
    mappings."""
    first, _, rest = name.partition(".")
    return f"{first}: " + (f"{{{_nested(rest, value)}}}" if rest else value)


@fuzzed(150)
@given(st.dictionaries(_names, _yaml_values, min_size=1, max_size=3))
def test_fuzzed_settings_of_a_file_are_refused_or_survive_a_round_trip(
    file: Path, values: dict[str, str]
) -> None:
    text = "\n".join(_nested(name, value) for name, value in values.items())
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    _assert_round_trip(accepted(lambda: load_config(file)))


@fuzzed(100)
@given(st.lists(st.builds("{}={}".format, _names, _yaml_values) | st.text(max_size=9), max_size=3))
def test_fuzzed_overrides_are_refused_or_survive_a_round_trip(
    file: Path, overrides: list[str]
) -> None:
    file.write_text("name: x\n")
    _assert_round_trip(accepted(lambda: load_config(file, overrides)))


@fuzzed(50)
@given(st.data())
def test_fuzzed_settings_file_is_refused_or_read_when_bytes_change(
    file: Path, data: st.DataObject
) -> None:
    undamaged = (CONFIGS / "quickstart.yaml").read_bytes()
    file.write_bytes(data.draw(damaged(undamaged)))
    _assert_round_trip(accepted(lambda: load_config(file)))


@fuzzed(60)
@given(st.data())
def test_fuzzed_cost_model_is_refused_or_read_when_bytes_change(
    file: Path, data: st.DataObject
) -> None:
    undamaged = next((CONFIGS / "simulate" / "engines").glob("*.yaml")).read_bytes()
    file.write_bytes(data.draw(damaged(undamaged)))
    accepted(lambda: read_engine_costs(file))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"name: \xff\n", r"is not UTF-8 text \(byte 6\)"),
        (b"seed: " + b"9" * 5000, "is not valid YAML: it holds a number of thousands of digits"),
        (b"seed: 0x" + b"f" * 9000, "seed is a number of thousands of digits; a value must be"),
        (b"seed: 1" + b"0" * 30, r"seed is 10+\.*0+; a value must be .* of at most 64 bits"),
        (b"[" * 2_000, "is not valid YAML: it is nested too deeply"),
        (b"seed: 2001-99-99\n", "is not valid YAML: month must be in 1..12"),
        (b"seed: !!int ''\n", "is not valid YAML: a value does not fit its tag"),
        (b'name: "\\ud800"\n', r"name is '\\ud800'; a value must be a text"),
        (b'name: "\\0"\n', r"name is '\\x00'; a value must be a text"),
        (b"task: {params: {when: 2001-01-01}}\n", r"task\.params\.when is datetime\.date"),
        (b"task: {params: &a {b: *a}}\n", "has more than 32 levels or 1,000,000 values"),
        (b"1: 2\n", "the mapping has the key 1; keys must be texts"),
        (b"steps: 1\nsteps: 2\n", r"'steps' is set twice \(line 2, column 1\)"),
        (b"base: [x]\n", r"`base` is \['x'\]; it must name a file"),
    ],
)
def test_load_config_refuses_invalid_yaml_values(file: Path, content: bytes, sentence: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_load_config_accepts_merge_keys_and_a_byte_order_mark(file: Path) -> None:
    file.write_bytes(
        b"\xef\xbb\xbfsft: {optimizer: &o {lr: 1e-3}}\noptimizer: {<<: *o, eps: 1e-6}\n"
    )
    config = load_config(file)
    assert (config.optimizer.lr, config.optimizer.eps, config.sft.optimizer.lr) == (
        1e-3,
        1e-6,
        1e-3,
    )
