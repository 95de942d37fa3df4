"""Builds `trace.json`, which shows the newest steps of a run on a time axis in Perfetto.

The trace is made afterward from files that a run writes anyway: the scheduler's recorded events
with their times, and the trainer's times in metrics.jsonl. So tracing costs a run only one reading
of the clock for each event. The trace begins with the oldest step whose events are still recorded.

Invariants
- The output is trace-event JSON: complete (X), instant (i) and metadata (M) events, with times in
  microseconds since the first event. tests/report/trace_event.schema.json describes it.
- A lane is a row of the display. Spans of one lane follow each other or are nested, because
  requests, scores and calls to environments that run at the same time have different lanes.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Exchange
from megatron_async.telemetry.metrics import TRAINER_PHASES

_TRAINER, _SCHEDULER, _SCORERS, _ENVIRONMENTS, _FIRST_ENGINE = 1, 2, 3, 4, 10
_CONTROL_LANE: Final = 0
_PAUSE_LANE: Final = 9999
_FACTS_OF_STEP: Final = (
    ("lag before the queue", "rollout/lag_before_queue_mean"),
    ("lag in the queue", "rollout/lag_in_queue_mean"),
    ("seconds in which free requests waited for the trainer", "rollout/wait_for_trainer_seconds"),
)
_SHORTEST_GAP: Final = 0.01
"""Shortest time without any request, in seconds, that is shown as an idle span of an engine."""


@dataclass
class _Lanes:
    """Assigns lanes (rows of the display) of one process of the trace to spans: always the lowest
    free lane, from 1 on.

    Lane 0 is for events that concern the whole process.
    """

    freed: list[int] = field(default_factory=list)
    used: int = 0

    def take(self) -> int:
        """Reserve the lowest free lane and return its number."""
        if self.freed:
            return heapq.heappop(self.freed)
        self.used += 1
        return self.used

    def give_back(self, lane: int) -> None:
        """Release a lane."""
        heapq.heappush(self.freed, lane)


@dataclass
class _Request:
    """A running request: the engine and the lane in which its spans are drawn, and its times (in
    seconds), tokens and policy versions so far."""

    engine: str
    lane: int
    submitted: float
    resumed: bool
    first_token: float | None = None
    queued_seconds: float | None = None
    tokens: int = 0
    versions: tuple[int, ...] = ()


@dataclass
class _Engine:
    """An engine, which the trace shows as a process with the number `pid`.

    Attributes:
        lanes: Lanes of its requests.
        running: Number of its running requests.
        idle_since: Time at which its last request ended or, before the first request, at which it
            became ready, in seconds; None while it runs requests or is down.
    """

    pid: int
    lanes: _Lanes = field(default_factory=_Lanes)
    running: int = 0
    idle_since: float | None = None


class Trace:
    """Collects the recorded events of a run's scheduler and the times of its trainer, and turns
    them into the events of a trace file."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._engines: dict[str, _Engine] = {}
        self._requests: dict[int, _Request] = {}
        self._seen: set[int] = set()
        self._paused: float | None = None
        self._update: tuple[int, float] | None = None
        self._lanes: defaultdict[int, _Lanes] = defaultdict(_Lanes)
        self._calls: dict[tuple[int, int], tuple[int, float, str]] = {}
        self._names = {_TRAINER: "trainer", _SCHEDULER: "scheduler"}
        self._names |= {_SCORERS: "scorers", _ENVIRONMENTS: "environments"}

    # ------------------------------------------------------------ the scheduler's record

    def take(self, exchange: Exchange, at: float) -> None:
        """Add an exchange to the trace: an event that the scheduler received at time `at`, and the
        actions that it returned.

        Exchanges must be added in the order of the record. `at` is in seconds.
        """
        event = exchange.event
        match event:
            case ev.EngineUp():
                self._engine_up(event.engine_id, at)
            case ev.EnginesUp():
                for engine in event.engines:
                    self._engine_up(engine.engine_id, at)
            case ev.EngineDown():
                self._engine_down(event.engine_id, at)
            case ev.TokensArrived():
                self._tokens(event.trajectory_id, event.count, event.version, at)
            case ev.LeftQueue():
                if (request := self._requests.get(event.trajectory_id)) is not None:
                    request.queued_seconds = event.waited_seconds
            case ev.ManyAborted():
                for trajectory_id, *spans in event.requests:
                    for count, version in zip(spans[::2], spans[1::2], strict=True):
                        self._tokens(trajectory_id, count, version, at)
                    self._ended(trajectory_id, "aborted", at)
            case ev.Finished():
                self._ended(event.trajectory_id, "finished", at)
            case ev.TurnEnded():
                self._ended(event.trajectory_id, "turn ended", at)
            case ev.EnvironmentReady():
                self._replied(_ENVIRONMENTS, event.trajectory_id, at, reply="ready")
            case ev.EpisodeEnded():
                self._replied(_ENVIRONMENTS, event.trajectory_id, at, reply="done")
            case ev.EnvironmentFailed():
                self._replied(_ENVIRONMENTS, event.trajectory_id, at, reply="failed")
            case ev.Aborted():
                self._ended(event.trajectory_id, "aborted", at)
            case ev.Refused():
                self._ended(event.trajectory_id, "refused", at)
            case ev.RewardReady():
                self._replied(_SCORERS, event.trajectory_id, at, reward=event.reward)
            case ev.UpdateRequested():
                self._update = (event.number, at)
            case ev.WeightsPublished():
                self._published(event.version.number, at)
            case ev.BatchTaken():
                self._instant(f"batch {event.step} received", _TRAINER, at)
        for action in exchange.actions:
            self._act(action, at)

    def _act(self, action: object, at: float) -> None:
        """Add an action of the scheduler at time `at`."""
        match action:
            case ev.Submit():
                self._submitted(action.trajectory_id, action.engine_id, at)
            case ev.StartEpisode():
                self._called(_ENVIRONMENTS, action.trajectory_id, "start", at)
            case ev.StepEnvironment():
                self._called(_ENVIRONMENTS, action.trajectory_id, "step", at)
            case ev.Restart() | ev.Drop():
                self._replied(_ENVIRONMENTS, action.trajectory_id, at, reply="no longer needed")
            case ev.Score():
                self._called(_SCORERS, action.trajectory_id, "score", at)
            case ev.EmitBatch():
                self._instant(f"batch {action.step} complete", _SCHEDULER, at)
            case ev.PauseEngines():
                self._paused = at
            case ev.ResumeEngines():
                self._resume(at)
            case ev.Warn():
                self._instant(f"warning {action.name}", _SCHEDULER, at, message=action.message)

    def _engine(self, engine_id: str) -> _Engine:
        """Return the state of an engine, created if the engine is new."""
        if engine_id not in self._engines:
            pid = _FIRST_ENGINE + len(self._engines)
            self._engines[engine_id] = _Engine(pid)
            self._names[pid] = engine_id
        return self._engines[engine_id]

    def _submitted(self, trajectory_id: int, engine_id: str, at: float) -> None:
        """Note that a request of a trajectory starts on an engine, and add the span for which the
        engine was idle before."""
        engine = self._engine(engine_id)
        if engine.idle_since is not None and at - engine.idle_since >= _SHORTEST_GAP:
            self._span("idle", engine.pid, _CONTROL_LANE, engine.idle_since, at)
        engine.idle_since = None
        engine.running += 1
        resumed = trajectory_id in self._seen
        self._seen.add(trajectory_id)
        self._requests[trajectory_id] = _Request(engine_id, engine.lanes.take(), at, resumed)

    def _tokens(self, trajectory_id: int, count: int, version: int, at: float) -> None:
        """Count new tokens of a request; note its first token and its policy versions."""
        request = self._requests.get(trajectory_id)
        # The request is unknown if it was submitted before the oldest remaining event of the
        # record.
        if request is None:
            return
        request.first_token = request.first_token or at
        request.tokens += count
        if version not in request.versions:
            request.versions = (*request.versions, version)

    def _ended(self, trajectory_id: int, how: str, at: float) -> None:
        """Note that a request ends: add its spans (queued, prefill, decode) and release its lane.

        Args:
            trajectory_id: The trajectory of the request.
            how: The reason of the end, in words.
            at: Time of the end in seconds.
        """
        self._seen.add(trajectory_id)
        request = self._requests.pop(trajectory_id, None)
        if request is None:
            return
        engine = self._engine(request.engine)
        engine.lanes.give_back(request.lane)
        engine.running -= 1
        if not engine.running:
            engine.idle_since = at
        begin, first = request.submitted, request.first_token
        what = "resumed" if request.resumed else "response"
        facts = {"tokens": request.tokens, "policy versions": list(request.versions), "end": how}
        lane = (engine.pid, request.lane)
        self._span(f"{what} {trajectory_id}", *lane, begin, at, facts)
        # Without this time, queue and prefill cannot be told apart: the request got no token, or
        # the engine does not report how long requests wait in its queue.
        if request.queued_seconds is None:
            self._span("queued and prefill", *lane, begin, first or at)
        else:
            computed = min(begin + request.queued_seconds, first or at)
            self._span("queued", *lane, begin, computed)
            self._span("prefill", *lane, computed, first or at)
        if first is not None:
            self._span("decode", *lane, first, at)

    def _engine_up(self, engine_id: str, at: float) -> None:
        """Mark that an engine is ready to serve requests. It is idle until its first request."""
        engine = self._engine(engine_id)
        engine.idle_since = at
        self._instant(f"{engine_id} up", engine.pid, at)

    def _engine_down(self, engine_id: str, at: float) -> None:
        """End the requests of an engine that is lost, and mark the loss."""
        for trajectory_id in [i for i, r in self._requests.items() if r.engine == engine_id]:
            self._ended(trajectory_id, "engine lost", at)
        self._engine(engine_id).idle_since = None
        self._instant(f"{engine_id} down", self._engine(engine_id).pid, at)

    def _called(self, pid: int, trajectory_id: int, what: str, at: float) -> None:
        """Note that a call to a scorer or an environment (`pid`) starts for a trajectory. `what` is
        the name of the call."""
        self._calls[pid, trajectory_id] = (self._lanes[pid].take(), at, what)

    def _replied(self, pid: int, trajectory_id: int, at: float, **facts: Any) -> None:
        """End the running call to a scorer or an environment for a trajectory, and add the call's
        span; do nothing if no call is running."""
        if (pid, trajectory_id) in self._calls:
            lane, began, what = self._calls.pop((pid, trajectory_id))
            self._lanes[pid].give_back(lane)
            self._span(f"{what} {trajectory_id}", pid, lane, began, at, facts)

    def _published(self, number: int, at: float) -> None:
        """Add the span of the weight update to version `number`, if the record has the start of the
        update."""
        if self._update is not None and self._update[0] == number:
            name = f"weight update to version {number}"
            self._span(name, _SCHEDULER, _CONTROL_LANE, self._update[1], at)
        self._update = None

    def _resume(self, at: float) -> None:
        """Add a span to every engine for its pause, which ends at `at`."""
        if self._paused is not None:
            for engine in self._engines.values():
                self._span("paused", engine.pid, _PAUSE_LANE, self._paused, at)
        self._paused = None

    # ------------------------------------------------------------ steps of the trainer

    def add_trainer(self, lines: Iterable[Mapping[str, float]], since: float) -> None:
        """Add the trainer's steps and their phases from the lines of metrics.jsonl.

        Args:
            lines: The lines of metrics.jsonl about training steps.
            since: Time in seconds. Steps that began earlier are left out.
        """
        for line in lines:
            begin = line["time"] - sum(line.get(name, 0.0) for _, name in TRAINER_PHASES)
            if begin < since:
                continue
            step = int(line["step"])
            facts = {label: line[name] for label, name in _FACTS_OF_STEP if name in line}
            self._span(f"step {step}", _TRAINER, 1, begin, line["time"], facts)
            for phase, name in TRAINER_PHASES:
                end = begin + line.get(name, 0.0)
                if end > begin:
                    self._span(phase, _TRAINER, 1, begin, end, {"step": step})
                begin = end

    # ------------------------------------------------------------ events

    def _span(
        self,
        name: str,
        pid: int,
        lane: int,
        begin: float,
        end: float,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a span with the times `begin` and `end`, in seconds, to a lane of a process of the
        trace. The display shows `facts` when the span is selected."""
        self._events.append(
            {"name": name, "ph": "X", "ts": begin, "dur": end - begin, "pid": pid, "tid": lane}
            | ({"args": dict(facts)} if facts else {})
        )

    def _instant(self, name: str, pid: int, at: float, **facts: Any) -> None:
        """Add an event without duration, at time `at` in seconds, to a process of the trace."""
        self._events.append(
            {"name": name, "ph": "i", "s": "p", "ts": at, "pid": pid, "tid": _CONTROL_LANE}
            | ({"args": facts} if facts else {})
        )

    def finish(self) -> dict[str, Any]:
        """Return the content of the trace file. Requests and calls that have not ended are left
        out."""
        zero = min((event["ts"] for event in self._events), default=0.0)
        for event in self._events:
            event["ts"] = round(1e6 * (event["ts"] - zero), 1)
            if "dur" in event:
                event["dur"] = max(0.0, round(1e6 * event["dur"], 1))
        names = [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            for pid, name in self._names.items()
        ]
        ordered = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        return {"traceEvents": [*names, *ordered], "displayTimeUnit": "ms"}
