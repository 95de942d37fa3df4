"""Runs the scheduler of real runs on a virtual clock, with cost models for engines, scorers and
trainer.

`World` does the work that `rollout/driver.py` and the training loop do in a real run: it carries
out the scheduler's actions and reports events to it.

Invariants
- Events reach the scheduler one at a time in order of virtual time. Events that follow from an
  action without delay are reported before the clock moves.
- The trainer receives batch n after it has published version n, as in a real run. With
  `simulate.background_publication`, it receives batch n when it has copied version n to host
  memory. It starts to copy a version when the one before is published.
- A simulated run is a function of its settings: it reads no real clock and uses no random numbers
  except those of the group source and the episode source.
- Responses are scored in the order in which they finished, each by one scorer for
  `simulate.reward.scorer_seconds`. All scorers share one queue.
- The length of the queue determines the number of scorers, by the rule that real runs use
  (`scoring.autoscale`). Starting or ending a scorer takes no time.
- An environment takes as long for a reply as the episode source has drawn, and other trajectories
  do not wait for it.
"""

import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.config.simulate import SimulateConfig
from megatron_async.errors import ComponentFailure
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.scoring import autoscale as scorer_count
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.simulate.engine import Engine, SimulatedRequest, Tokens
from megatron_async.simulate.episodes import EpisodeSource, Response
from megatron_async.simulate.lengths import GroupSource
from megatron_async.simulate.statistics import Statistics, StepRow
from megatron_async.simulate.trainer_costs import TrainerCosts
from megatron_async.trajectory.types import PolicyVersion


class SimulatedScorers:
    """Queue of responses that wait for a score, and the number of busy scorers. The caller has the
    clock and calls `ended` when a scorer has finished."""

    def __init__(self, most: int, seconds: float) -> None:
        self.seconds = seconds
        self.state = scorer_count.scored(ScorerCount(most), seconds)
        self._queue: deque[int] = deque()
        self._busy = 0

    def add(self, trajectory_id: int, now: float) -> list[int]:
        """Queue the finished response of a trajectory; return the ids of the trajectories whose
        scoring starts now."""
        self._queue.append(trajectory_id)
        return self._start_waiting(now)

    def ended(self, now: float) -> list[int]:
        """Mark one scorer as free; return the ids of the trajectories whose scoring starts now."""
        self._busy -= 1
        return self._start_waiting(now)

    def _start_waiting(self, now: float) -> list[int]:
        unscored = len(self._queue) + self._busy
        self.state = scorer_count.queued(self.state, unscored, now)
        started = []
        while self._queue and self._busy < self.state.count:
            self._busy += 1
            started.append(self._queue.popleft())
        return started


