"""Running requests: from the scheduler's `Submit` to `Finished` (of an episode: `TurnEnded`),
`Aborted` or `Refused`.

Invariants
- Tokens are in the store (at most a chunk of them not yet on disk) before the scheduler hears of
  them; a trajectory's end is on its way to the disk ahead of anything that follows from it.
- A response that is complete is never partial: its end goes to the store with its last tokens,
  with no `await` between, and one that was cut off behind its last token is finished.
- A trajectory has one writer. Its request here is the only one whose stream is read, and each of
  its appends carries the request's key, which the store compares with the trajectory's current one.
  The first alone is not enough: an engine that is given up may well live (it was slow, its report
  was lost, its weights were suspect) and go on streaming; a stream that is canceled ends only at
  its task's next turn; and what the scheduler submits while an engine is being given up runs
  nowhere. The store also refuses a second writer: mixed into a response, its tokens would have
  log-probs that look right.
- A failure counts against what there is evidence about (`engine_health.py`): a refused request
  against its prompt alone; a broken stream first asks the engine whether it is alive.
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
_BEGUN_IN_A_TURN = 64
_IDLE_POLL_SECONDS = 0.01


@dataclass(eq=False)
class RunningRequest:
    """A submitted request; `abort_wanted` is seen by one that has not been sent yet.

    `begun` is its key in the store, set when it begins.
    `group_id` is known once it is sent. `read_at` is the reading of its engine's request clock at
    its start or its newest tokens. `prefills`: it was sent to an engine that nobody suspected, and
    has made no token there.
    """

    trajectory_id: int
    tracked: TrackedEngine
    read_at: float
    begun: RequestKey | None = None
    group_id: int = -1
    abort_wanted: bool = False
    prefills: bool = False
    complete: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> RequestKey:
        """Return the key of a request that has begun."""
        assert self.begun is not None
        return self.begun

    def cancel(self) -> None:
        """Read the stream no further."""
        if self.task is not None:
            self.task.cancel()


class Generation:
    """All running requests of one driver."""

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
        """`feed` gets the events, for the scheduler."""
        self._forced = config.experiment.forced_lengths
        self._episodes = config.has_episodes
        sampling = config.sampling
        self._wanted = ResponseSpec(sampling, sampling.max_new_tokens, tuple(stop_token_ids))
        self._store = store
        self._statistics = statistics
        self._admission = admission
        self._monitor = monitor
        self._background = background
        self._feed = feed
        self._requests: dict[int, RunningRequest] = {}
        self._waiting: deque[RunningRequest] = deque()  # submitted, to be begun in this order
        self._beginning: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    async def until_idle(self) -> None:
        """Returns when no request runs."""
        while self._requests:
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel every request; what arrived is in the store."""
        self._closed = True
        tasks = [t for t in (self._beginning, *(r.task for r in self._requests.values())) if t]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, trajectory_id: int, tracked: TrackedEngine) -> None:
        """Start a trajectory, or go on with it from its stored tokens, a few in each turn.

        On an engine that is just being given up none begins: `detach_engine` forgets it.
        """
        request = RunningRequest(
            trajectory_id, tracked, tracked.health.request_clock(tracked.clock())
        )
        self._requests[trajectory_id] = request
        self._statistics.running_changed(len(self._requests))
        self._waiting.append(request)
        if self._beginning is None or self._beginning.done():
            self._beginning = self._background.spawn(self._begin_all())

    async def _begin_all(self) -> None:
        """A boundary submits thousands at once, and the event loop has other work too."""
        while self._waiting:
            for _ in range(min(_BEGUN_IN_A_TURN, len(self._waiting))):
                request = self._waiting.popleft()
                if self._requests.get(request.trajectory_id) is request:
                    self._begin(request)
            await asyncio.sleep(0)

    def _begin(self, request: RunningRequest) -> None:
        request.begun = self._store.begin_request(request.trajectory_id)
        request.prefills = request.tracked.check is None or request.tracked.check.done()
        request.tracked.health.request_began(request.tracked.clock())
        request.task = self._background.spawn(self._run(request))

    def mark_for_abort(self, trajectory_ids: Sequence[int] | None = None) -> list[RunningRequest]:
        """The running requests of these trajectories (of all), marked as unwanted."""
        wanted = list(self._requests) if trajectory_ids is None else trajectory_ids
        requests = [self._requests[i] for i in wanted if i in self._requests]
        for request in requests:
            request.abort_wanted = True
        return requests

    # ------------------------------------------------------------ ended from here

    async def abort(self, requests: Sequence[RunningRequest]) -> None:
        """Returns when all have ended."""
        if self._beginning is not None and not self._beginning.done():
            await asyncio.wait([self._beginning])  # what is not wanted any more is not sent
        by_slot: dict[TrackedEngine, list[RunningRequest]] = {}
        for request in requests:
            by_slot.setdefault(request.tracked, []).append(request)
        await asyncio.gather(*(self._abort_on(*group) for group in by_slot.items()))

    async def _abort_on(self, tracked: TrackedEngine, requests: Sequence[RunningRequest]) -> None:
        """Repeated until the engine has heard it.

        A held engine ends nothing, and loses aborts: they wait for its release. Ends come behind
        the tokens before them, which takes its time on a busy machine: while some come, others
        may. An engine that does not end a request may still serve all others: the request is cut
        off, and that is all.
        """
        tries, heard = 0, False
        while tries < _ABORT_TRIES:
            await tracked.until_released()
            left = self._unended(requests)
            if not left:
                return
            asked = tracked.clock()
            try:
                if not heard:
                    await tracked.client.abort([request.key.name for request in left])
                heard = True
            except EngineError as error:
                await self._monitor.suspect(tracked, str(error))
            tasks = [request.task for request in self._unended(left) if request.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=_ABORT_WAIT_SECONDS)
            if tracked.health.suspended_since(asked):
                heard = False
            elif len(self._unended(left)) == len(left):
                tries += 1
        for request in self._unended(requests):
            why = f"engine {tracked.engine_id} did not end it when it was aborted"
            self._cut_off(request, "abort_ignored", why)

    def _unended(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        return [r for r in requests if self._requests.get(r.trajectory_id) is r]

    def end_silent(self, tracked: TrackedEngine, limit: float) -> None:
        """Cut off requests that have made no token for `limit` seconds of the engine's work.

        Others on the engine do, or it would have been given up as a whole: this stream is lost.
        """
        clock = tracked.health.request_clock(tracked.clock())
        for request in self._on(tracked):
            if clock - request.read_at > limit:
                why = f"no token came from engine {tracked.engine_id} for {limit:g} s"
                self._cut_off(request, "request_silent", why)

    def _cut_off(self, request: RunningRequest, warning: str, why: str) -> None:
        """Read the stream no further and discard what it sends from now on."""
        message = f"request {request.key.name} is cut off: {why}"
        self._statistics.warned(warning, message)
        request.cancel()
        self._ended(request)

    def detach_engine(self, tracked: TrackedEngine, *, failed: bool) -> None:
        """The engine is given up: its trajectories are finished, partial or refused from now on.

        Call while the scheduler still has the engine: what it submits there meanwhile is
        forgotten too.
        """
        tracked.give_up()
        fatal = self._fatal_groups(tracked) if failed else set()
        self._admission.failures.engine_lost(r.trajectory_id for r in self._on(tracked))
        for request in self._on(tracked):
            request.cancel()
            if not request.complete:
                request.complete = self.end_if_complete(request.trajectory_id)
        for request in [r for r in self._on(tracked) if r.complete]:
            self._ended(request)
        for request in [r for r in self._on(tracked) if r.group_id in fatal]:
            why = f"{FAILURES_OF_ONE} engines in a row failed before its first token"
            self._admission.refused(request.trajectory_id, request.group_id, why)
            self._ended(request, refused=True)
        for request in self._on(tracked):
            del self._requests[request.trajectory_id]
            if request.begun is not None:
                self._store.end_request(request.begun)
        self._statistics.running_changed(len(self._requests))

    def _fatal_groups(self, tracked: TrackedEngine) -> set[int]:
        """Groups that this engine, as others before it, failed to begin."""
        if tracked.health.suspended:
            return set()
        began = {r.group_id for r in self._on(tracked) if r.prefills and r.group_id >= 0}
        return self._admission.failures.engine_died(began, self._statistics.counts.tokens)

    def _on(self, tracked: TrackedEngine) -> list[RunningRequest]:
        return [request for request in self._requests.values() if request.tracked is tracked]

    def end_if_complete(self, trajectory_id: int) -> bool:
        """Finish a trajectory whose request is gone if it needs no other; whether it was so.

        Its end is in the store, and on its way to the disk, when this returns.
        """
        reason = self._wanted_of(trajectory_id).end(*self._store.response_end(trajectory_id))
        if reason is None:
            return False
        self._store.end(trajectory_id, reason)
        return True

    # ------------------------------------------------------------ one request

    async def _run(self, request: RunningRequest) -> None:
        refused = unasked = False
        try:
            unasked = await self._read(request) == "abort" and not request.abort_wanted
        except RequestRefused as refusal:
            refused = True
            self._admission.refused(request.trajectory_id, request.group_id, str(refusal))
        except EngineError as error:
            refused = await self._failed(request, str(error))
        finally:
            request.tracked.health.request_ended(request.tracked.clock(), unasked=unasked)
        if self._requests.get(request.trajectory_id) is not request or self._closed:
            return  # its engine was given up or it was cut off: the scheduler has that already
        self._ended(request, refused=refused)

    async def _read(self, request: RunningRequest) -> StreamEnd | None:
        if request.abort_wanted:
            return None
        trajectory = self._store.load_trajectory(request.trajectory_id)
        request.group_id = trajectory.group_id
        before, answer = trajectory.input_parts()
        wanted = self._wanted_of(request.trajectory_id)
        asked = wanted.request(request.key.name, np.concatenate(before), *answer)
        return await read(request.tracked.client, asked, partial(self._take, request))

    async def _take(self, request: RunningRequest, chunk: TokenChunk) -> bool:
        """Keep a chunk, unless it is refused for a reason; return whether to read on."""
        tracked, trajectory_id = request.tracked, request.trajectory_id
        if chunk.end == "abort" and not len(chunk.token_ids):
            return False  # as thousands do at once, at a boundary
        if len(chunk.token_ids) and not await tracked.wait_accepted(chunk.version):
            why = f"generated tokens of version {chunk.version}, which it was not sent"
            self._monitor.give_up(tracked, f"engine {tracked.engine_id} {why}")
            return False
        try:
            self._keep(request, chunk)
        except SupersededRequest as superseded:
            self._statistics.warned("superseded_append", str(superseded))
            return False
        now = tracked.clock()
        tracked.health.token(now)
        self._admission.failures.token(trajectory_id, request.group_id)
        request.read_at = tracked.health.request_clock(now)
        request.prefills = False
        tracked.health.store_begins(now)
        try:
            if request.complete:
                await self._store.sync()
            else:
                await self._store.written(trajectory_id)
        finally:
            tracked.health.store_ends(tracked.clock())
        return True

    def _ended(self, request: RunningRequest, *, refused: bool = False) -> None:
        """No stream of it is read any more: its trajectory is finished, partial or refused."""
        trajectory_id = request.trajectory_id
        del self._requests[trajectory_id]
        self._statistics.running_changed(len(self._requests))
        if request.complete or self.end_if_complete(trajectory_id):
            ended = ev.TurnEnded if self._episodes else ev.Finished
            self._feed(ended(trajectory_id))
            return
        self._store.end_request(request.key)
        self._feed(ev.Refused(trajectory_id) if refused else ev.Aborted(trajectory_id))

    def _keep(self, request: RunningRequest, chunk: TokenChunk) -> None:
        """Store a chunk's tokens and its end together: a successor finds both or neither."""
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
        """A stream broke off: whose fault is it? True when it is the request's own."""
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

    def _wanted_of(self, trajectory_id: int) -> ResponseSpec:
        if not self._forced:
            return self._wanted
        limit = self._forced[trajectory_id % len(self._forced)]
        return replace(self._wanted, limit=limit, exact=True)
