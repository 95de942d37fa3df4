"""Lists every setting of the typed models: name, type, default, range, description.

`megatron-async settings`, the reference page of the documentation and the suggestions for
misspelled settings all use this list, so that none of them can be out of date.
"""

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

from megatron_async.config.run import RunConfig
from megatron_async.config.simulate import SimulateConfig

_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
_SUGGESTIONS = 3


@dataclass(frozen=True)
class Setting:
    """One setting; `name` is its dotted name."""

    name: str
    type: str
    default: str
    range: str
    description: str
    source: str = ""
    """Note on where the default comes from, such as ` (the recipe's)`; empty if it is the default
    in the settings class."""

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    def value_in(self, settings: dict[str, Any]) -> Any:
        """Return the value of this setting in `settings`, the nested mapping of a whole
        configuration."""
        value: Any = settings
        for part in self.name.split("."):
            value = value[part]
        return value


@dataclass(frozen=True)
class Section:
    """One section of the settings, such as `engines`, with its description and its settings.

    `of_items` is true if the section describes the elements of a list or mapping of settings, or a
    part of such elements; its name then contains `[]`.
    """

    name: str
    description: str
    settings: tuple[Setting, ...]
    of_items: bool = False


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return all settings of a run in the order of `all_sections`, without the settings of list and
    mapping elements."""
    return tuple(
        setting for part in all_sections() if not part.of_items for setting in part.settings
    )


@cache
def simulation_sections() -> tuple[Section, ...]:
    """Return the sections that a simulation has in addition to those of a run."""
    return tuple(sections_of(SimulateConfig, "simulate"))


@cache
def all_sections() -> tuple[Section, ...]:
    """Return all sections of a run's settings, in the order in which the settings models declare
    them.

    The settings of the elements of a list or mapping are a section too. It follows the section that
    contains the list or mapping.
    """
    return tuple(sections_of(RunConfig))


def sections_with(defaults: dict[str, Any]) -> tuple[Section, ...]:
    """Return all sections of a run and a simulation, in which the default of each setting of a run
    is its value in `defaults`.

    Args:
        defaults: A whole configuration as a nested mapping, from which the defaults are taken. A
            default that differs from the one in the settings class gets a note about its source.
    """

    def given(setting: Setting) -> Setting:
        value = shown_value(setting.value_in(defaults))
        other = value != setting.default
        return replace(setting, default=value, source=" (the recipe's)") if other else setting

    run = (
        part if part.of_items else replace(part, settings=tuple(map(given, part.settings)))
        for part in all_sections()
    )
    return (*run, *simulation_sections())


def sections_of(
    model: type[BaseModel], name: str = "", of_items: bool = False
) -> Iterator[Section]:
    """Return the section of a settings class and the sections of all settings classes that it
    contains.

    Args:
        model: The settings class.
        name: Dotted name of the section.
        of_items: Whether the section describes elements of a list or mapping.
    """
    prefix = f"{name}." if name else ""
    settings: list[Setting] = []
    below: list[Section] = []
    for key, field in model.model_fields.items():
        inner, full = field.annotation, f"{prefix}{key}"
        if _is_model(inner):
            below += sections_of(inner, full, of_items)
            continue
        for element in filter(_is_model, get_args(inner)):
            below += sections_of(element, f"{full}[]", of_items=True)
        limits = ", ".join(filter(None, (_limit(limit) for limit in field.metadata)))
        description = " ".join((field.description or "").split())
        settings.append(Setting(full, type_text(inner), _default(field), limits, description))
    if settings:
        yield Section(name, " ".join((model.__doc__ or "").split()), tuple(settings), of_items)
    yield from below


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_text(annotation: Any) -> str:
    """Return a readable name of a setting's type, for example `int or auto` or `sync | rapid |
    ...`."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        limits = (_limit(limit) for field in arguments[1:] for limit in field.metadata)
        return f"{type_text(arguments[0])} ({', '.join(limits)})"
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in arguments)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(type_text(part) for part in arguments)
    if annotation is type(None):
        return "none"
    if _is_model(annotation):
        return "mappings"
    if arguments:
        inner = ", ".join(type_text(part) for part in arguments)
        return f"{get_origin(annotation).__name__} of {inner}"  # type: ignore[union-attr]
    return "text" if annotation is str else getattr(annotation, "__name__", str(annotation))


def _limit(limit: Any) -> str:
    for name, sign in _SIGNS:
        if hasattr(limit, name):
            return f"{sign} {getattr(limit, name)}"
    return "not empty" if hasattr(limit, "min_length") else ""


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return shown_value(field.get_default(call_default_factory=True))


def shown_value(value: Any) -> str:
    """Return the text of a value as it is written in YAML, for example `none` instead of None."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value)


def did_you_mean(unknown: str) -> str:
    """Return `; did you mean a.b or c.b?` with the settings or sections whose names are similar to
    `unknown`; return an empty string if there are none."""
    settings = list(all_settings())
    if unknown.startswith("simulate"):
        settings += [setting for part in simulation_sections() for setting in part.settings]
    names = [setting.name for setting in settings]
    names += sorted({setting.section for setting in settings} - {""})
    section, _, last = unknown.rpartition(".")
    same_last = [name for name in names if name.rpartition(".")[2] == last]
    beside = [name for name in names if name.rpartition(".")[0] == section]
    longer = [name for name in beside if unknown.startswith(f"{name}_")]
    near_beside = longer or difflib.get_close_matches(unknown, beside, n=1, cutoff=0.75)
    near = difflib.get_close_matches(unknown, names, n=1, cutoff=0.8)
    found = near_beside or (near if section else []) or same_last[:_SUGGESTIONS] or near
    return f"; did you mean {' or '.join(found)}?" if found else ""
