"""Loads a checked `RunConfig` from a YAML file and dotted overrides.

Invariants
- Precedence: recipe < schedule preset < YAML < command line. In YAML, a file's settings replace
  those of the file that it names as `base:`.
- Every refusal is one message that names the setting and the value (`UserError`).
- `dump` and `load_config` are inverse: a run directory's config.yaml gives the same run.
- A run's config.yaml has every resolved value and, under the key `explicit`, the settings that a
  file or the command line had set. If a resume chooses another recipe or preset, its values replace
  those of the previous one, but no explicit setting.
"""

import copy
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError

from megatron_async.config.files import parse_yaml, read_text
from megatron_async.config.recipes import RECIPES, SCHEDULE_PRESETS, recipe_defaults
from megatron_async.config.reference import did_you_mean
from megatron_async.config.run import RunConfig
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError, short_repr
from megatron_async.files.package_files import existing
from megatron_async.runtime.import_path import anchored

_Config = TypeVar("_Config", bound=RunConfig)

_MAX_BASE_DEPTH = 8
_EXPLICIT = "explicit"
# Settings that may be written as `SETTING: NAME`, which is short for `SETTING: {name: NAME}`.
_NAMED = ("agent", "environment", "loss", "reward")


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings of settings, in which the values of `high` replace those of `low`.

    If a key has a mapping in both, these mappings are merged in the same way. If `low` has the
    short form of a setting, such as `agent: NAME`, and `high` a mapping for it, NAME becomes the
    `name` in the merged mapping.
    """
    result = copy.deepcopy(dict(low))
    for key, value in high.items():
        if key in _NAMED and isinstance(value, Mapping) and isinstance(result.get(key), str):
            result[key] = {"name": result[key]}
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def read_yaml(path: Path, depth: int = 0) -> dict[str, Any]:
    """Read the YAML mapping of a file; its values replace those of the file that it names as
    `base:`.

    The path of the base file is relative to the directory of `path`.

    Args:
        depth: Number of files in the chain of `base:` that led to this file. It is limited, so that
            two files which name each other cause an error.

    Raises:
        UserError: If a file cannot be read or is invalid.
    """
    if depth > _MAX_BASE_DEPTH:
        raise UserError(f"config file {path}: `base:` is nested deeper than {_MAX_BASE_DEPTH}")
    what = f"config file {path}"
    content = parse_yaml(read_text(path, what), what)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"{what} must contain a mapping, got {type(content).__name__}")
    if not isinstance(content.get(_EXPLICIT, {}), dict):
        raise UserError(
            f"{what}: {_EXPLICIT} is {short_repr(content[_EXPLICIT])}; it must be a mapping"
        )
    content = anchored(content, path.parent)
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise UserError(f"{what}: `base` is {short_repr(base)}; it must name a file")
    below = read_yaml(path.parent / base, depth + 1)
    # If the base is the config.yaml of a run, only its explicit settings are used, because its
    # other settings were derived for that run.
    return merge(below.get(_EXPLICIT, below), content)


def parse_override(text: str) -> dict[str, Any]:
    """Convert `a.b=value` to a nested mapping; the value is read as YAML.

    Raises:
        UserError: If the text has another form.
    """
    dotted, equals, value = text.partition("=")
    if not equals or not all(dotted.split(".")):
        raise UserError(f"override {short_repr(text)} is not of the form section.setting=value")
    if dotted.split(".")[0] == _EXPLICIT:
        raise UserError(
            f"override {short_repr(text)} names no setting: `{_EXPLICIT}` records which settings "
            "were set. Override the setting itself."
        )
    try:
        parsed = parse_yaml(value, f"override {short_repr(text)}")
    except UserError as error:
        raise UserError(f"{error}. If it is a text, quote it: '{dotted}=\"TEXT\"'") from error
    if isinstance(parsed, str):
        parsed = _number(parsed)
    return _nested(dotted, anchored(parsed, Path.cwd()))


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _number(text: str) -> str | float:
    """Convert a text to a number if it is a finite one, such as `1e-6`, which YAML 1.1 reads as a
    text.

    A text with an underscore, such as the threshold `0.5_2`, is returned unchanged, although Python
    would read it as the number 0.52.
    """
    if "_" in text:
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def build_config(settings: Mapping[str, Any]) -> RunConfig:
    """Return the checked configuration of `settings`. Settings that they do not contain get the
    defaults of their recipe and preset.

    Raises:
        UserError: If a setting is unknown or invalid.
    """
    if "simulate" in settings:
        raise UserError(
            "simulate is set; a run has no such section. Put it into a separate file with "
            "`base: RUN.yaml`, for `megatron-async simulate` and `plan`"
        )
    return _built(settings, RunConfig)


def build_simulation(settings: Mapping[str, Any]) -> SimulationConfig:
    """Return the checked simulation of `settings`, which may have the section `simulate` in
    addition to the sections of a run.

    Raises:
        UserError: If a setting is unknown or invalid.
    """
    return _built(settings, SimulationConfig)


def _built(settings: Mapping[str, Any], kind: type[_Config]) -> _Config:
    settings = _expanded(settings)
    own = {key: value for key, value in settings.items() if key != _EXPLICIT}
    try:
        config = kind.model_validate(merge(_defaults_below(own), own))
    except ValidationError as error:
        raise UserError(describe(error)) from error
    return config.with_explicit(settings.get(_EXPLICIT, own))


def _defaults_below(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the recipe and the preset of `settings`.

    Raises:
        UserError: If the recipe or the preset is unknown.
    """
    recipe = _named(settings, "algorithm", "recipe", "copris", RECIPES)
    below = recipe_defaults(recipe)
    preset = _named(merge(below, settings), "schedule", "preset", "copris", SCHEDULE_PRESETS)
    return merge(below, {"schedule": {"preset": preset, **SCHEDULE_PRESETS[preset]}})


