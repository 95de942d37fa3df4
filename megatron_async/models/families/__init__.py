"""Model families: one file each; every file of this folder is one.

A family file defines `FAMILY`: how its config.json becomes an `Architecture`, and its table of
names and shard rules. Adding a family is adding a file here or naming one of one's own in
`model.family` (examples/own_family); layers that are new to the trainer go to
`trainer/layer_spec.py`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron_async.errors import UserError, short_repr
from megatron_async.models.architecture import Architecture, ConfigReader, read_config_json
from megatron_async.models.shards import LayerPosition, Rule
from megatron_async.runtime.import_path import is_import_path, load_object


@dataclass(frozen=True)
class Family:
    """`model_type` as in config.json, and the two functions that know the family."""

    model_type: str
    architecture: Callable[[ConfigReader], Architecture]
    rules: Callable[[Architecture], tuple[Rule, ...]]


@cache
def families() -> dict[str, Family]:
    """Every family of this package by its `model_type`."""
    found: dict[str, Family] = {}
    for module_info in pkgutil.iter_modules(__path__):
        family: Family = importlib.import_module(f"{__name__}.{module_info.name}").FAMILY
        found[family.model_type] = family
    return found


def family_of(name: str) -> Family:
    """The family of an `Architecture.family`: a `model_type` of ours, or an import path."""
    if not is_import_path(name):
        return families()[name]
    family = load_object(name, "model.family")
    if not isinstance(family, Family):
        raise UserError(f"model.family is {name!r}, which is not a models.families.Family")
    return family


def read_architecture(model_dir: Path | str, family_path: str = "") -> Architecture:
    """The architecture of a Hugging Face model directory.

    `family_path` (`model.family`) is the import path of a family of the user's own; empty: the one
    of ours that has the `model_type`.

    Raises UserError when the directory or config.json is missing or damaged, the family is
    unknown, or the config asks for something that the family's model does not have.
    """
    raw = read_config_json(model_dir)
    where = f"model.path: {Path(model_dir) / 'config.json'}"
    if family_path:
        family = family_of(family_path)
        reader = ConfigReader(raw, family.model_type, where)
        return replace(family.architecture(reader), family=family_path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        raise UserError(
            f"model_type {short_repr(model_type)} in {model_dir}/config.json is not supported; "
            f"supported are {', '.join(sorted(families()))}, and your own by model.family"
        )
    return families()[model_type].architecture(ConfigReader(raw, model_type, where))


def rules_of(architecture: Architecture) -> tuple[Rule, ...]:
    """The table of names and shard rules of this model."""
    return family_of(architecture.family).rules(architecture)


def stage_rules(a: Architecture, stage: int = 0, stages: int = 1) -> Iterator[tuple[Rule, int]]:
    """Rules of a pipeline stage with their global layers, in the model's order; else of all stages.

    The tied head of the last stage is the embedding's copy and is left out.
    """
    rules = [rule for rule in rules_of(a) if rule.exported]
    if stage == 0:
        yield from ((rule, 0) for rule in rules if rule.place is LayerPosition.FIRST)
    size = a.num_layers // stages
    for layer in range(stage * size, (stage + 1) * size):
        yield from ((rule, layer) for rule in rules if rule.place is LayerPosition.LAYER)
    if stage == stages - 1:
        yield from ((rule, 0) for rule in rules if rule.place is LayerPosition.LAST)
