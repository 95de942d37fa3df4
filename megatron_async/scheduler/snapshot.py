"""Saves the whole state of a scheduler as JSON types, and restores a scheduler from it.

A record that begins in the middle of a run starts with such a snapshot (`record.py`). It is derived
from the attributes of the objects: a new field of a class is in the snapshot without further code,
and a value of an unsupported type raises an error at once.

Invariants
- A scheduler that was restored from a snapshot reacts to every further event as the saved one.
- A snapshot of code whose classes have other fields is refused with a message that names them.
- Only classes of the scheduler's own modules, and two enums, are ever created from a snapshot.
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
    if isinstance(module, ModuleType)  # The modules that importing `Scheduler` has imported.
    for name, item in vars(module).items()
    if isinstance(item, type) and item.__module__ == module.__name__
}
_PLAIN: Final = frozenset({type(None), bool, int, float})
_REF, _ENUM, _TEXT, _CONFIG = "@!'%"
"""First character of strings that stand for a reference, an enum member, a text or the config.

Text costs the least time and bytes this way."""
_CONTAINERS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "version": PolicyVersion._make,
}


def _fields(cls: type) -> list[str]:
    """Return the names of the fields that a dataclass or a Struct declares; none for other
    classes."""
    return list(getattr(cls, "__match_args__", ()))


class _Freezer:
    """Converts an object and all objects that it refers to into JSON types.

    Objects are numbered in the order in which they are found, and a reference is the object's
    number.
    """

    def __init__(self) -> None:
        self._queue: list[object] = []
        self._known: dict[int, str] = {}
        self.classes: dict[str, list[str]] = {}

    def objects(self, root: object) -> list[list[Any]]:
        self._value(root)
        # `_values` adds objects that it finds to the queue, so the queue grows during this loop.
        return [self._values(item) for item in self._queue]

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
            raise TypeError(f"{value!r} is not part of a scheduler's state")
        if isinstance(value, enum.Enum):
            text = f"{_ENUM}{cls.__name__}.{value.name}"
        else:
            text = f"{_REF}{len(self._queue)}"
            self._queue.append(value)
        self._known[id(value)] = text
        return text


def freeze(scheduler: Scheduler) -> dict[str, Any]:
    """Return a snapshot of the scheduler's state, which consists of JSON types."""
    freezer = _Freezer()
    objects = freezer.objects(scheduler)
    return {"classes": freezer.classes, "objects": objects}


class _Thawer:
    """Converts the JSON types of a snapshot back into values; references refer to the objects in
    `made`."""

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
    """Put a new scheduler, which has the same configuration, into the state of a snapshot.

    Raises:
        UserError: If the snapshot is of code whose classes have other fields.
    """
    expected = {name: _fields(cls) for name, cls in _CLASSES.items()}
    expected |= freeze(scheduler)["classes"]
    for name, names in snapshot["classes"].items():
        if expected.get(name) != names:
            raise UserError(
                f"the {name} of its snapshot has the fields {names}, but the one of this program "
                f"has {expected.get(name)}. Replay it with the program that wrote it."
            )
    made: list[Any] = [scheduler]
    value = _Thawer(scheduler.config, made).value
    for name, *values in snapshot["objects"][1:]:
        # Structs are complete at once, because no field of a Struct refers to another object. Other
        # objects may refer to later ones, so their fields are set when all objects exist.
        cls = _CLASSES[name]
        made.append(cls(*map(value, values)) if issubclass(cls, Struct) else object.__new__(cls))
    for item, (name, *values) in zip(made, snapshot["objects"], strict=True):
        if not isinstance(item, Struct):
            for attribute, data in zip(snapshot["classes"][name], values, strict=True):
                object.__setattr__(item, attribute, value(data))
