"""Model families: one file each, found by being here.

A family file defines `FAMILY`: how its config.json becomes an `Architecture`, and its table of
names and shard rules. Adding a family is adding a file (and, for an architecture that is new to
the trainer, its layers in `trainer/layer_spec.py`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_async.errors import UserError, shown
from megatron_async.models.architecture import Architecture, ConfigReader, read_config_json
from megatron_async.models.shards import Rule


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


def read_architecture(model_dir: Path | str) -> Architecture:
    """The architecture of a Hugging Face model directory.

    Raises UserError when the directory or config.json is missing or damaged, the family is
    unknown, or the config asks for something that the family's model does not have.
    """
    raw = read_config_json(model_dir)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        raise UserError(
            f"model_type {shown(model_type)} in {model_dir}/config.json is not supported; "
            f"supported are {', '.join(sorted(families()))}"
        )
    where = f"model.path: {Path(model_dir) / 'config.json'}"
    return families()[model_type].architecture(ConfigReader(raw, model_type, where))


def rules_of(architecture: Architecture) -> tuple[Rule, ...]:
    """The table of names and shard rules of this model."""
    return families()[architecture.family].rules(architecture)
