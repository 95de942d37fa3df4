"""Which engine serves a trajectory: least loaded by KV tokens, with prefix affinity for groups.

Invariants
- Only engines that hold the current version and have room are chosen.
- An engine's load counts the prompt of a group once (the engines share prefixes) and the response
  tokens of every running trajectory.
- Ties are broken by running requests and then by order of arrival: the choice is deterministic.
"""

from __future__ import annotations

from megatron_async.scheduler.events import EngineUp
from megatron_async.scheduler.state import EngineEntry, GroupEntry, TrajectoryEntry
from megatron_async.trajectory.types import PolicyVersion


class Fleet:
    """The engines that are up and what runs on each."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineEntry] = {}
        self.in_flight = 0
        self._arrivals = 0

    def add(self, event: EngineUp) -> None:
        """A new engine, idle."""
        self._arrivals += 1
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
        orphans = list(engine.running.values())
        for entry in orphans:
            self.release(entry)
        return orphans

    def published(self, version: PolicyVersion) -> None:
        """Every engine that is up holds `version`."""
        for engine in self.engines.values():
            engine.version = version

    def request_limit(self) -> int | None:
        """Requests that all engines run at once at most; None = no limit known."""
        limits = [engine.max_running for engine in self.engines.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known and len(known) == len(limits) else None

    def room(self, version: PolicyVersion) -> int | None:
        """Requests that engines of `version` can still take; None = no limit."""
        total = 0
        for engine in self.engines.values():
            if engine.version != version:
                continue
            if engine.max_running is None:
                return None
            total += max(0, engine.max_running - len(engine.running))
        return total

    def choose(
        self, group: GroupEntry, version: PolicyVersion, concurrency: int
    ) -> EngineEntry | None:
        """Engine for one more trajectory of `group`, or None when no engine can take it.

        An engine that serves the group already is preferred while it carries no more than its
        share of `concurrency` and the surplus load is not above what the shared prompt saves.
        """
        best = None
        best_key = (0.0, 0, 0)
        shared = None
        shared_key = (0.0, 0, 0)
        serving = 0
        for engine in self.engines.values():
            if engine.version != version:
                continue
            serving += 1
            if not engine.has_room:
                continue
            key = (engine.kv_tokens / engine.kv_capacity, len(engine.running), engine.index)
            if best is None or key < best_key:
                best, best_key = engine, key
            if engine.engine_id in group.serving and (shared is None or key < shared_key):
                shared, shared_key = engine, key
        if shared is None or best is None:
            return best
        surplus = (shared_key[0] - best_key[0]) * shared.kv_capacity
        within_share = len(shared.running) * serving < concurrency
        return shared if within_share and surplus <= group.spec.prompt_tokens else best

    def occupy(self, entry: TrajectoryEntry, engine: EngineEntry) -> None:
        """`entry` runs on `engine` from now on."""
        group = entry.group
        engine.running[entry.trajectory_id] = entry
        entry.engine = engine
        count = group.serving.get(engine.engine_id, 0)
        group.serving[engine.engine_id] = count + 1
        engine.kv_tokens += entry.tokens + (0 if count else group.spec.prompt_tokens)
        self.in_flight += 1

    def release(self, entry: TrajectoryEntry) -> None:
        """The request of `entry` has ended."""
        engine = entry.engine
        if engine is None:
            return
        group = entry.group
        del engine.running[entry.trajectory_id]
        count = group.serving.pop(engine.engine_id) - 1
        if count:
            group.serving[engine.engine_id] = count
        engine.kv_tokens -= entry.tokens + (0 if count else group.spec.prompt_tokens)
        entry.engine = None
        entry.abort_sent = False
        self.in_flight -= 1
