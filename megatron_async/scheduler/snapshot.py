"""The whole state of a scheduler as JSON types, and a scheduler from it.

A record that begins in the middle of a run starts with one (`record.py`). It is written by what
objects have, not by hand: a field that a class gains is in the snapshot, and one that cannot be
written fails at once.

Invariants
- A scheduler that was thawed answers every further event as the frozen one does.
- What was written by code whose classes have other fields is refused by their name.
- Only classes of the scheduler's own modules, and two enums, are ever made from a snapshot.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from msgspec import Struct

import megatron_async.scheduler
from megatron_async.config.schedule import ScheduleConfig
from megatron_async.errors import UserError
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState

_CLASSES: Final[dict[str, Any]] = {"TrajectoryState": TrajectoryState, "DropReason": DropReason} | {
    name: item
    for module in vars(megatron_async.scheduler).values()
    if isinstance(module, ModuleType)  # those that the import of `Scheduler` has brought
    for name, item in vars(module).items()
    if isinstance(item, type) and item.__module__ == module.__name__
}
_PLAIN: Final = frozenset({type(None), bool, int, float})
_REF, _ENUM, _TEXT, _CONFIG = "@!'%"
"""First letters of what is neither number nor container: text costs least, in time and bytes."""
_CONTAINERS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "version": PolicyVersion._make,
}


def _fields(cls: type) -> list[str]:
    """The fields that a dataclass or a Struct declares; another class declares none."""
    return list(getattr(cls, "__match_args__", ()))


class _Freezer:
    """Writes objects one after the other; a reference is an object's place."""

    def __init__(self) -> None:
        self._queue: list[object] = []
        self._known: dict[int, str] = {}
        self.classes: dict[str, list[str]] = {}

    def objects(self, root: object) -> list[list[Any]]:
        self._value(root)
        return [self._values(item) for item in self._queue]  # which grows while it is read

    def _values(self, item: object) -> list[Any]:
        name = type(item).__name__
        if name not in self.classes:
            self.classes[name] = _fields(type(item)) or list(vars(item))
        return [name, *(self._value(getattr(item, field)) for field in self.classes[name])]

    def _value(self, value: Any) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
        if text := self._known.get(id(value)):
            return text
        if cls is str:
            return _TEXT + value
        if cls in (list, tuple):
            return [cls.__name__, *map(self._value, value)]
        if cls is set:
            return ["set", *sorted(map(self._value, value), key=repr)]
        if cls in (dict, Counter):
            pairs = ([self._value(key), self._value(item)] for key, item in value.items())
            return [cls.__name__, *pairs]
        if cls is PolicyVersion:
            return ["version", *value]
        if cls is ScheduleConfig:
            return _CONFIG
        if _CLASSES.get(cls.__name__) is not cls:
            raise TypeError(f"{value!r} is no part of a scheduler's state")
        if isinstance(value, enum.Enum):
            text = f"{_ENUM}{cls.__name__}.{value.name}"
        else:
            text = f"{_REF}{len(self._queue)}"
            self._queue.append(value)
        self._known[id(value)] = text
        return text


def freeze(scheduler: Scheduler) -> dict[str, Any]:
    """A snapshot, of JSON types only."""
    freezer = _Freezer()
    objects = freezer.objects(scheduler)
    return {"classes": freezer.classes, "objects": objects}


class _Thawer:
    """Makes the values of objects; a reference is to one of those `made`."""

    def __init__(self, config: ScheduleConfig, made: list[Any]) -> None:
        self._config = config
        self._made = made

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            kind, *parts = data
            if kind in ("dict", "Counter"):
                return _CONTAINERS[kind](map(self.value, pair) for pair in parts)
            return _CONTAINERS[kind](map(self.value, parts))
        if not isinstance(data, str):
            return data
        mark, text = data[0], data[1:]
        if mark == _REF:
            return self._made[int(text)]
        if mark == _ENUM:
            name, member = text.split(".")
            return _CLASSES[name][member]
        return {_TEXT: text, _CONFIG: self._config}[mark]


def thaw(snapshot: dict[str, Any], scheduler: Scheduler) -> None:
    """Put a new scheduler, of the same configuration, into the state of the frozen one.

    Raises UserError for a snapshot of code whose classes have other fields.
    """
    expected = {name: _fields(cls) for name, cls in _CLASSES.items()}
    expected |= freeze(scheduler)["classes"]
    for name, names in snapshot["classes"].items():
        if expected.get(name) != names:
            raise UserError(
                f"its snapshot is of a scheduler whose {name} has the fields {names}, this "
                f"program's has {expected.get(name)}: replay it with the program that wrote it"
            )
    made: list[Any] = [scheduler]
    value = _Thawer(scheduler.config, made).value
    for name, *values in snapshot["objects"][1:]:
        cls = _CLASSES[name]  # of a Struct no part refers to another object
        made.append(cls(*map(value, values)) if issubclass(cls, Struct) else object.__new__(cls))
    for item, (name, *values) in zip(made, snapshot["objects"], strict=True):
        if not isinstance(item, Struct):
            for attribute, data in zip(snapshot["classes"][name], values, strict=True):
                object.__setattr__(item, attribute, value(data))
