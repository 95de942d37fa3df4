"""Provides the running requests of a driver, from the scheduler's `Submit` action to the event that
ends the request.

That event is `Finished` (for an episode `TurnEnded`), `Aborted` or `Refused`.

Invariants
- Tokens are in the store before the scheduler gets an event about them, though up to one chunk of
  them is not on disk yet. The end of a trajectory is queued for the disk before anything that
  follows from it.
- A complete response is never partial: its end is stored together with its last tokens, with no
  `await` between. A response whose stream was cut off after its last token is finished as well.
- A trajectory has one writer. The store guarantees this: each append carries the key of its
  request, and the store refuses an append whose key is not the trajectory's current key. In
  addition, only the stream of the trajectory's request in `Generation` is read. That alone would
  not be enough. An engine that was taken out of service may still be alive and continue to stream
  (it was slow, its report was lost, or its weights were suspect). A canceled stream ends only in
  the next iteration of the event loop. A request that the scheduler submits while its engine is
  being taken out of service is never started. Tokens of a second writer, mixed into a response,
  would have log-probs that look right.
- A failure counts against the engine, request or prompt for which there is evidence
  (`engine_health.py`). A refused request counts only against its prompt. After a broken stream, the
  engine is first asked whether it is alive.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineError, RequestRefused, StreamEnd, TokenChunk
from megatron_async.rollout.admission import Admission
from megatron_async.rollout.background import BackgroundTasks
from megatron_async.rollout.engine_health import FAILURES_OF_ONE
from megatron_async.rollout.monitor import EngineMonitor
from megatron_async.rollout.responses import ResponseSpec, read
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.scheduler import events as ev
from megatron_async.store.records import SupersededRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, RequestKey

_ABORT_WAIT_SECONDS = 2.0
_ABORT_TRIES = 10
_STARTS_PER_ITERATION = 64
_IDLE_POLL_SECONDS = 0.01


@dataclass(eq=False)
class RunningRequest:
    """A request that the scheduler has submitted, from `submit` until its end is reported to the
    scheduler.

    Attributes:
        tracked: Engine on which the request runs.
        read_at: Reading of the engine's request clock when the request was submitted or its newest
            tokens arrived.
        store_key: Key of the request in the store; None until the request is started.
        group_id: Group of the trajectory; -1 until the request is sent.
        abort_wanted: Whether the request is to be aborted; it is not sent if it has not been sent
            yet.
        awaits_first_token: Whether the request was started on an engine that was not being checked
            for liveness, and has made no token there.
        complete: Whether the response is complete and its end is stored.
        task: Task that reads the stream; None until the request is started.
    """

    trajectory_id: int
    tracked: TrackedEngine
    read_at: float
    store_key: RequestKey | None = None
    group_id: int = -1
    abort_wanted: bool = False
    awaits_first_token: bool = False
    complete: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> RequestKey:
        """Key of this request in the store; the request must have been started."""
        assert self.store_key is not None
        return self.store_key

    def cancel(self) -> None:
        """Cancel the task that reads this request's stream, if the request was started."""
        if self.task is not None:
            self.task.cancel()


