"""Simulates a random world around a scheduler: engines, scorer, trainer, task and crashes.

The world sends possible events to the oracle and the scheduler, and carries out the actions. All
choices come from one `random.Random`, so a run depends only on the schedule and the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.trajectory.types import PolicyVersion, TrajectoryState
from tests.scheduler.oracle import Oracle, T


@dataclass(frozen=True)
class Weather:
    """Frequencies of failures, as probabilities per event unless stated otherwise."""

    engines: int = 2
    max_running: int | None = None
    engine_failures: float = 0.0
    spontaneous_aborts: float = 0.0
    refusals: float = 0.0
    scorer_failures: float = 0.0
    crashes: float = 0.0
    regenerate: bool = False
    slow_scores: float = 0.0
    equal_rewards: float = 0.2
    late_tokens: float = 0.3
    source: int | None = None
    finish: float = 0.25


class World:
    """Random world, driven by `random_event` or by its named moves; `step` is the trainer's next
    step.

    If `recorder` is set, it records the scheduler from then on.
    """

    recorder: Recorder | None = None

    def __init__(self, config: ScheduleConfig, weather: Weather, seed: int) -> None:
        self.config = config
        self.weather = weather
        self.random = random.Random(seed)
        self.calm = False
        self.events = 0
        self.prompts_given = 0
        self.taken_at = 0.0
        self.warnings: list[str] = []
        self.held_back = 0
        self.start(0, PolicyVersion(0, 0))
        for _ in range(weather.engines):
            self.engine_up()

    def start(self, step: int, version: PolicyVersion) -> None:
        """Start a new scheduler, which only gets the groups that `recover` sends."""
        self.version = version
        self.trainer: int | None = None  # Step that the trainer works on.
        self.engine_versions: dict[str, PolicyVersion] = {}
        self.late: dict[int, int] = {}
        self.oracle = self.new_oracle(step, version)
        self.scheduler = Scheduler(self.config, first_step=step, version=version)

    def new_oracle(self, step: int, version: PolicyVersion) -> Oracle:
        return Oracle(self.config, step, version)

    # ------------------------------------------------------------ the loop

    def send(self, event: ev.Event) -> list[ev.Action]:
        """Send one event to oracle and scheduler, check the actions, and carry them out."""
        self.events += 1
        self.oracle.event(event)
        if self.recorder is None:
            actions = self.scheduler.step(event)
        else:
            actions = self.recorder.step(self.scheduler, event)
        self.oracle.actions(event, actions)
        self.warnings += [action.name for action in actions if isinstance(action, ev.Warn)]
        self.held_back += self.oracle.held_back()
        return actions

    @property
    def steps_done(self) -> int:
        """Number of versions that the trainer has made."""
        return self.version.number

    def moves(self) -> list[str]:
        """Return the moves that are possible now, except failures."""
        oracle = self.oracle
        moves = []
        running = oracle.running()
        if running and not (oracle.paused and oracle.allowed):
            moves += ["tokens", "tokens", "finish"]
        if any(t.aborted for t in running):
            moves += ["aborted", "aborted"]
        if oracle.scoring():
            moves += ["score", "score"]
        if oracle.prompts_outstanding:
            moves += ["prompts", "prompts"]
        if self.trainer is None and oracle.untaken and self.steps_done == oracle.untaken[0]:
            moves += ["take"]
        if self.trainer is not None and oracle.update is None:
            moves += ["update"]
        if oracle.allowed:
            moves += ["publish"]
        if len(self.engine_versions) < self.weather.engines:
            moves += ["engine_up"]
        if self._stale_engines() and not oracle.allowed:
            moves += ["synchronize"]
        return moves

    def random_event(self) -> bool:
        """Make one random move; return False if none is possible."""
        chance = self.random.random
        if not self.calm:
            if self.engine_versions and chance() < self.weather.engine_failures:
                self.engine_down(self.random.choice(list(self.engine_versions)))
                return True
            if chance() < self.weather.crashes:
                self.crash()
                return True
            if chance() < 0.02 and self.engine_versions:
                name = self.random.choice(list(self.engine_versions))
                self.send(ev.EngineLoad(name, chance(), self.random.randrange(4)))
                return True
        moves = self.moves()
        if not moves:
            return False
        if self.weather.slow_scores and not self.calm and chance() < self.weather.slow_scores:
            moves = [move for move in moves if move != "score"] or moves
        getattr(self, self.random.choice(moves))()
        return True

    # ------------------------------------------------------------ engines

    def _running(self, aborted: bool | None = None) -> T:
        running = [t for t in self.oracle.running() if aborted in (None, t.aborted)]
        return self.random.choice(running)

    def tokens(self) -> None:
        """Report tokens of a running trajectory, and sometimes that its engine has ended the
        request."""
        t = self._running()
        refusals = 0.0 if self.calm else self.weather.refusals
        if refusals and self.random.random() < refusals:
            self.late.pop(t.trajectory_id, None)
            self.send(ev.Refused(t.trajectory_id))
            return
        if not self.calm and self.random.random() < self.weather.spontaneous_aborts:
            self.late.pop(t.trajectory_id, None)
            self.send(ev.Aborted(t.trajectory_id))
            return
        self.report_tokens(t)

    def report_tokens(self, t: T) -> None:
        assert t.engine is not None
        version = self.late.pop(t.trajectory_id, self.engine_versions[t.engine].number)
        self.send(ev.TokensArrived(t.trajectory_id, self.random.randint(1, 9), version))

    def finish(self) -> None:
        """Finish a trajectory, also if an abort was sent to it; or report more of its tokens."""
        t = self._running()
        if self.random.random() < self.weather.finish:
            self.report_tokens(t)
            if t.state == "running":
                self.late.pop(t.trajectory_id, None)
                self.send(self.end_of(t))
        else:
            self.report_tokens(t)

    def end_of(self, t: T) -> ev.Event:
        return ev.Finished(t.trajectory_id)

    def aborted(self) -> None:
        t = self._running(aborted=True)
        if self.random.random() < 0.5:
            self.report_tokens(t)
        self.late.pop(t.trajectory_id, None)
        self.send(ev.Aborted(t.trajectory_id))

    def engine_up(self) -> None:
        """Let engines come up, with the current version or (not synchronized yet) with an older
        one."""
        names = [f"e{i}" for i in range(self.weather.engines)]
        missing = [name for name in names if name not in self.engine_versions]
        if not missing:  # No engine is missing if all came up at once.
            return
        # All engines come up at once, as after a restart.
        if len(missing) > 1 and self.random.random() < 0.5:
            self.engine_versions |= dict.fromkeys(missing, self.version)
            most = self.weather.max_running
            up = tuple(ev.EngineUp(name, self.version, 1000, most) for name in missing)
            self.send(ev.EnginesUp(up))
            return
        name, version = missing[0], self.version
        if not self.calm and version.number and self.random.random() < 0.3:
            version = PolicyVersion(version.lineage, self.random.randrange(version.number))
        self.engine_versions[name] = version
        self.send(ev.EngineUp(name, version, 1000, self.weather.max_running))

    def _stale_engines(self) -> list[str]:
        return [name for name, version in self.engine_versions.items() if version != self.version]

    def synchronize(self) -> None:
        """Send the current weights to an engine with an older version, outside of an update."""
        name = self.random.choice(self._stale_engines())
        self.engine_down(name)
        self.engine_versions[name] = self.version
        self.send(ev.EngineUp(name, self.version, 1000, self.weather.max_running))

    def engine_down(self, name: str) -> None:
        for t in self.oracle.running(name):
            self.late.pop(t.trajectory_id, None)
        del self.engine_versions[name]
        self.send(ev.EngineDown(name))

    # ------------------------------------------------------------ scorer and prompts

    def score(self) -> None:
        t = self.random.choice(self.oracle.scoring())
        reward: float | None = float(self.random.randrange(3))
        if self.random.random() < self.weather.equal_rewards:
            reward = 1.0
        if self.random.random() < self.weather.scorer_failures:
            reward = None
        regenerate = self.weather.regenerate and reward is None
        self.send(ev.RewardReady(t.trajectory_id, reward, regenerate))

    def prompts(self) -> None:
        count = self.oracle.prompts_outstanding
        if self.weather.source is not None:
            count = min(count, self.weather.source - self.prompts_given)
        specs = []
        for _ in range(count):
            first = self.prompts_given * self.config.group_size
            ids = tuple(range(first, first + self.config.group_size))
            length = self.random.randrange(1, 20)
            priority = self.random.choice([0, 0, 0, 1])
            specs.append(ev.GroupSpec(self.prompts_given, ids, length, priority))
            self.prompts_given += 1
        self.send(ev.PromptsAvailable(tuple(specs)))

    # ------------------------------------------------------------ trainer

    def take(self) -> None:
        self.trainer = self.oracle.untaken[0]
        self.taken_at += 1.0
        self.send(ev.BatchTaken(self.trainer, self.taken_at))

    def update(self) -> None:
        assert self.trainer is not None
        self.send(ev.UpdateRequested(self.trainer + 1))

    def publish(self) -> None:
        """Publish new weights to all engines; some tokens of the old version are reported later."""
        assert self.trainer is not None
        old = self.version.number
        self.version = PolicyVersion(self.version.lineage, self.trainer + 1)
        self.trainer = None
        for t in self.oracle.running():
            if self.random.random() < self.weather.late_tokens:
                self.late[t.trajectory_id] = old
        for name in self.engine_versions:
            self.engine_versions[name] = self.version
        self.send(ev.WeightsPublished(self.version))

    # ------------------------------------------------------------ crash and resume

    def crash(self) -> None:
        """Crash everything except the store and one of the last checkpoints, then resume."""
        step = max(0, self.steps_done - self.random.randrange(3))
        found = self._stored(step)
        self.start(step, PolicyVersion(self.version.lineage + 1, step))
        early = self.random.random() < 0.5
        if early:
            for _ in range(self.weather.engines):
                self.engine_up()
        self.send(self.recovery(found))
        while len(self.engine_versions) < self.weather.engines:
            self.engine_up()

    def recovery(self, found: list[ev.RecoveredGroup]) -> ev.Event:
        return ev.Recovered(tuple(found))

    def stored_state(self, t: T) -> TrajectoryState:
        """Return the stored state of a trajectory that may run."""
        return TrajectoryState.PARTIAL if t.tokens else TrajectoryState.PENDING

    def _stored(self, step: int) -> list[ev.RecoveredGroup]:
        """Return the groups that are not consumed, as the store has them, in any order.

        Their versions are policy numbers on the new lineage: a number above `step`, from which the
        new lineage starts, becomes `step`.
        """
        states = {
            "running": TrajectoryState.RUNNING,
            "scoring": TrajectoryState.FINISHED,
            "scored": TrajectoryState.SCORED,
            "batched": TrajectoryState.SCORED,
            "dropped": TrajectoryState.DROPPED,
        }
        found = []
        for group in self.oracle.groups.values():
            consumed = group.step is not None and group.step < step
            if consumed or all(t.state == "dropped" for t in group.members):
                continue
            trajectories = []
            for t in group.members:
                oldest = None if t.oldest is None else min(t.oldest, step)
                newest = min(t.newest, step) if t.tokens else None
                trajectories.append(
                    ev.RecoveredTrajectory(
                        t.trajectory_id,
                        states.get(t.state) or self.stored_state(t),
                        t.tokens,
                        oldest,
                        t.reward,
                        newest,
                        t.drop_reason,
                    )
                )
            found.append(ev.RecoveredGroup(group.spec, tuple(trajectories)))
        self.random.shuffle(found)
        return found


def play(world: World, events: int, steps: int) -> None:
    """Make `events` random moves with failures, then moves without failures for `steps` more steps.

    Raises:
        AssertionError: If no move is possible, or the trainer makes no step for many moves.
    """
    for _ in range(events):
        world.random_event()
    world.calm = True
    goal = world.steps_done + steps
    size = world.config.groups_per_batch * world.config.group_size
    in_flight = world.config.concurrency
    work = size + (in_flight if isinstance(in_flight, int) else size)
    limit = world.events + 400 * (steps + 1) * (work + 10)
    while world.steps_done < goal and not world.scheduler.finished:
        assert world.random_event(), f"deadlock: {world.scheduler.view()}"
        assert world.events < limit, f"no progress: {world.scheduler.view()}"
