"""Finds model families: each file of this folder defines one family.

A family file defines `FAMILY`: how its config.json becomes an `Architecture`, and its table of
names and shard rules. To add a family, add a file here or name your own file in `model.family`
(examples/own_family). Layers that are new to the trainer go to `trainer/layer_spec.py`.
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
    """A model family: its `model_type` in config.json and the two functions that describe its
    models.

    Attributes:
        model_type: Value of `model_type` in config.json.
        architecture: Function that reads the architecture from a config.json.
        rules: Function that returns the table of names and shard rules of an architecture.
    """

    model_type: str
    architecture: Callable[[ConfigReader], Architecture]
    rules: Callable[[Architecture], tuple[Rule, ...]]


@cache
def families() -> dict[str, Family]:
    """Return every model family that this package defines, by its `model_type` in config.json."""
    found: dict[str, Family] = {}
    for module_info in pkgutil.iter_modules(__path__):
        family: Family = importlib.import_module(f"{__name__}.{module_info.name}").FAMILY
        found[family.model_type] = family
    return found


def family_of(name: str) -> Family:
    """Return the model family that `name` names: either the `model_type` of a family of this
    package, or the import path of a user-defined `Family`.

    Raises:
        UserError: If the import path does not lead to a `Family`.
    """
    if not is_import_path(name):
        return families()[name]
    family = load_object(name, "model.family")
    if not isinstance(family, Family):
        raise UserError(f"model.family is {name!r}, which is not a models.families.Family")
    return family


def read_architecture(model_dir: Path | str, family_path: str = "") -> Architecture:
    """Return the architecture that the config.json of a Hugging Face model directory describes.

    Args:
        model_dir: The model directory.
        family_path: Import path of a user-defined family (`model.family`); empty means the family
            of this package that has the `model_type` of config.json.

    Raises:
        UserError: If the directory or config.json is missing or damaged, the family is unknown, or
            config.json requires something that the family's model does not have.
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
            f"supported are {', '.join(sorted(families()))}, and your own family in model.family"
        )
    return families()[model_type].architecture(ConfigReader(raw, model_type, where))


def rules_of(architecture: Architecture) -> tuple[Rule, ...]:
    """Return an architecture's shard rules: how each Megatron parameter is made of Hugging Face
    tensors."""
    return family_of(architecture.family).rules(architecture)


def stage_rules(a: Architecture, stage: int = 0, stages: int = 1) -> Iterator[tuple[Rule, int]]:
    """Generate the shard rule and the layer number (in the whole model) of each parameter of a
    pipeline stage, in the model's order.

    By default the whole model is one stage. An output head that shares its weights with the
    embedding is left out.

    Args:
        a: The architecture of the model.
        stage: Number of the pipeline stage.
        stages: Number of pipeline stages.
    """
    rules = [rule for rule in rules_of(a) if rule.exported]
    if stage == 0:
        yield from ((rule, 0) for rule in rules if rule.place is LayerPosition.FIRST)
    size = a.num_layers // stages
    for layer in range(stage * size, (stage + 1) * size):
        yield from ((rule, layer) for rule in rules if rule.place is LayerPosition.LAYER)
    if stage == stages - 1:
        yield from ((rule, 0) for rule in rules if rule.place is LayerPosition.LAST)
