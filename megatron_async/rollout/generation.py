"""Provides the running requests of a driver. A request is running from the scheduler's `Submit`
action until the driver reports its end to the scheduler.

The end is reported as the event `Finished` (for an episode `TurnEnded`), `Aborted` or `Refused`.

Invariants
- Tokens are passed to the store before the scheduler gets an event about them. The store buffers
  the newest tokens of a trajectory, at most one chunk, before it writes them to disk. The end of a
  trajectory is queued for writing before the scheduler gets its event, so no consequence of the end
  can be on disk without it.
- A complete response is never partial: its end is stored together with its last tokens, with no
  `await` between. If a stream is cut off after the last token of the response but before its end is
  reported, the tokens show that the response is complete, and it is finished as well.
- A trajectory has one writer. The store guarantees this: each append carries the key of its
  request, and the store refuses an append whose key is not the trajectory's current key. In
  addition, `Generation` has at most one request for each trajectory and cancels the streams of all
  others. Canceling alone would not be enough: a canceled stream ends only in the next iteration of
  the event loop, and an engine that was taken out of service may still be alive and continue to
  stream (it was slow, its load report was lost, or its weights were suspect). The guarantee matters
  because tokens of a second writer, mixed into a response, would have log-probs that look right.
- A failure counts against the engine, request or prompt for which there is evidence
  (`engine_health.py`). A refused request counts only against its prompt. After a broken stream, the
  engine is first asked whether it still replies.
"""

import asyncio
from collections import Counter, deque
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
        read_at: Reading of `EngineHealth.request_clock` of the engine when the request's newest
            tokens arrived, or when it was submitted if there are none.
        store_key: Key of the request in the store; None until the request is started.
        group_id: Group of the trajectory; -1 until the request is sent.
        abort_wanted: Whether the request is to be aborted. A request that is not sent yet is then
            never sent.
        together: Number of requests that are started on the engine at the same time.
        awaits_first_token: Whether the request has made no token on its engine, so that the
            engine's death may be its fault. False for a request that was started while the engine
            was being asked whether it still replies, because the engine was failing before the
            request.
        complete: Whether the response is complete and its end is stored.
        task: Task that reads the stream; None until the request is started.
    """

    trajectory_id: int
    tracked: TrackedEngine
    read_at: float
    store_key: RequestKey | None = None
    group_id: int = -1
    abort_wanted: bool = False
    together: int = 1
    awaits_first_token: bool = False
    complete: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> RequestKey:
        """Key with which this request appends tokens to its trajectory in the store; the request
        must have been started."""
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
        # Submitted requests that are not started yet, in the order of submission.
        self._queued: deque[RunningRequest] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        while self._requests:
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel all requests and wait until their tasks have ended. Tokens that have arrived
        before are in the store."""
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

        At the start of a training step thousands of requests are submitted at once. Starting them
        all in one iteration would block the event loop.
        """
        counted = 0
        while self._queued:
            if not counted:
                counted = len(self._queued)
                together = Counter(request.tracked.engine_id for request in self._queued)
            for _ in range(min(_STARTS_PER_ITERATION, counted)):
                request, counted = self._queued.popleft(), counted - 1
                if self._requests.get(request.trajectory_id) is request:
                    request.together = together[request.tracked.engine_id]
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
            # Wait until every queued request is started. A request that is marked for abort ends
            # when it is started, without being sent.
            await asyncio.wait([self._starting])
        by_engine: dict[TrackedEngine, list[RunningRequest]] = {}
        for request in requests:
            by_engine.setdefault(request.tracked, []).append(request)
        await asyncio.gather(*(self._abort_on(*group) for group in by_engine.items()))

    async def _abort_on(self, tracked: TrackedEngine, requests: Sequence[RunningRequest]) -> None:
        """Abort requests of one engine, retrying until the call succeeds; cut off any requests that
        do not end.

        A suspended engine ends no request and may lose aborts, so each try waits until the engine
        is no longer suspended. A try is counted only if none of the requests ended during it: an
        aborted stream ends only after its remaining tokens were read, which takes time on a busy
        machine. After `_ABORT_TRIES` counted tries, the streams of the remaining requests are no
        longer read. The engine stays in service, because it may serve all other requests well.
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
        """Stop reading each request on an engine that made no token for more than `limit` seconds,
        counting only the time in which the engine had no reason to delay it
        (`EngineHealth.request_clock`).

        The engine stays in service: other requests on it do make tokens, because an engine without
        any tokens is taken out of service earlier. So only the streams of the silent requests are
        lost.
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
        """Remove all requests of an engine that is taken out of service. Each trajectory becomes
        finished if its response is complete, otherwise partial or refused.

        Call this before the scheduler gets `EngineDown` for the engine. In reply to the events of
        this method, the scheduler may submit further requests to the engine, and these are removed
        too.

        Args:
            failed: Whether the engine failed. If so, a prompt for which `FAILURES_OF_ONE` engines
                in a row failed before its first token is refused.
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
        """Record that an engine failed; return the groups that are now at fault, because
        `FAILURES_OF_ONE` engines in a row failed before they made a first token for the group."""
        if tracked.health.suspended:
            return set()
        began = {r.group_id for r in self._on(tracked) if r.awaits_first_token and r.group_id >= 0}
        return self._admission.failures.engine_died(began, self._statistics.counts.tokens)

    def _on(self, tracked: TrackedEngine) -> list[RunningRequest]:
        return [request for request in self._requests.values() if request.tracked is tracked]

    def end_if_complete(self, trajectory_id: int) -> bool:
        """Finish a trajectory without a running request if its stored response is complete; return
        whether it was.

        When this returns True, the end is in the store and queued to be written to disk.
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
            # `detach_engine` or `_cut_off` has removed the request and reported its end, or the
            # driver closes.
            return
        self._report_end(request, refused=refused)

    async def _read(self, request: RunningRequest) -> StreamEnd | None:
        if request.abort_wanted:
            return None
        trajectory = self._store.load_trajectory(request.trajectory_id)
        request.group_id = trajectory.group_id
        before, answer = trajectory.input_parts()
        spec = self._spec_of(request.trajectory_id)
        generation_request = spec.request(request.key.name, np.concatenate(before), *answer)
        generation_request = replace(generation_request, together=request.together)
        return await read(
            request.tracked.client, generation_request, partial(self._receive, request)
        )

    async def _receive(self, request: RunningRequest, chunk: TokenChunk) -> bool:
        """Store a chunk of tokens from a request's stream; return whether to continue reading the
        stream.

        The result is False in three cases: the chunk reports an abort and has no tokens; its policy
        version was not sent to the engine or failed verification, so the engine is taken out of
        service; or the request is superseded by a newer request of its trajectory.
        """
        tracked, trajectory_id = request.tracked, request.trajectory_id
        if chunk.end == "abort" and not len(chunk.token_ids):
            # Without this shortcut the code below would do the same, but thousands of requests are
            # aborted at once.
            return False
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

        If the response is complete, the trajectory is finished. Otherwise it is partial, or with
        `refused` the scheduler drops its group.
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
        """Append a chunk to the store, together with the end of the response if the chunk reports
        it, and report its tokens to the scheduler.

        The last tokens and the end are stored together, so that a restarted process finds both or
        neither.
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
        """Find out whether the engine or the request is at fault for a broken stream. Return True
        if the request is at fault, which is then recorded as refused.

        If the engine is at fault, the engine is taken out of service and the result is False. The
        result is False too if there is not enough evidence yet; the trajectory is then partial and
        is resumed.
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
                f"engine {tracked.engine_id} replies, but requests of {count} prompts in a row "
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
