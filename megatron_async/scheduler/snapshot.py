"""The whole state of a scheduler as JSON types, and a scheduler from it.

A record that begins in the middle of a run starts with one (`record.py`). It is written by what
objects have, not by hand: a field that a class gains is in the snapshot, and one that cannot be
written fails at once.

Invariants
- A scheduler that was thawed answers every further event as the frozen one does.
- What was written by code whose classes have other fields is refused by their name.
- Only the classes and enums named here are ever made from a snapshot.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from operator import attrgetter
from typing import Any, Final

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.errors import UserError
from megatron_async.scheduler.auto_concurrency import AutoConcurrency, Window
from megatron_async.scheduler.balance import ServingEngines
from megatron_async.scheduler.counts import Counts
from megatron_async.scheduler.events import GroupSpec, PauseEngines
from megatron_async.scheduler.lag import LagLedger
from megatron_async.scheduler.lifecycle import Lifecycle
from megatron_async.scheduler.queues import ReadyGroups, WorkQueue
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scheduler.state import Ending, EngineEntry, GroupEntry, TrajectoryEntry
from megatron_async.scheduler.update_gate import Phase, UpdateGate
from megatron_async.scheduler.warnings import Cause, Streak, Watch
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState

_CLASSES: Final[dict[str, type]] = {
    cls.__name__: cls
    for cls in (
        Scheduler,
        ServingEngines,
        Lifecycle,
        WorkQueue,
        ReadyGroups,
        LagLedger,
        Counts,
        UpdateGate,
        Watch,
        EngineEntry,
        TrajectoryEntry,
        GroupEntry,
        GroupSpec,
        Streak,
        PauseEngines,
        AutoConcurrency,
        Window,
    )
}
_ENUMS: Final[dict[str, type[enum.Enum]]] = {
    cls.__name__: cls for cls in (TrajectoryState, DropReason, Ending, Cause, Phase)
}
_PLAIN: Final = frozenset({type(None), bool, int, float})
_REF, _ENUM, _TEXT, _CONFIG = "@!'%"
"""First letters of what is neither number nor container: text costs least, in time and bytes."""


def _names(item: object) -> list[str]:
    """The fields of an object, or of a dataclass, that make up its state."""
    if dataclasses.is_dataclass(item):
        return [field.name for field in dataclasses.fields(item)]
    return list(vars(item))


class _Freezer:
    """Writes objects one after the other; a reference is an object's place."""

    def __init__(self) -> None:
        self._queue: list[object] = []
        self._known: dict[int, str] = {}
        self._fields: dict[type, attrgetter[Any]] = {}
        self.classes: dict[str, list[str]] = {}

    def objects(self, root: object) -> list[list[Any]]:
        self._reference(root)
        known, value_of = self._known, self._value
        return [
            [
                type(item).__name__,
                *(
                    value if type(value) in _PLAIN else known.get(id(value)) or value_of(value)
                    for value in self._values(item)
                ),
            ]
            for item in self._queue  # grows while it is read
        ]

    def _values(self, item: object) -> tuple[Any, ...]:
        cls = type(item)
        if cls not in self._fields:
            names = self.classes[cls.__name__] = _names(item)
            self._fields[cls] = attrgetter(*names, names[0])  # two at least: always a tuple
        return self._fields[cls](item)[:-1]  # type: ignore[no-any-return]

    def _reference(self, item: object) -> str:
        """The place of an object that has none yet."""
        if _CLASSES.get(type(item).__name__) is not type(item):
            raise TypeError(f"{item!r} is no part of a scheduler's state")
        text = self._known[id(item)] = f"{_REF}{len(self._queue)}"
        self._queue.append(item)
        return text

    def _value(self, value: Any) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
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
        if isinstance(value, enum.Enum):
            text = self._known[id(value)] = f"{_ENUM}{cls.__name__}.{value.name}"
            return text
        return self._known.get(id(value)) or self._reference(value)


def freeze(scheduler: Scheduler) -> dict[str, Any]:
    """A snapshot, of JSON types only."""
    freezer = _Freezer()
    objects = freezer.objects(scheduler)
    return {"classes": freezer.classes, "objects": objects}


class _Thawer:
    def __init__(self, config: ScheduleConfig, made: list[object]) -> None:
        self._config = config
        self._made = made

    def value(self, data: Any) -> Any:
        if isinstance(data, str):
            return self._named(data[0], data[1:])
        if not isinstance(data, list):
            return data
        kind, *parts = data
        match kind:
            case "list":
                return [self.value(part) for part in parts]
            case "tuple":
                return tuple(self.value(part) for part in parts)
            case "set":
                return {self.value(part) for part in parts}
            case "dict" | "Counter":
                pairs = {self.value(key): self.value(item) for key, item in parts}
                return pairs if kind == "dict" else Counter(pairs)
            case "version":
                return PolicyVersion(*parts)
        raise ValueError(f"{kind!r} is no kind of value")

    def _named(self, mark: str, text: str) -> Any:
        match mark:
            case "@":
                return self._made[int(text)]
            case "!":
                name, member = text.split(".")
                return _ENUMS[name][member]
            case "'":
                return text
            case "%":
                return self._config
        raise ValueError(f"{mark!r} is no mark of a value")


def thaw(snapshot: dict[str, Any], scheduler: Scheduler) -> None:
    """Put a new scheduler, of the same configuration, into the state of the frozen one.

    Raises UserError for a snapshot of code whose classes have other fields.
    """
    dataclasses_known = filter(dataclasses.is_dataclass, _CLASSES.values())
    expected = {cls.__name__: _names(cls) for cls in dataclasses_known}
    expected |= freeze(scheduler)["classes"]
    for name, names in snapshot["classes"].items():
        if expected.get(name) != names:
            raise UserError(
                f"its snapshot is of a scheduler whose {name} has the fields {names}, this "
                f"program's has {expected.get(name)}: replay it with the program that wrote it"
            )
    made: list[object] = [scheduler]
    for name, *_ in snapshot["objects"][1:]:
        made.append(object.__new__(_CLASSES[name]))
    thawer = _Thawer(scheduler.config, made)
    for item, (name, *values) in zip(made, snapshot["objects"], strict=True):
        for attribute, data in zip(snapshot["classes"][name], values, strict=True):
            object.__setattr__(item, attribute, thawer.value(data))
