"""Provides the random world and its oracle for trajectories that are episodes of many turns."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState
from tests.scheduler.oracle import Oracle, T
from tests.scheduler.world import Weather, World


@dataclass(frozen=True)
class EpisodeWeather(Weather):
    """Probabilities of episodes: `done` that a turn is the last one, `tools` how slow
    environments are."""

    environment_failures: float = 0.0
    done: float = 0.4
    tools: float = 0.0


@dataclass
class Life:
    """State of an episode in addition to the state of a trajectory."""

    begun: bool = False
    context: int = 0
    ended_turns: int = 0
    again: bool = False


class EpisodeOracle(Oracle):
    """World of episodes, which have the additional states asked (its environment), answered and
    failed."""

    def __init__(self, config: ScheduleConfig, first_step: int, version: PolicyVersion) -> None:
        super().__init__(config, first_step, version)
        self.lives: dict[int, Life] = {}
        self.failed_groups: set[int] = set()
        given = config.open_episodes
        self.limit = None
        if isinstance(given, int):
            self.limit = max(config.group_size, given)
        elif isinstance(config.concurrency, int):
            self.limit = max(config.group_size, 2 * config.concurrency)

    def life(self, t: T) -> Life:
        return self.lives.setdefault(t.trajectory_id, Life())

    def asked(self) -> list[T]:
        return [t for g in self.live.values() for t in g.members if t.state == "asked"]

    def open(self) -> int:
        return sum(self.life(t).begun for g in self.live.values() for t in g.members)

    def ready(self) -> list[T]:
        return [t for t in self.waiting() if self.life(t).begun]

    # ------------------------------------------------------------ events

    def event(self, event: ev.Event) -> None:
        match event:
            case ev.TurnEnded():
                t = self.trajectories[event.trajectory_id]
                t.state, t.engine, t.aborted = "answered", None, False
                self.life(t).ended_turns += 1
            case ev.EnvironmentReady():
                t = self.trajectories[event.trajectory_id]
                assert t.state == "asked"
                t.state = "waiting"
                self.life(t).context = event.context
            case ev.EpisodeEnded():
                t = self.trajectories[event.trajectory_id]
                assert t.state == "asked"
                t.state = "finished"
                self.life(t).begun = False
            case ev.EnvironmentFailed():
                t = self.trajectories[event.trajectory_id]
                t.state = "failed"
                self.life(t).again = event.again
                if not event.again or t.regenerations >= self.config.max_regenerations:
                    self.failed_groups.add(t.group.spec.group_id)
            case ev.TokensArrived():
                super().event(event)
                self.life(self.trajectories[event.trajectory_id]).context += event.count
            case ev.RecoveredEpisodes():
                contexts = dict(event.contexts)
                for group in sorted(event.groups, key=lambda g: g.group.group_id):
                    self._recovered(group)
                    for known in group.trajectories:
                        t = self.trajectories[known.trajectory_id]
                        life = self.life(t)
                        life.context = contexts.get(t.trajectory_id, 0)
                        if t.state == "waiting":
                            life.begun = bool(life.context)
                        if known.state is TrajectoryState.WAITING:
                            t.state, life.ended_turns = "answered", 1
            case _:
                super().event(event)

    # ------------------------------------------------------------ actions

    def further(self, action: ev.Action) -> None:
        match action:
            case ev.StartEpisode():
                self._begin(action)
            case ev.StepEnvironment():
                t = self.trajectories[action.trajectory_id]
                assert t.state == "answered", f"{action}: {t.state}"
                t.state = "asked"
            case _:
                super().further(action)

    def _after(self, event: ev.Event) -> None:
        for group in self.live.values():
            assert not any(t.state in ("answered", "failed") for t in group.members), (
                "a reply was not handled"
            )
        super()._after(event)

    def _begin(self, action: ev.StartEpisode) -> None:
        t = self.trajectories[action.trajectory_id]
        life = self.life(t)
        assert t.state == "waiting" and not life.begun, f"{action}: {t.state}"
        assert not t.group.dropped and t.group.step is None
        assert self.update is None, f"{action} during an update"
        assert self.config.overlap or self.version.number >= self.next_step
        assert self.version.number >= self.floor, f"{action}: its tokens would be stale at once"
        if self.limit is not None:
            assert self.open() < self.limit, "more episodes are open than open_episodes permits"
        if t.group.started is None:
            waiting = [o for o in self.waiting() if o.group.started is not None]
            assert all(self.life(o).begun for o in waiting), (
                "a group started before all members of an earlier group"
            )
            assert not self.held_back(), (
                "a new group started while finished groups fill max_waiting_batches"
            )
            self._start(t.group)
            self._may_start()
        life.begun = True
        t.state = "asked"

    def _submit(self, action: ev.Submit) -> None:
        assert self.life(self.trajectories[action.trajectory_id]).begun, action
        super()._submit(action)

    def _resumed_first(self, t: T) -> None:
        order = self.config.buffer_order

        def key(other: T) -> tuple[int, ...]:
            assert other.group.started is not None
            place = (other.group.started, other.index)
            first = -other.group.spec.priority
            if order == "oldest_first":
                return (first, *place)
            if order == "newest_first":
                return (first, -place[0], -place[1])
            return (first, -other.tokens, *place)

        best = min(self.ready(), key=key)
        assert best is t, f"{t.trajectory_id} before {best.trajectory_id} ({order})"

    def _restart(self, action: ev.Restart) -> None:
        t = self.trajectories[action.trajectory_id]
        life = self.life(t)
        state, t.state = t.state, "waiting" if t.state in ("asked", "answered") else t.state
        if state == "failed":
            assert life.again
            t.regenerations += 1
            assert t.regenerations <= self.config.max_regenerations
            t.tokens, t.oldest, t.newest, t.overtaken = 0, None, -1, False
            t.state, t.reward = "waiting", None
        else:
            super()._restart(action)
        self.lives[t.trajectory_id] = Life()

    def _drop(self, action: ev.Drop) -> None:
        t = self.trajectories[action.trajectory_id]
        if t.state in ("asked", "answered", "failed"):
            t.state = "waiting"
        self.life(t).begun = False
        group = t.group
        others = {m.drop_reason for m in group.members if m.state == "dropped"}
        if action.reason is DropReason.ENVIRONMENT and not others:
            assert group.spec.group_id in self.failed_groups, action
            t.state, t.drop_reason = "dropped", action.reason
            if all(m.state == "dropped" for m in group.members):
                del self.live[group.spec.group_id]
            return
        super()._drop(action)

    def _emit(self, action: ev.EmitBatch) -> None:
        if self.config.boundary == "drain" and not self.config.overlap:
            assert not self.open(), "a batch was emitted before the episodes ended"
        super()._emit(action)

    # ------------------------------------------------------------ after every event

    def _slots_full(self, training: bool) -> None:
        config = self.config
        if self.update is not None or training or self.version.number < self.floor:
            return
        slots = isinstance(config.concurrency, int) and len(self.running()) < config.concurrency
        if slots and self._room():
            assert not self.ready(), "slots are free, but turns wait"
        complete = len(self.complete_groups())
        draining = complete >= config.groups_per_batch or self.exhausted
        if config.boundary == "drain" and not config.overlap and draining:
            return
        if self.limit is None or self.open() >= self.limit:
            return
        idle = [t for t in self.waiting() if not self.life(t).begun]
        assert not [t for t in idle if t.group.started is not None], (
            "members of a started group have not started"
        )
        unlimited = config.max_async_level is None and config.refill == "continuous"
        if unlimited and not self.held_back():
            assert not idle, "episodes may be opened, but new groups wait"
            assert self.prompts_outstanding or self.exhausted, (
                "episodes may be opened, but no prompts were requested"
            )

    def _room(self) -> bool:
        return any(
            engine.version == self.version
            and (engine.max_running is None or len(self.running(name)) < engine.max_running)
            for name, engine in self.engines.items()
        )


class EpisodeWorld(World):
    """World of episodes: turns end, and environments answer, fail or end their episode."""

    oracle: EpisodeOracle
    weather: EpisodeWeather

    def __init__(self, config: ScheduleConfig, weather: EpisodeWeather, seed: int) -> None:
        open_episodes = config.open_episodes or "auto"
        changed = config.model_copy(update={"open_episodes": open_episodes})
        super().__init__(changed, weather, seed)

    def new_oracle(self, step: int, version: PolicyVersion) -> Oracle:
        return EpisodeOracle(self.config, step, version)

    def moves(self) -> list[str]:
        found = super().moves()
        slow = not self.calm and self.random.random() < self.weather.tools
        return [*found, *(["environment"] * 2 if self.oracle.asked() and not slow else [])]

    def end_of(self, t: T) -> ev.Event:
        return ev.TurnEnded(t.trajectory_id)

    def environment(self) -> None:
        """Let one environment answer, end its episode, or fail."""
        t = self.random.choice(self.oracle.asked())
        life = self.oracle.life(t)
        chance = self.random.random
        if chance() < (0 if self.calm else self.weather.environment_failures):
            self.send(ev.EnvironmentFailed(t.trajectory_id, chance() < 0.8))
        elif life.ended_turns and chance() < self.weather.done:
            self.send(ev.EpisodeEnded(t.trajectory_id))
        else:
            context = life.context + self.random.randint(1, 9)
            self.send(ev.EnvironmentReady(t.trajectory_id, context))

    def recovery(self, found: list[ev.RecoveredGroup]) -> ev.Event:
        contexts = {
            known.trajectory_id: self._contexts[known.trajectory_id]
            for group in found
            for known in group.trajectories
            if known.state in (TrajectoryState.PARTIAL, TrajectoryState.WAITING)
        }
        contexts = {i: count for i, count in contexts.items() if count}
        return ev.RecoveredEpisodes(tuple(found), tuple(contexts.items()))

    def crash(self) -> None:
        self._contexts = {i: life.context for i, life in self.oracle.lives.items()}
        super().crash()

    def stored_state(self, t: T) -> TrajectoryState:
        life = self.oracle.life(t)
        if not life.context:
            return TrajectoryState.PENDING
        if t.state == "asked":
            return TrajectoryState.WAITING
        return TrajectoryState.PARTIAL

    def _stored(self, step: int) -> list[ev.RecoveredGroup]:
        found = super()._stored(step)
        return [
            ev.RecoveredGroup(g.group, tuple(map(self._as_stored, g.trajectories))) for g in found
        ]

    @staticmethod
    def _as_stored(known: ev.RecoveredTrajectory) -> ev.RecoveredTrajectory:
        if known.state is not TrajectoryState.RUNNING:
            return known
        return ev.RecoveredTrajectory(
            known.trajectory_id,
            TrajectoryState.PARTIAL,
            known.response_tokens,
            known.oldest_version,
            known.reward,
            known.newest_version,
            known.drop_reason,
        )