class Generation:
    """All running requests of one driver, by trajectory."""

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        statistics: RolloutStatistics,
        stop_token_ids: Sequence[int],
        admission: Admission,
        monitor: EngineMonitor,
        background: BackgroundTasks,
        feed: Callable[[ev.Event], None],
    ) -> None:
        """Set up an empty set of requests.

        Args:
            feed: Function that passes an event to the scheduler.
        """
        self._forced = config.experiment.forced_lengths
        self._episodes = config.has_episodes
        sampling = config.sampling
        self._spec = ResponseSpec(sampling, sampling.max_new_tokens, tuple(stop_token_ids))
        self._store = store
        self._statistics = statistics
        self._admission = admission
        self._monitor = monitor
        self._background = background
        self._feed = feed
        self._requests: dict[int, RunningRequest] = {}
        self._queued: deque[RunningRequest] = deque()  # submitted, to be started in this order
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        while self._requests:
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel all requests and wait until their tasks have ended; tokens that have arrived are
        in the store."""
        self._closed = True
        tasks = [t for t in (self._starting, *(r.task for r in self._requests.values())) if t]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, trajectory_id: int, tracked: TrackedEngine) -> None:
        """Queue a request that starts a trajectory on an engine, or resumes it from its stored
        tokens.

        Queued requests are started in the background, a few in each iteration of the event loop. A
        request that is queued while its engine is being taken out of service is not started,
        because `detach_engine` removes it.
        """
        request = RunningRequest(
            trajectory_id, tracked, tracked.health.request_clock(tracked.clock())
        )
        self._requests[trajectory_id] = request
        self._statistics.running_changed(len(self._requests))
        self._queued.append(request)
        if self._starting is None or self._starting.done():
            self._starting = self._background.spawn(self._start_queued())

    async def _start_queued(self) -> None:
        """Start all queued requests in order, a few in each iteration of the event loop.

        At the start of a training step thousands of requests are submitted at once, and the event
        loop has other work too.
        """
        while self._queued:
            for _ in range(min(_STARTS_PER_ITERATION, len(self._queued))):
                request = self._queued.popleft()
                if self._requests.get(request.trajectory_id) is request:
                    self._start(request)
            await asyncio.sleep(0)

    def _start(self, request: RunningRequest) -> None:
        request.store_key = self._store.begin_request(request.trajectory_id)
        request.awaits_first_token = request.tracked.check is None or request.tracked.check.done()
        request.tracked.health.request_started(request.tracked.clock())
        request.task = self._background.spawn(self._run(request))

    def mark_for_abort(self, trajectory_ids: Sequence[int] | None = None) -> list[RunningRequest]:
        """Mark the running requests of these trajectories for abort and return them.

        Args:
            trajectory_ids: Trajectories whose requests are marked; None for all running requests.
        """
        ids = list(self._requests) if trajectory_ids is None else trajectory_ids
        requests = [self._requests[i] for i in ids if i in self._requests]
        for request in requests:
            request.abort_wanted = True
        return requests

    # ------------------------------------------------------------ aborting requests

    async def abort(self, requests: Sequence[RunningRequest]) -> None:
        """Abort these requests on their engines and wait until every request has ended."""
        if self._starting is not None and not self._starting.done():
            # Queued requests that are marked for abort then end without being sent.
            await asyncio.wait([self._starting])
        by_engine: dict[TrackedEngine, list[RunningRequest]] = {}
        for request in requests:
            by_engine.setdefault(request.tracked, []).append(request)
        await asyncio.gather(*(self._abort_on(*group) for group in by_engine.items()))

    async def _abort_on(self, tracked: TrackedEngine, requests: Sequence[RunningRequest]) -> None:
        """Abort requests of one engine, retrying until the call succeeds; cut off any requests that
        do not end.

        A suspended engine ends no request and may lose aborts, so each try waits until the engine
        is released. The end of a stream comes after the tokens before it, which takes time on a
        busy machine: while some requests end, the others may end too, and no try is counted. An
        engine that does not end a request may still serve all others well, so only the request is
        cut off.
        """
        tries, delivered = 0, False
        while tries < _ABORT_TRIES:
            await tracked.until_released()
            remaining = self._unended(requests)
            if not remaining:
                return
            started = tracked.clock()
            try:
                if not delivered:
                    await tracked.client.abort([request.key.name for request in remaining])
                delivered = True
            except EngineError as error:
                await self._monitor.suspect(tracked, str(error))
            tasks = [
                request.task for request in self._unended(remaining) if request.task is not None
            ]
            if tasks:
                await asyncio.wait(tasks, timeout=_ABORT_WAIT_SECONDS)
            if tracked.health.suspended_since(started):
                delivered = False
            elif len(self._unended(remaining)) == len(remaining):
                tries += 1
        for request in self._unended(requests):
            why = f"engine {tracked.engine_id} did not end the request after its abort"
            self._cut_off(request, "abort_ignored", why)

    def _unended(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        return [r for r in requests if self._requests.get(r.trajectory_id) is r]

    def end_silent(self, tracked: TrackedEngine, limit: float) -> None:
        """Cut off the requests of an engine that made no token for `limit` seconds in which the
        engine had no reason to delay them.

        These seconds are read from the engine's request clock. Other requests on the engine do make
        tokens, or the engine would have been taken out of service. So only the streams of these
        requests are lost.
        """
        clock = tracked.health.request_clock(tracked.clock())
        for request in self._on(tracked):
            if clock - request.read_at > limit:
                why = f"no token came from engine {tracked.engine_id} for {limit:g} s"
                self._cut_off(request, "request_silent", why)

    def _cut_off(self, request: RunningRequest, warning: str, why: str) -> None:
        """Cancel the stream of a request, warn with the reason `why`, and report the request's end
        to the scheduler."""
        message = f"stopped reading request {request.key.name}: {why}"
        self._statistics.warned(warning, message)
        request.cancel()
        self._report_end(request)

    def detach_engine(self, tracked: TrackedEngine, *, failed: bool) -> None:
        """Remove all requests of an engine that is taken out of service; each trajectory becomes
        finished, partial or refused.

        Call this while the scheduler still has the engine, so that requests which the scheduler
        submits to it meanwhile are removed too.

        Args:
            failed: Whether the engine failed. If so, prompts on which engine after engine has died
                are refused.
        """
        tracked.give_up()
        fatal = self._fatal_groups(tracked) if failed else set()
        self._admission.failures.engine_lost(r.trajectory_id for r in self._on(tracked))
        for request in self._on(tracked):
            request.cancel()
            if not request.complete:
                request.complete = self.end_if_complete(request.trajectory_id)
        for request in [r for r in self._on(tracked) if r.complete]:
            self._report_end(request)
        for request in [r for r in self._on(tracked) if r.group_id in fatal]:
            why = f"{FAILURES_OF_ONE} engines in a row failed before its first token"
            self._admission.refused(request.trajectory_id, request.group_id, why)
            self._report_end(request, refused=True)
        for request in self._on(tracked):
            del self._requests[request.trajectory_id]
            if request.store_key is not None:
                self._store.end_request(request.store_key)
        self._statistics.running_changed(len(self._requests))

    def _fatal_groups(self, tracked: TrackedEngine) -> set[int]:
        """Return the groups for which this dead engine, like several engines before it, never made
        a first token."""
        if tracked.health.suspended:
            return set()
        began = {r.group_id for r in self._on(tracked) if r.awaits_first_token and r.group_id >= 0}
        return self._admission.failures.engine_died(began, self._statistics.counts.tokens)

    def _on(self, tracked: TrackedEngine) -> list[RunningRequest]:
        return [request for request in self._requests.values() if request.tracked is tracked]

    def end_if_complete(self, trajectory_id: int) -> bool:
        """Finish a trajectory without a running request if its stored response is complete; return
        whether it was.

        When this returns True, the end is in the store and queued for the disk.
        """
        reason = self._spec_of(trajectory_id).end(*self._store.response_end(trajectory_id))
        if reason is None:
            return False
        self._store.end(trajectory_id, reason)
        return True

    # ------------------------------------------------------------ one request

    async def _run(self, request: RunningRequest) -> None:
        refused = spontaneous = False
        try:
            spontaneous = await self._read(request) == "abort" and not request.abort_wanted
        except RequestRefused as refusal:
            refused = True
            self._admission.refused(request.trajectory_id, request.group_id, str(refusal))
        except EngineError as error:
            refused = await self._failed(request, str(error))
        finally:
            request.tracked.health.request_ended(request.tracked.clock(), spontaneous=spontaneous)
        if self._requests.get(request.trajectory_id) is not request or self._closed:
            return  # `detach_engine` or `_cut_off` has removed it and told the scheduler
        self._report_end(request, refused=refused)

    async def _read(self, request: RunningRequest) -> StreamEnd | None:
        if request.abort_wanted:
            return None
        trajectory = self._store.load_trajectory(request.trajectory_id)
        request.group_id = trajectory.group_id
        before, answer = trajectory.input_parts()
        spec = self._spec_of(request.trajectory_id)
        generation_request = spec.request(request.key.name, np.concatenate(before), *answer)
        return await read(
            request.tracked.client, generation_request, partial(self._receive, request)
        )

    async def _receive(self, request: RunningRequest, chunk: TokenChunk) -> bool:
        """Store a chunk of tokens from a request's stream; return whether to continue reading the
        stream.

        The result is False if the chunk is an empty abort, has a version that the engine was not
        sent, or belongs to a superseded request.
        """
        tracked, trajectory_id = request.tracked, request.trajectory_id
        if chunk.end == "abort" and not len(chunk.token_ids):
            return False  # a shortcut, because thousands of requests are aborted at once
        if len(chunk.token_ids) and not await tracked.wait_accepted(chunk.version):
            why = f"generated tokens of version {chunk.version}, which it was not sent"
            self._monitor.give_up(tracked, f"engine {tracked.engine_id} {why}")
            return False
        try:
            self._store_chunk(request, chunk)
        except SupersededRequest as superseded:
            self._statistics.warned("superseded_append", str(superseded))
            return False
        now = tracked.clock()
        tracked.health.token(now)
        self._admission.failures.token(trajectory_id, request.group_id)
        request.read_at = tracked.health.request_clock(now)
        request.awaits_first_token = False
        tracked.health.store_wait_started(now)
        try:
            if request.complete:
                await self._store.sync()
            else:
                await self._store.written(trajectory_id)
        finally:
            tracked.health.store_wait_ended(tracked.clock())
        return True

    def _report_end(self, request: RunningRequest, *, refused: bool = False) -> None:
        """Remove a request whose stream is no longer read, and report to the scheduler how it
        ended.

        The trajectory becomes finished if its response is complete, otherwise partial; with
        `refused` its group is dropped.
        """
        trajectory_id = request.trajectory_id
        del self._requests[trajectory_id]
        self._statistics.running_changed(len(self._requests))
        if request.complete or self.end_if_complete(trajectory_id):
            ended = ev.TurnEnded if self._episodes else ev.Finished
            self._feed(ended(trajectory_id))
            return
        self._store.end_request(request.key)
        self._feed(ev.Refused(trajectory_id) if refused else ev.Aborted(trajectory_id))

    def _store_chunk(self, request: RunningRequest, chunk: TokenChunk) -> None:
        """Append a chunk to the store and report its tokens to the scheduler; a last chunk also
        ends the response.

        Tokens and end are stored together, so that a restarted process finds both or neither.
        """
        end = None if chunk.end in (None, "abort") else FinishReason(chunk.end)
        engine_id = request.tracked.engine_id
        tokens = (chunk.token_ids, chunk.logprobs, chunk.version)
        self._store.append(request.key, *tokens, engine_id, end=end, columns=chunk.columns)
        request.complete = end is not None
        count = len(chunk.token_ids)
        if not count:
            return
        self._statistics.generated(count)
        if chunk.queued_seconds:
            self._feed(ev.LeftQueue(request.trajectory_id, chunk.queued_seconds))
        self._feed(ev.TokensArrived(request.trajectory_id, count, chunk.version.number))

    async def _failed(self, request: RunningRequest, why: str) -> bool:
        """Find out what is at fault for a broken stream; return True if it is the request itself,
        which is then refused.

        If the engine is at fault, the engine is taken out of service and the result is False.
        """
        tracked, trajectory_id = request.tracked, request.trajectory_id
        await self._monitor.suspect(tracked, why)
        if tracked.given_up or request.complete:
            return False
        own = self._admission.failures.failed(trajectory_id)
        if tracked.health.failed(request.group_id):
            count = len(tracked.health.failed_prompts)
            self._monitor.give_up(
                tracked,
                f"engine {tracked.engine_id} answers, but requests of {count} prompts in a row "
                f"failed on it, the last: {why}",
            )
            return False
        if not own:
            return False
        self._admission.refused(
            trajectory_id,
            request.group_id,
            f"it failed {FAILURES_OF_ONE} times in a row on engines that serve others: {why}",
        )
        return True

    def _spec_of(self, trajectory_id: int) -> ResponseSpec:
        if not self._forced:
            return self._spec
        limit = self._forced[trajectory_id % len(self._forced)]
        return replace(self._spec, limit=limit, exact=True)