def _expanded(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `algorithm.loss: NAME` to `algorithm.loss.name: NAME`, so that a recipe's defaults
    for the other settings of `algorithm.loss` can be merged with it."""
    algorithm = settings.get("algorithm")
    if isinstance(algorithm, Mapping) and isinstance(algorithm.get("loss"), str):
        return merge(settings, {"algorithm": {"loss": {"name": algorithm["loss"]}}})
    return settings


def _named(
    settings: Mapping[str, Any], section: str, key: str, default: str, known: Mapping[str, Any]
) -> str:
    inner = settings.get(section) or {}
    if not isinstance(inner, Mapping):
        raise UserError(f"{section} must be a mapping of settings, got {short_repr(inner)}")
    name = inner.get(key, default)
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"{section}.{key} is {short_repr(name)}; it must be one of {', '.join(known)}"
        )
    return name


_TYPE_NAME: Final = re.compile(r"literal\[.*\]|constrained-\w+|int|float|str|bool")


def describe(error: ValidationError) -> str:
    """Return a message about the first problem in `error`; it names the setting and its value."""
    errors = error.errors()
    first = errors[0]
    # For a setting that accepts several types, pydantic reports one error per type. The last part
    # of its location `loc` is then the name of the type, not of a setting.
    parts = [str(part) for part in first["loc"]]
    fields = parts[:-1] if parts and _TYPE_NAME.fullmatch(parts[-1]) else parts
    where = ".".join(fields) or "config"
    if len(fields) < len(parts):
        found = [e["msg"] for e in errors if e["loc"][: len(fields)] == first["loc"][: len(fields)]]
        wanted = ", or ".join(message[0].lower() + message[1:] for message in found)
        return f"{where} is {short_repr(first['input'])}: {wanted}"
    if first["type"] == "extra_forbidden":
        value = short_repr(first["input"])
        return f"unknown setting {where} (value {value}){did_you_mean(where)}"
    message = (
        "it must be a mapping; write each setting as name: value below it"
        if first["type"] == "model_type"
        else first["msg"].removeprefix("Value error, ")
    )
    if first["type"] == "value_error":
        named = not first["loc"] or message.startswith(f"{where}.")
        return message if named else f"{where}: {message}"
    remedies = {"string_type": "; write it in quotes", "list_type": "; write it as [one, two]"}
    message = f"{message[0].lower()}{message[1:]}{remedies.get(first['type'], '')}"
    return f"{where} is {short_repr(first['input'])}: {message}"


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration file `path`, apply `section.setting=value` overrides, and check the
    result.

    A `path` such as `configs/NAME.yaml` that does not exist in the current directory is the file of
    that name in the installed package.

    Raises:
        UserError: If the file or a setting is invalid.
    """
    settings = read_yaml(existing(Path(path)))
    if _EXPLICIT in settings:
        return load_run_config(path, overrides)
    return build_config(merge(settings, _changes(overrides)))


def load_simulation(path: Path | str, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Read a simulation file, apply `section.setting=value` overrides, and check the result.

    `path` may also be the file of a run; the section `simulate` then has its defaults.
    """
    return build_simulation(read_settings(path, overrides))


def read_settings(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a file with `overrides`, without checking them."""
    return merge(read_yaml(existing(Path(path))), _changes(overrides))


def _changes(overrides: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = merge(changes, parse_override(text))
    return changes


def load_run_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the config.yaml in a run directory, and apply `overrides` as if they were given at the
    run's start.

    Raises:
        UserError: If the file is not the config.yaml of a run, or a setting is invalid.
    """
    body = dict(_expanded(read_yaml(Path(path))))
    explicit = body.pop(_EXPLICIT, None)
    if not isinstance(explicit, Mapping):
        raise UserError(
            f"config file {path} is not the config.yaml of a run; it lacks `{_EXPLICIT}`"
        )
    return _with_changes(body, explicit, _changes(overrides))


def with_settings(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Apply `changes` to `config` as if its file contained them; return the checked result.

    Args:
        config: The configuration, which is not modified.
        changes: Values by dotted setting. Paths may be `Path` objects, and paths of Python files
            are relative to the current directory.

    Raises:
        UserError: If a setting is invalid.
    """
    try:
        plain = anchored(json.loads(json.dumps(changes, default=os.fspath)), Path.cwd())
    except (TypeError, ValueError) as error:
        raise UserError(f"settings are text, numbers, lists and mappings: {error}") from error
    nested: dict[str, Any] = {}
    for name, value in plain.items():
        nested = merge(nested, _nested(name, value))
    # Leave out values that are not set, because changes may imply other defaults: `task.path`, for
    # example, implies `task.kind`.
    body = config.model_dump(mode="json", exclude_unset=True)
    return _with_changes(body, config.explicit, nested)


def _with_changes(
    body: Mapping[str, Any], explicit: Mapping[str, Any], changes: Mapping[str, Any]
) -> RunConfig:
    """Apply `changes` to the settings of a run; return the checked result.

    Args:
        body: The run's settings with their resolved values. A setting that is left out has its
            default.
        explicit: The settings that a file, the command line or Python has set.
        changes: The new settings, which are explicit too.
    """
    changes = _expanded(changes)
    wanted = merge(_expanded(explicit), changes)
    old, new = (build_config(settings).model_dump(mode="json") for settings in (explicit, wanted))
    # Settings that do not change keep the run's values, some of which were derived from the machine
    # at its start. `changes` are merged again at the end, because a setting that is now set to its
    # default is equal in `old` and `new`, although the run may have derived another value.
    resolved = merge(merge(body, _changed(old, new)), changes)
    return build_config({**resolved, _EXPLICIT: wanted})


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `new` whose values differ from those in `old`, as a nested mapping."""
    return {
        key: _changed(old[key], value)
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping)
        else value
        for key, value in new.items()
        if key not in old or old[key] != value
    }


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """Return `section.setting OLD → NEW` for every setting that differs. For the secret
    `engines.api_key`, return only its name."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    return [
        name if name == "engines.api_key" else f"{name} {old.get(name)} → {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML: the value of every setting, defaults included, and
    under the key `explicit` the settings that a file, the command line or Python has set."""
    content = {**config.model_dump(mode="json"), _EXPLICIT: config.explicit}
    return yaml.safe_dump(content, sort_keys=False)
