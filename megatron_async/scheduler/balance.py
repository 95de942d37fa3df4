"""Chooses an engine for each trajectory: the least loaded one (its running trajectories fill the
smallest share of its KV cache), one that already runs members of the trajectory's group, so that
they share the KV cache of their prompt, or the one that ran the last turn of the episode.

Invariants
- Only engines that have loaded the current version and may run one more request are chosen.
- The load of an engine is the number of tokens of its running trajectories, divided by the capacity
  of its KV cache. The prompt of a group counts once, because its members share the KV cache of the
  prompt.
- The next turn of an episode runs on the engine of its last turn, which still has the episode's
  tokens in its KV cache, under two conditions: the weights are the same as in the last turn, and
  the engine has at most as many tokens more than the least loaded engine as the episode has.
- Between engines with equal loads, the one with fewer running requests is chosen, and then the one
  that came up first, so the choice is deterministic.
"""

import heapq
from collections.abc import Iterable

from megatron_async.scheduler.events import EngineUp
from megatron_async.scheduler.state import EngineEntry, TrajectoryEntry
from megatron_async.trajectory.types import PolicyVersion


class ServingEngines:
    """The engines that are up, and the trajectories that run on each."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineEntry] = {}
        self.in_flight = 0
        self._serving: tuple[PolicyVersion, dict[str, EngineEntry]] | None = None
        self._arrivals = 0

    def add(self, event: EngineUp) -> None:
        """Add an engine that has come up, with nothing running."""
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
        """Remove an engine; return the trajectories that ran on it, in order of submission."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return []
        self._serving = None
        orphans = list(engine.running.values())
        for entry in orphans:
            self.release(entry)
        return orphans

    def published(self, version: PolicyVersion) -> None:
        """Record that every engine that is up serves `version` from now on."""
        self._serving = None
        for engine in self.engines.values():
            engine.version = version

    def _of_version(self, version: PolicyVersion) -> dict[str, EngineEntry]:
        """Return the engines that have loaded `version`, by name. The result is cached until an
        engine comes up, goes down or loads another version."""
        if self._serving is None or self._serving[0] != version:
            loaded = {
                name: engine for name, engine in self.engines.items() if engine.version == version
            }
            self._serving = (version, loaded)
        return self._serving[1]

    def request_limit(self) -> int | None:
        """Return the largest number of requests that all engines together run at once; None if
        unlimited."""
        limits = [engine.max_running for engine in self.engines.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known and len(known) == len(limits) else None

    def kv_capacity(self) -> int:
        """Return the total capacity of the KV caches of all engines in tokens."""
        return sum(engine.kv_capacity for engine in self.engines.values())

    def free_requests(self, version: PolicyVersion) -> int | None:
        """Return how many more requests the engines that have loaded `version` may run; None if one
        of them has no limit."""
        total = 0
        for engine in self._of_version(version).values():
            if engine.max_running is None:
                return None
            total += max(0, engine.max_running - len(engine.running))
        return total

    def placement(self, version: PolicyVersion, concurrency: int) -> "Placement":
        """Return a `Placement`, which chooses engines for the next submissions. It may be used only
        until the load of an engine changes for another reason than these submissions."""
        return Placement(self._of_version(version), concurrency, version.number)

    def occupy(self, entry: TrajectoryEntry, engine: EngineEntry) -> None:
        """Record that trajectory `entry` runs on `engine`."""
        group, engine_id = entry.group, engine.engine_id
        engine.running[entry.trajectory_id] = entry
        entry.engine = engine
        count = group.serving.get(engine_id, 0)
        group.serving[engine_id] = count + 1
        stored = entry.tokens + entry.extra_context_tokens
        engine.kv_tokens += stored if count else stored + group.spec.prompt_tokens
        self.in_flight += 1

    def release(self, entry: TrajectoryEntry) -> None:
        """Record that the request of trajectory `entry` has ended; do nothing if it has no
        request."""
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
    """Chooses engines for consecutive submissions, between which nothing else changes.

    Engines are in a heap by their load, and the loads in the heap are not updated at each
    submission. During consecutive submissions the load of an engine only grows, so an outdated item
    is never too far back in the heap. It is corrected when it reaches the front. Creating a
    placement costs O(engines), and each choice O(log engines).
    """

    def __init__(self, serving: dict[str, EngineEntry], concurrency: int, number: int) -> None:
        """Create a placement.

        Args:
            serving: The engines that have loaded the current version, by name.
            concurrency: Largest number of requests in flight (N').
            number: Policy number of the version that the engines have loaded.
        """
        self._number = number
        self._serving = serving
        self._concurrency = concurrency
        self._heap = [
            (engine.kv_tokens / engine.kv_capacity, len(engine.running), engine.index, engine)
            for engine in serving.values()
            if engine.max_running is None or engine.has_free_request
        ]
        heapq.heapify(self._heap)

    def choose(self, entry: TrajectoryEntry) -> EngineEntry:
        """Return the engine on which trajectory `entry` should run.

        This is the least loaded engine, with two exceptions. The next turn of an episode may stay
        on the engine of its last turn (`_keeps`). An engine that already runs members of the
        trajectory's group is preferred if it runs less than its equal share of N' (the largest
        number of requests in flight), and if it has at most as many tokens more than the least
        loaded engine as the shared prompt saves.

        Raises:
            IndexError: No engine may run one more request.
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
        """Return whether the next turn of an episode should run on `last_engine`, where its last
        turn ran and left its tokens in the KV cache.

        The engine must serve the policy version that made the episode's newest tokens and have a
        free request. It may have at most as many tokens more than the least loaded engine `best` as
        the episode has.
        """
        if (
            self._serving.get(last_engine.engine_id) is not last_engine
            or not last_engine.has_free_request
        ):
            return False
        near = _surplus(last_engine, best) <= entry.tokens + entry.extra_context_tokens
        return near and entry.newest == self._number

    def _least_loaded(self) -> EngineEntry:
        heap = self._heap
        while True:
            _, running, _, engine = heap[0]
            # The load in this heap item is current, because the number of running requests has not
            # changed since.
            if len(engine.running) == running:
                return engine
            if engine.max_running is None or engine.has_free_request:
                load = engine.kv_tokens / engine.kv_capacity
                heapq.heapreplace(heap, (load, len(engine.running), engine.index, engine))
            else:
                heapq.heappop(heap)

    def _least_loaded_of(self, engine_ids: Iterable[str]) -> EngineEntry | None:
        """Return the least loaded of those named engines that have the current version and may run
        one more request; None if there is none."""
        found = [
            engine
            for i in engine_ids
            if (engine := self._serving.get(i)) and engine.has_free_request
        ]
        return min(found, key=_key, default=None)


def _surplus(engine: EngineEntry, best: EngineEntry) -> float:
    """Return how many tokens more `engine` has than it would have with the same load as `best`. The
    load is the number of tokens divided by the capacity of the KV cache."""
    return engine.kv_tokens - best.kv_tokens / best.kv_capacity * engine.kv_capacity


def _key(engine: EngineEntry) -> _Key:
    """Return a sort key that puts the least loaded engine first; `index` makes keys unique."""
    return (engine.kv_tokens / engine.kv_capacity, len(engine.running), engine.index)
