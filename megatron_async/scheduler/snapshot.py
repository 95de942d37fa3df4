"""Saves the whole state of a scheduler as JSON types, and restores a scheduler from it.

A file that records events from the middle of a run on starts with such a snapshot (`record.py`).
The snapshot contains all attributes of the scheduler's objects, found by reflection: a new field of
a class is in it without further code, and a value of an unsupported type raises an error at once.

Invariants
- A scheduler that was restored from a snapshot returns the same actions for all further events as
  the scheduler that was saved.
- A snapshot that was written by a version of this program whose classes have other fields is
  refused with a message that names the fields.
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
    # The modules of the package that were imported with `Scheduler`.
    if isinstance(module, ModuleType)
    for name, item in vars(module).items()
    if isinstance(item, type) and item.__module__ == module.__name__
}
_PLAIN: Final = frozenset({type(None), bool, int, float})
_REF, _ENUM, _TEXT, _CONFIG = "@!'%"
"""First character of each string that stands for a value, which says what it stands for: a
reference to an object, an enum member, a text, or the configuration.

Marking strings costs less time and fewer bytes than a JSON array for each value.
"""
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

    Objects are numbered in the order in which they are found. A reference to an object is stored as
    its number, so objects may refer to each other in cycles.
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
    """Return a snapshot of the scheduler's state that consists of JSON types only."""
    freezer = _Freezer()
    objects = freezer.objects(scheduler)
    return {"classes": freezer.classes, "objects": objects}


class _Thawer:
    """Converts the JSON types of a snapshot back into values. A reference with number n becomes the
    n-th object in `made`."""

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
    """Put `scheduler`, which is new and has the configuration of the saved scheduler, into the
    state of a snapshot.

    Raises:
        UserError: The snapshot was written by a version of this program whose classes have other
            fields.
    """
    expected = {name: _fields(cls) for name, cls in _CLASSES.items()}
    expected |= freeze(scheduler)["classes"]
    for name, names in snapshot["classes"].items():
        if expected.get(name) != names:
            raise UserError(
                f"the {name} of its snapshot has the fields {names}, but the {name} of this "
                f"program has {expected.get(name)}. Replay it with the program that wrote it."
            )
    made: list[Any] = [scheduler]
    value = _Thawer(scheduler.config, made).value
    for name, *values in snapshot["objects"][1:]:
        # Objects may refer to objects that come later, so they are created without fields here and
        # get them in the next loop. Structs are immutable and get their fields at once, which is
        # possible because no field of a Struct refers to another object.
        cls = _CLASSES[name]
        made.append(cls(*map(value, values)) if issubclass(cls, Struct) else object.__new__(cls))
    for item, (name, *values) in zip(made, snapshot["objects"], strict=True):
        if not isinstance(item, Struct):
            for attribute, data in zip(snapshot["classes"][name], values, strict=True):
                object.__setattr__(item, attribute, value(data))