_COLLECT_EVERY = 200_000
"""Number of new objects between two searches for cyclic garbage. With Python's default of 700, the
searches took about 15 % of the time under `copris` (measured with perf), because thousands of
objects live from one step boundary to the next."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make Python's cyclic garbage collection rare in this block, because each step boundary
    creates and frees thousands of objects at once."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class World:
    """Simulated run: the real scheduler, with engines, scorers, environments and trainer on a
    virtual clock."""

    def __init__(
        self,
        schedule: ScheduleConfig,
        settings: SimulateConfig,
        *,
        engines: list[Engine],
        max_scorers: int,
        trainer: TrainerCosts,
        source: GroupSource,
        episodes: EpisodeSource | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._episodes = episodes
        self._schedule = schedule
        self._settings = settings
        self._engines = {engine.engine_id: engine for engine in engines}
        self._scorers = SimulatedScorers(max_scorers, settings.reward.scorer_seconds)
        self._trainer = trainer
        self._source = source
        self._recorder = recorder
        self.scheduler = Scheduler(schedule, first_step=0, version=PolicyVersion(0, 0))
        self._responses: dict[int, Response] = {}
        self._next_group = 0
        self.now = 0.0
        self._serial = itertools.count()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._events: deque[ev.Event] = deque()
        self._dirty: dict[str, Engine] = {}
        self._batches: deque[tuple[int, list[int]]] = deque()
        self._trainer_busy = False
        self._sending = False
        self._copy_waits: int | None = None
        self._idle_since = 0.0
        self._version = 0
        self._pending = 0
        self._update_starts: dict[int, float] = {}
        self.statistics = Statistics(engines)
        self._in_bulk: dict[type, Callable[[Any], None]] = {
            ev.Submit: self._submit,
            ev.Abort: self._abort,
        }
        self._one_by_one: dict[type, Callable[[Any], None]] = {
            ev.StartEpisode: self._ask_environment,
            ev.StepEnvironment: self._ask_environment,
            ev.Score: self._score,
            ev.Restart: self._restart,
            ev.Drop: self._drop,
            ev.RequestPrompts: self._supply_prompts,
            ev.EmitBatch: self._emit,
            ev.PauseEngines: self._pause,
            ev.AllowUpdate: self._allow_update,
            ev.ResumeEngines: self._resume,
            ev.Warn: self._warn,
        }

    def run(self, steps: int) -> None:
        """Simulate until policy version `steps` is published, that is, for `steps` training steps.

        Raises:
            ComponentFailure: The schedule is stuck: no event is pending, so time cannot advance.
        """
        first = PolicyVersion(0, 0)
        engines = self._engines.values()
        up = [
            ev.EngineUp(e.engine_id, first, e.costs.kv_capacity_tokens, e.max_running)
            for e in engines
        ]
        self._events.append(ev.EnginesUp(tuple(up)))
        self._later(self._settings.load_report_seconds, self._report_load)
        events, step = self._events, self._step()
        with rare_collections():
            while self._version < steps:
                if events:
                    event = events.popleft()
                    actions = step(event)
                    if actions:
                        self._carry_out(actions)
                elif self._dirty:
                    self._settle_engines()
                else:
                    self._move_clock()

    @property
    def scorers(self) -> ScorerCount:
        """State of the rule that determines the number of scorers, including their present
        number."""
        return self._scorers.state

    def _step(self) -> Callable[[ev.Event], list[ev.Action]]:
        """Return the scheduler's `step` function, or a function that also records each step if
        there is a recorder."""
        if self._recorder is None:
            return self.scheduler.step
        return partial(self._recorder.step, self.scheduler)

    def _carry_out(self, actions: Iterable[ev.Action]) -> None:
        """Carry out the scheduler's actions in order; consecutive submissions are carried out
        together, and so are consecutive aborts."""
        for kind, same in itertools.groupby(actions, type):
            if kind in self._in_bulk:
                self._in_bulk[kind](list(same))
            else:
                for action in same:
                    self._one_by_one[kind](action)

    def _move_clock(self) -> None:
        if not self._pending and len(self._agenda) <= 1:
            raise ComponentFailure(
                f"the simulated schedule is stuck at step {self._version}: no request, score, "
                f"training or environment is pending; {self.scheduler.view()}"
            )
        when, _, action, arguments = heapq.heappop(self._agenda)
        if self.scheduler.waits_for_trainer:
            self.statistics.waiting_seconds += when - self.now
        self.now = when
        action(*arguments)

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._agenda, (when, next(self._serial), action, arguments))

    def _later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + delay, action, *arguments)

    # ------------------------------------------------------------ engines

    def _touch(self, engine: Engine) -> None:
        if engine.now != self.now:
            engine.advance(self.now)
        self._dirty[engine.engine_id] = engine

    def _settle_engines(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for engine in dirty.values():
            engine.admit()
            when = engine.forecast()
            if when is not None:
                self._at(when, self._engine_event, engine, engine.stamp)

    def _engine_event(self, engine: Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        self._touch(engine)
        for request in engine.completed():
            self._report_tokens(request, engine.take_tokens(request))
            self._pending -= 1
            if self._episodes is None:
                self._events.append(ev.Finished(request.trajectory_id))
            else:
                engine.cache_turn(request)
                self._events.append(ev.TurnEnded(request.trajectory_id))
        for request, written in engine.preempt():
            self._report_tokens(request, written)
        if engine.report_due():
            for request in engine.running.values():
                self._report_tokens(request, engine.take_tokens(request))

    def _report_tokens(self, request: SimulatedRequest, written: Tokens) -> None:
        trajectory_id = request.trajectory_id
        arrival = _arrival(trajectory_id, written)
        for index in range(1, len(arrival), 2):
            arrived = ev.TokensArrived(trajectory_id, arrival[index], arrival[index + 1])
            self._events.append(arrived)

    def _report_load(self) -> None:
        for engine in self._engines.values():
            self._touch(engine)
            usage = min(1.0, engine.kv / engine.costs.kv_capacity_tokens)
            preemptions = self.statistics.new_preemptions(engine)
            self._events.append(ev.EngineLoad(engine.engine_id, usage, preemptions))
        self._later(self._settings.load_report_seconds, self._report_load)

    # ------------------------------------------------------------ actions

    def _submit(self, actions: Sequence[ev.Submit]) -> None:
        for engine_id in dict.fromkeys(action.engine_id for action in actions):
            self._touch(self._engines[engine_id])
        engines, responses = self._engines, self._responses
        for action in actions:
            engines[action.engine_id].submit(responses[action.trajectory_id])
        self._pending += len(actions)

    def _abort(self, actions: Sequence[ev.Abort]) -> None:
        """End requests on their engines, and report the tokens that they had generated since the
        last report to the scheduler.

        A request that is not on its engine any more has finished at the present time. It is
        skipped, because the event of its end is queued already.
        """
        ended: list[tuple[int, ...]] = []
        for engine_id, same in itertools.groupby(actions, attrgetter("engine_id")):
            engine = self._engines[engine_id]
            self._touch(engine)
            ended += itertools.starmap(
                _arrival, engine.cancel(action.trajectory_id for action in same)
            )
        if ended:
            self._pending -= len(ended)
            self._events.append(ev.ManyAborted(tuple(ended)))

    def _ask_environment(self, action: ev.StartEpisode | ev.StepEnvironment) -> None:
        response = self._responses[action.trajectory_id]
        response.call += 1
        self._pending += 1
        self._later(response.tool_seconds, self._environment_replied, response, response.call)

    def _environment_replied(self, response: Response, call: int) -> None:
        """Start the next turn of an episode, or end the episode, after the environment has replied
        to the call with the number `call`. Ignore the reply if the episode was dropped or restarted
        after the call."""
        self._pending -= 1
        number = response.trajectory_id
        if self._responses.get(number) is not response or response.call != call:
            return
        capacity = min(engine.costs.kv_capacity_tokens for engine in self._engines.values())
        if response.next_turn(capacity):
            self._events.append(ev.EnvironmentReady(number, response.before))
        else:
            self._events.append(ev.EpisodeEnded(number))

    def _score(self, action: ev.Score) -> None:
        self._pending += 1
        self._start_scores(self._scorers.add(action.trajectory_id, self.now))

    def _start_scores(self, trajectory_ids: Iterable[int]) -> None:
        for trajectory_id in trajectory_ids:
            self._later(self._scorers.seconds, self._scored, trajectory_id)

    def _scored(self, trajectory_id: int) -> None:
        self._pending -= 1
        response = self._responses[trajectory_id]
        response.rewarded = self._version
        self._events.append(ev.RewardReady(trajectory_id, response.reward))
        self._start_scores(self._scorers.ended(self.now))

    def _restart(self, action: ev.Restart) -> None:
        response = self._responses[action.trajectory_id]
        self.statistics.wasted(response.generated)
        response.restart()

    def _drop(self, action: ev.Drop) -> None:
        self.statistics.wasted(self._responses.pop(action.trajectory_id).generated)
        self.statistics.dropped[action.reason.value] += 1

    def _supply_prompts(self, action: ev.RequestPrompts) -> None:
        specs = []
        prompt = self._settings.lengths.prompt_tokens
        size = self._schedule.group_size
        for _ in range(action.count):
            number = self._next_group
            self._next_group += 1
            lengths, rewards = self._source.group(number)
            if self._episodes is None:
                self.statistics.sampled.extend(lengths)
            ids = tuple(range(number * size, (number + 1) * size))
            for trajectory_id, length, reward in zip(ids, lengths, rewards, strict=True):
                self._responses[trajectory_id] = Response(
                    trajectory_id, number, prompt, 0, length, reward=reward
                )
            if self._episodes is not None:
                for trajectory_id, plan in zip(ids, self._episodes.group(number), strict=True):
                    self._responses[trajectory_id].plan = plan
            specs.append(ev.GroupSpec(number, ids, prompt))
        self._events.append(ev.PromptsAvailable(tuple(specs)))

    def _warn(self, action: ev.Warn) -> None:
        self.statistics.warnings[action.name] = action.message

    # ------------------------------------------------------------ trainer and weights

    def _emit(self, action: ev.EmitBatch) -> None:
        size = self._schedule.group_size
        groups = [
            [self._responses.pop(number) for number in range(first * size, (first + 1) * size)]
            for first in action.group_ids
        ]
        responses = [response for group in groups for response in group]
        completed = [max(r.rewarded for r in group) for group in groups for _ in group]
        written = [response.written for response in responses]
        self.statistics.batch(action.step, written, completed, action.mask_before)
        self._batches.append((action.step, [r.prompt + r.tokens for r in responses]))
        self._train_next()

    def _train_next(self) -> None:
        if self._trainer_busy or not self._batches:
            return
        step, sequences = self._batches.popleft()
        self._trainer_busy = True
        self._pending += 1
        seconds = self._trainer.batch_seconds(sequences, self._schedule.updates_per_batch)
        waited = self.now - self._idle_since
        self.statistics.rows.append(StepRow(step, len(sequences), sum(sequences), waited, seconds))
        self._update_starts[step + 1] = self.now + seconds
        self._events.append(ev.BatchTaken(step, self.now))
        until_trained = seconds + self._trainer.switch_seconds
        self._later(until_trained, self._trained, step + 1)

    def _trained(self, number: int) -> None:
        """Publish version `number`, which the trainer has made just now."""
        if not self._settings.background_publication:
            self._events.append(ev.UpdateRequested(number))
        elif self._sending:
            self._copy_waits = number
        else:
            self._sending = True
            self._later(self._trainer.copy_seconds, self._copied, number)

    def _copied(self, number: int) -> None:
        """Send version `number`, which is in host memory, and let the trainer continue."""
        requested = ev.UpdateRequested(number)
        self._later(self._trainer.background_seconds, self._events.append, requested)
        self._release_trainer()

    def _release_trainer(self) -> None:
        self._trainer_busy = False
        self._idle_since = self.now
        self._train_next()

    def _pause(self, action: ev.PauseEngines) -> None:
        for engine in self._engines.values():
            self._touch(engine)
            engine.pause(recompute=action.mode == "retract")

    def _allow_update(self, action: ev.AllowUpdate) -> None:
        self._later(self._trainer.publish_seconds, self._published, action.number)

    def _published(self, number: int) -> None:
        for engine in self._engines.values():
            self._touch(engine)
            engine.load(number)
        self._version = number
        self._pending -= 1
        self.statistics.published(
            self.now, self.now - self._update_starts.pop(number), self.scheduler.concurrency
        )
        self._events.append(ev.WeightsPublished(PolicyVersion(0, number)))
        if not self._settings.background_publication:
            self._release_trainer()
            return
        self._sending, waits, self._copy_waits = False, self._copy_waits, None
        if waits is not None:
            self._trained(waits)

    def _resume(self, action: ev.ResumeEngines) -> None:
        for engine in self._engines.values():
            self._touch(engine)
            engine.resume()


def _arrival(trajectory_id: int, written: Tokens) -> tuple[int, ...]:
    """Return the tokens of a trajectory in the form of the scheduler's event `ManyAborted`: the
    trajectory id, followed by the number of tokens and the policy number of one or two spans.

    The newest policy version has its own span. All older tokens are counted for the oldest version,
    because the scheduler does not distinguish them either.
    """
    if not written:
        return (trajectory_id,)
    version, newest = written[-1]
    if len(written) == 1:
        return trajectory_id, newest, version
    older = sum(count for _, count in written[:-1])
    return trajectory_id, older, written[0][0], newest, version
