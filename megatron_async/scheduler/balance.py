"""Choice of an engine for a trajectory: fewest KV tokens, with prefix affinity for groups.

Invariants
- Only engines that hold the current version and have room are chosen.
- An engine's load counts the prompt of a group once (the engines share prefixes) and what else it
  holds of every running trajectory.
- An episode's next turn prefers the engine of the last one, which has its prefix in the cache,
  while weights are the same and the surplus load is not above what that saves.
- Ties are broken by running requests and then by order of arrival: the choice is deterministic.
"""

import heapq
from collections.abc import Iterable

from megatron_async.scheduler.events import EngineUp
from megatron_async.scheduler.state import EngineEntry, TrajectoryEntry
from megatron_async.trajectory.types import PolicyVersion


class ServingEngines:
    """The engines that are up and what runs on each."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineEntry] = {}
        self.in_flight = 0
        self._serving: tuple[PolicyVersion, dict[str, EngineEntry]] | None = None
        self._arrivals = 0

    def add(self, event: EngineUp) -> None:
        """A new engine, idle."""
        self._arrivals += 1
        self._serving = None
        self.engines[event.engine_id] = EngineEntry(
            event.engine_id,
            self._arrivals,
            event.version,
            max(1, event.kv_capacity_tokens),
            event.max_running,
        )

    def remove(self, engine_id: str) -> list[TrajectoryEntry]:
        """Take an engine out; returns what ran there, in order of submission."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return []
        self._serving = None
        orphans = list(engine.running.values())
        for entry in orphans:
            self.release(entry)
        return orphans

    def published(self, version: PolicyVersion) -> None:
        """Every engine that is up holds `version`."""
        self._serving = None
        for engine in self.engines.values():
            engine.version = version

    def _of_version(self, version: PolicyVersion) -> dict[str, EngineEntry]:
        """Engines that hold `version` by name; kept until engines or versions change."""
        if self._serving is None or self._serving[0] != version:
            holding = {
                name: engine for name, engine in self.engines.items() if engine.version == version
            }
            self._serving = (version, holding)
        return self._serving[1]

    def request_limit(self) -> int | None:
        """Requests that all engines run at once at most; None = no limit known."""
        limits = [engine.max_running for engine in self.engines.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known and len(known) == len(limits) else None

    def kv_capacity(self) -> int:
        """Tokens that the KV caches of all engines hold together."""
        return sum(engine.kv_capacity for engine in self.engines.values())

    def room(self, version: PolicyVersion) -> int | None:
        """Requests that engines of `version` can still take; None = no limit."""
        total = 0
        for engine in self._of_version(version).values():
            if engine.max_running is None:
                return None
            total += max(0, engine.max_running - len(engine.running))
        return total

    def placement(self, version: PolicyVersion, concurrency: int) -> "Placement":
        """Return the order of engines for the next submissions; made anew after any other event."""
        return Placement(self._of_version(version), concurrency, version.number)

    def occupy(self, entry: TrajectoryEntry, engine: EngineEntry) -> None:
        """`entry` runs on `engine` from now on."""
        group, engine_id = entry.group, engine.engine_id
        engine.running[entry.trajectory_id] = entry
        entry.engine = engine
        count = group.serving.get(engine_id, 0)
        group.serving[engine_id] = count + 1
        held = entry.tokens + entry.extra_context_tokens
        engine.kv_tokens += held if count else held + group.spec.prompt_tokens
        self.in_flight += 1

    def release(self, entry: TrajectoryEntry) -> None:
        """The request of `entry` has ended."""
        engine = entry.engine
        if engine is None:
            return
        group, engine_id = entry.group, engine.engine_id
        del engine.running[entry.trajectory_id]
        count = group.serving.pop(engine_id) - 1
        if count:
            group.serving[engine_id] = count
            engine.kv_tokens -= entry.tokens + entry.extra_context_tokens
        else:
            engine.kv_tokens -= entry.tokens + entry.extra_context_tokens + group.spec.prompt_tokens
        entry.engine = None
        if entry.begun:
            entry.last_engine = engine
        entry.abort_sent = False
        self.in_flight -= 1


_Key = tuple[float, int, int]


class Placement:
    """Chooses engines for submissions that follow each other with nothing in between.

    An engine only gets fuller meanwhile, so a place in the heap that is out of date is too early,
    never too late: it is brought up to date when it surfaces. O(engines) once, then O(log engines)
    for each submission.
    """

    def __init__(self, serving: dict[str, EngineEntry], concurrency: int, number: int) -> None:
        """`number`: that of the version which they serve."""
        self._number = number
        self._serving = serving
        self._concurrency = concurrency
        self._heap = [
            (engine.kv_tokens / engine.kv_capacity, len(engine.running), engine.index, engine)
            for engine in serving.values()
            if engine.max_running is None or engine.has_room
        ]
        heapq.heapify(self._heap)

    def choose(self, entry: TrajectoryEntry) -> EngineEntry:
        """Engine for `entry`. Raises IndexError when none has room.

        An engine that serves its group already is preferred while it carries no more than its
        share of N' and the surplus load is not above what the shared prompt saves.
        """
        best, group = self._least_loaded(), entry.group
        last_engine, serving = entry.last_engine, group.serving
        if last_engine is not None and self._keeps(last_engine, entry, best):
            return last_engine
        if not serving or best.engine_id in serving:
            return best
        shared = self._least_loaded_of(serving)
        if shared is None:
            return best
        within_share = len(shared.running) * len(self._serving) < self._concurrency
        near = _surplus(shared, best) <= group.spec.prompt_tokens
        return shared if within_share and near else best

    def _keeps(self, last_engine: EngineEntry, entry: TrajectoryEntry, best: EngineEntry) -> bool:
        """Return whether an episode stays where its last turn was."""
        if self._serving.get(last_engine.engine_id) is not last_engine or not last_engine.has_room:
            return False
        near = _surplus(last_engine, best) <= entry.tokens + entry.extra_context_tokens
        return near and entry.newest == self._number

    def _least_loaded(self) -> EngineEntry:
        heap = self._heap
        while True:
            _, running, _, engine = heap[0]
            if len(engine.running) == running:  # nothing was submitted to it since
                return engine
            if engine.max_running is None or engine.has_room:
                load = engine.kv_tokens / engine.kv_capacity
                heapq.heapreplace(heap, (load, len(engine.running), engine.index, engine))
            else:
                heapq.heappop(heap)

    def _least_loaded_of(self, engine_ids: Iterable[str]) -> EngineEntry | None:
        """Return the least loaded of these engines that holds the version and has room."""
        found = [engine for i in engine_ids if (engine := self._serving.get(i)) and engine.has_room]
        return min(found, key=_key, default=None)


def _surplus(engine: EngineEntry, best: EngineEntry) -> float:
    """Tokens that it holds beyond the share that the least loaded one has."""
    return engine.kv_tokens - best.kv_tokens / best.kv_capacity * engine.kv_capacity


def _key(engine: EngineEntry) -> _Key:
    """Least loaded first; `index` makes it unique, so that engines themselves are not compared."""
    return (engine.kv_tokens / engine.kv_capacity, len(engine.running), engine.index)
