"""Running requests: from the scheduler's `Submit` to `Finished`, `Aborted` or `Refused`.

Invariants
- Tokens are in the store (at most a chunk of them not yet on disk) before the scheduler hears of
  them; a trajectory's end is on its way to the disk ahead of anything that follows from it.
- A response that is complete is never partial: its end goes to the store with its last tokens,
  with no `await` between, and one that was cut off behind its last token is finished (`end_of`).
- A trajectory has one writer. Its request here is the only one whose stream is read, and each of
  its appends carries the request's key, which the store compares with the trajectory's current one.
  The first alone is not enough: an engine that is given up may well live (it was slow, its report
  was lost, its weights were suspect) and go on streaming; a stream that is cancelled ends only at
  its task's next turn; and what the scheduler submits while an engine is being given up runs
  nowhere. The store also refuses a second writer: mixed into a response, its tokens would have
  log-probs that look right.
- What an engine sends after the end of a response is ignored, with a warning.
- A failure counts against what there is evidence about (docs/failures.md, "What an engine is
  given up for"): a refused request against its prompt alone; a broken stream first asks the engine
  whether it is alive; failures of several prompts in a row, without a token between them, count
  against the engine, and failures of one prompt alone against that prompt. Six engines
  that fail in a row on one prompt drop it, if others make progress.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.engines.interface import (
    EngineError,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from megatron_async.rollout.engine_slot import EngineSlot
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.store.records import SupersededRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, RequestKey

_FAILED_PROMPTS_IN_ROW = 3
_FAILURES_OF_ONE = 6
_ABORT_RETRY_SECONDS = 2.0
_ABORT_TRIES = 10
_BEGUN_IN_A_TURN = 64


@dataclass(eq=False)
class RunningRequest:
    """A submitted request; `abort_wanted` is seen by one that has not been sent yet.

    `begun` is its key in the store, set when it begins.
    `group_id` is known once it is sent. `read_at` is the reading of its engine's request clock at
    its start or its newest tokens. `prefills`: it was sent to an engine that nobody suspected, and
    has made no token there.
    """

    trajectory_id: int
    slot: EngineSlot
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


@dataclass(frozen=True)
class Reports:
    """Receivers of news about requests and engines.

    `suspect` finds out whether an engine is alive, and returns when that is known; `give_up` takes
    it out of service. Both take the slot: a restarted engine may have the same id. `refused` and
    `accepted` keep count of the prompts; `spawn` has work done by a task, and looks after it.
    """

    feed: Callable[[ev.Event], None]
    suspect: Callable[[EngineSlot, str], Awaitable[None]]
    give_up: Callable[[EngineSlot, str], None]
    refused: Callable[[int, int, str], None]
    accepted: Callable[[], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Generation:
    """All running requests of one driver."""

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        statistics: RolloutStatistics,
        stop_token_ids: Sequence[int],
        reports: Reports,
    ) -> None:
        self._config = config
        self._store = store
        self._statistics = statistics
        self._stop_token_ids = tuple(stop_token_ids)
        self._reports = reports
        self._requests: dict[int, RunningRequest] = {}
        self._failures: Counter[int] = Counter()  # in a row, by trajectory
        self._deaths: Counter[int] = Counter()  # of engines that began it, in a row, by group
        self._tokens_at_death = 0
        self._waiting: deque[RunningRequest] = deque()  # submitted, to be begun in this order
        self._beginning: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    async def close(self) -> None:
        """Cancel every request; what arrived is in the store."""
        self._closed = True
        tasks = [t for t in (self._beginning, *(r.task for r in self._requests.values())) if t]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, trajectory_id: int, slot: EngineSlot) -> None:
        """Start a trajectory, or go on with it from its stored tokens, a few in each turn.

        On an engine that is just being given up none begins: `forget_engine` forgets it.
        """
        request = RunningRequest(trajectory_id, slot, slot.watch.request_clock(slot.clock()))
        self._requests[trajectory_id] = request
        self._statistics.running_changed(len(self._requests))
        self._waiting.append(request)
        if self._beginning is None or self._beginning.done():
            self._beginning = self._reports.spawn(self._begin_all())

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
        request.prefills = request.slot.check is None or request.slot.check.done()
        request.slot.watch.request_began(request.slot.clock())
        request.task = self._reports.spawn(self._run(request))

    def mark_unwanted(self, trajectory_ids: Sequence[int] | None = None) -> list[RunningRequest]:
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
        by_slot: dict[EngineSlot, list[RunningRequest]] = {}
        for request in requests:
            by_slot.setdefault(request.slot, []).append(request)
        await asyncio.gather(*(self._abort_on(*group) for group in by_slot.items()))

    async def _abort_on(self, slot: EngineSlot, requests: Sequence[RunningRequest]) -> None:
        """Repeated: an abort that overtakes its request is unknown to the engine.

        A held engine ends nothing, and loses aborts: they wait for its release. An engine that
        does not end a request may still serve all others: the request is cut off, and that is all.
        """
        tries = 0
        while tries < _ABORT_TRIES:
            await slot.until_released()
            left = self._unended(requests)
            if not left:
                return
            asked = slot.clock()
            try:
                await slot.client.abort([request.key.name for request in left])
            except EngineError as error:
                await self._reports.suspect(slot, str(error))
            tasks = [request.task for request in self._unended(left) if request.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=_ABORT_RETRY_SECONDS)
            tries += not slot.watch.held_since(asked)
        for request in self._unended(requests):
            why = f"engine {slot.engine_id} did not end it when it was aborted"
            self._cut_off(request, "abort_ignored", why)

    def _unended(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        return [r for r in requests if self._requests.get(r.trajectory_id) is r]

    def end_silent(self, slot: EngineSlot, limit: float) -> None:
        """Cut off requests that have made no token for `limit` seconds of the engine's work.

        Others on the engine do, or it would have been given up as a whole: this stream is lost.
        """
        clock = slot.watch.request_clock(slot.clock())
        for request in self._on(slot):
            if clock - request.read_at > limit:
                why = f"no token came from engine {slot.engine_id} for {limit:g} s"
                self._cut_off(request, "request_silent", why)

    def _cut_off(self, request: RunningRequest, warning: str, why: str) -> None:
        """Read the stream no further and discard what it sends from now on."""
        message = f"request {request.key.name} is cut off: {why}"
        self._statistics.warned(warning, message)
        request.cancel()
        self._ended(request)

    def forget_engine(self, slot: EngineSlot, *, failed: bool) -> None:
        """The engine is given up: its trajectories are finished, partial or refused from now on.

        Call while the scheduler still has the engine: what it submits there meanwhile is
        forgotten too.
        """
        slot.give_up()
        fatal = self._fatal_groups(slot) if failed else set()
        for request in self._on(slot):
            request.cancel()
            self._failures.pop(request.trajectory_id, None)  # the engine's, not its own
            if not request.complete:
                request.complete = self.end_if_complete(request.trajectory_id)
        for request in [r for r in self._on(slot) if r.complete]:
            self._ended(request)
        for request in [r for r in self._on(slot) if r.group_id in fatal]:
            why = f"{_FAILURES_OF_ONE} engines in a row failed before its first token"
            self._reports.refused(request.trajectory_id, request.group_id, why)
            self._ended(request, refused=True)
        for request in self._on(slot):
            del self._requests[request.trajectory_id]
            if request.begun is not None:
                self._store.end_request(request.begun)
        self._statistics.running_changed(len(self._requests))

    def _fatal_groups(self, slot: EngineSlot) -> set[int]:
        """Groups that engine after engine failed to begin, this one too, while others made tokens.

        Engines that fail with no token between them are no evidence about a prompt.
        """
        if slot.watch.held or self._statistics.counts.tokens == self._tokens_at_death:
            return set()
        self._tokens_at_death = self._statistics.counts.tokens
        begun = {r.group_id for r in self._on(slot) if r.prefills and r.group_id >= 0}
        self._deaths.update(begun)
        return {group_id for group_id in begun if self._deaths[group_id] >= _FAILURES_OF_ONE}

    def _on(self, slot: EngineSlot) -> list[RunningRequest]:
        return [request for request in self._requests.values() if request.slot is slot]

    def end_if_complete(self, trajectory_id: int) -> bool:
        """Finish a trajectory whose request is gone if it needs no other; whether it was so.

        Its end is in the store, and on its way to the disk, when this returns.
        """
        length, last = self._store.response_end(trajectory_id)
        limit, forced = self._length_limit(trajectory_id)
        reason = end_of(length, last, limit, () if forced else self._stop_token_ids)
        if reason is None:
            return False
        self._store.end(trajectory_id, reason)
        return True

    # ------------------------------------------------------------ one request

    async def _run(self, request: RunningRequest) -> None:
        refused = False
        try:
            await self._read(request)
        except RequestRefused as refusal:
            refused = True
            self._reports.refused(request.trajectory_id, request.group_id, str(refusal))
        except EngineError as error:
            refused = await self._failed(request, str(error))
        finally:
            request.slot.watch.request_ended(request.slot.clock())
        if self._requests.get(request.trajectory_id) is not request or self._closed:
            return  # its engine was given up or it was cut off: the scheduler has that already
        self._ended(request, refused=refused)

    async def _read(self, request: RunningRequest) -> None:
        slot = request.slot
        if request.abort_wanted:
            return
        # Closed before the request is reported to have ended: it may run elsewhere at once.
        async with aclosing(slot.client.generate(self._generation_request(request))) as chunks:
            await self._read_chunks(request, chunks)

    async def _read_chunks(
        self, request: RunningRequest, chunks: AsyncIterator[TokenChunk]
    ) -> None:
        slot, trajectory_id = request.slot, request.trajectory_id
        async for chunk in chunks:
            if request.complete:
                self._statistics.warned(
                    "tokens_after_eos",
                    f"engine {slot.engine_id} sent more for trajectory {trajectory_id} after the "
                    "end of the response",
                )
                continue
            if chunk.end == "abort" and not len(chunk.token_ids):
                return  # as thousands do at once, at a boundary
            if len(chunk.token_ids) and not await slot.gate.passes(chunk.version):
                why = f"generated tokens of version {chunk.version}, which it was not sent"
                self._reports.give_up(slot, f"engine {slot.engine_id} {why}")
                return
            try:
                self._take(request, chunk)
            except SupersededRequest as superseded:
                self._statistics.warned("superseded_append", str(superseded))
                return
            now = slot.clock()
            slot.failed_prompts.clear()
            slot.watch.token(now)
            request.read_at = slot.watch.request_clock(now)
            request.prefills = False
            self._failures.pop(trajectory_id, None)
            self._deaths.pop(request.group_id, None)
            self._reports.accepted()
            slot.watch.store_begins(now)
            try:
                if request.complete:
                    await self._store.sync()
                else:
                    await self._store.written(trajectory_id)
            finally:
                slot.watch.store_ends(slot.clock())

    def _ended(self, request: RunningRequest, *, refused: bool = False) -> None:
        """No stream of it is read any more: its trajectory is finished, partial or refused."""
        trajectory_id = request.trajectory_id
        del self._requests[trajectory_id]
        self._statistics.running_changed(len(self._requests))
        if request.complete or self.end_if_complete(trajectory_id):
            self._reports.feed(ev.Finished(trajectory_id))
            return
        self._store.end_request(request.key)
        self._reports.feed(ev.Refused(trajectory_id) if refused else ev.Aborted(trajectory_id))

    def _take(self, request: RunningRequest, chunk: TokenChunk) -> None:
        """Store a chunk's tokens and its end together: a successor finds both or neither."""
        end = None if chunk.end in (None, "abort") else FinishReason(chunk.end)
        engine_id = request.slot.engine_id
        self._store.append(
            request.key, chunk.token_ids, chunk.logprobs, chunk.version, engine_id, end=end
        )
        request.complete = end is not None
        count = len(chunk.token_ids)
        if not count:
            return
        self._statistics.generated(count)
        if chunk.queued_seconds:
            self._reports.feed(ev.LeftQueue(request.trajectory_id, chunk.queued_seconds))
        self._reports.feed(ev.TokensArrived(request.trajectory_id, count, chunk.version.number))

    async def _failed(self, request: RunningRequest, why: str) -> bool:
        """A stream broke off: whose fault is it? True when it is the request's own."""
        slot, trajectory_id = request.slot, request.trajectory_id
        await self._reports.suspect(slot, why)
        if slot.given_up or request.complete:
            return False
        slot.failed_prompts.add(request.group_id)
        self._failures[trajectory_id] += 1
        if len(slot.failed_prompts) >= _FAILED_PROMPTS_IN_ROW:
            count = len(slot.failed_prompts)
            self._reports.give_up(
                slot,
                f"engine {slot.engine_id} answers, but requests of {count} prompts in a row failed "
                f"on it, the last: {why}",
            )
            return False
        if self._failures[trajectory_id] < _FAILURES_OF_ONE:
            return False
        del self._failures[trajectory_id]
        self._reports.refused(
            trajectory_id,
            request.group_id,
            f"it failed {_FAILURES_OF_ONE} times in a row on engines that serve others: {why}",
        )
        return True

    def _generation_request(self, request: RunningRequest) -> GenerationRequest:
        trajectory = self._store.load_trajectory(request.trajectory_id)
        request.group_id = trajectory.group_id
        response = [segment.token_ids for segment in trajectory.segments]
        limit, forced = self._length_limit(request.trajectory_id)
        return GenerationRequest(
            request_id=request.key.name,
            input_ids=np.concatenate([trajectory.prompt.token_ids, *response]).astype(np.int32),
            max_new_tokens=limit - trajectory.response_length,
            sampling=self._config.sampling,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=forced,
        )

    def _length_limit(self, trajectory_id: int) -> tuple[int, bool]:
        """Tokens that its response may have, and whether it must have just so many."""
        lengths = self._config.experiment.forced_lengths
        if lengths:
            return lengths[trajectory_id % len(lengths)], True
        return self._config.sampling.max_new_tokens, False


def end_of(
    length: int, last: int | None, limit: int, stop_token_ids: Sequence[int]
) -> FinishReason | None:
    """Return the reason for which a response is complete, by its tokens; None: it can go on.

    `last` is its last token if the policy made it. An engine reports the reason with that token,
    but the report is lost when the request is cut off just then; and a request for what follows
    would be answered with tokens behind the end.
    """
    if last in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= limit else None
