"""Provides `Script`, which sends events to a scheduler and keeps its newest actions."""

from __future__ import annotations

from typing import Any, TypeVar

from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.policies import preset

A = TypeVar("A")


class Script:
    """Scheduler with group ids g, whose trajectories are 10 g, 10 g + 1, ..., and engines "a" and
    "b".

    `running` is in order of submission; the loss of an engine does not change it.
    """

    def __init__(
        self, name: str, *, engines: str = "a", first_step: int = 0, **changes: Any
    ) -> None:
        self.config = preset(name, **changes)
        self.version = PolicyVersion(0, first_step)
        self.scheduler = Scheduler(self.config, first_step=first_step, version=self.version)
        self.emitted: list[ev.Action] = []
        self.groups = 0
        self.running: list[int] = []
        for engine in engines:
            self.up(engine)

    def send(self, *events: ev.Event) -> list[ev.Action]:
        self.emitted = []
        for event in events:
            if isinstance(event, ev.Finished | ev.Aborted) and event.trajectory_id in self.running:
                self.running.remove(event.trajectory_id)
            self.emitted += self.scheduler.step(event)
        self.running += [action.trajectory_id for action in self.of(ev.Submit)]
        return self.emitted

    def up(self, engine: str, number: int | None = None, **limits: Any) -> list[ev.Action]:
        version = self.version if number is None else PolicyVersion(0, number)
        return self.send(ev.EngineUp(engine, version, 10_000, **limits))

    def spec(self, prompt_tokens: int = 10) -> ev.GroupSpec:
        first = 10 * self.groups
        self.groups += 1
        ids = tuple(range(first, first + self.config.group_size))
        return ev.GroupSpec(first // 10, ids, prompt_tokens)

    def prompts(self, count: int, **how: Any) -> list[ev.Action]:
        return self.send(ev.PromptsAvailable(tuple(self.spec(**how) for _ in range(count))))

    def tokens(self, *ids: int, count: int = 5, version: int | None = None) -> None:
        number = self.version.number if version is None else version
        self.send(*(ev.TokensArrived(t, count, number) for t in ids))

    def finish(self, *ids: int) -> list[ev.Action]:
        """Send tokens, the end and a reward of each trajectory; rewards differ within a group."""
        emitted = []
        for t in ids:
            self.tokens(t)
            emitted += self.send(ev.Finished(t), ev.RewardReady(t, float(t % 10)))
        self.emitted = emitted
        return emitted

    def publish(self, number: int) -> list[ev.Action]:
        self.version = PolicyVersion(0, number)
        return self.send(ev.WeightsPublished(self.version))

    def abort_acknowledged(self) -> list[ev.Action]:
        """Send `Aborted` for every `Abort` among the newest actions."""
        return self.send(*(ev.Aborted(a.trajectory_id) for a in self.of(ev.Abort)))

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.emitted if isinstance(action, kind)]

    def submitted(self) -> list[int]:
        return [action.trajectory_id for action in self.of(ev.Submit)]
