"""Running requests: from the scheduler's `Submit` to `Finished` or `Aborted`, token by token.

Invariants
- Tokens are in the store (at most a chunk of them not yet on disk) before the scheduler hears of
  them; a trajectory's end is on its way to the disk ahead of anything that follows from it.
- A response that is complete is never partial: its end goes to the store with its last tokens,
  with no `await` between, and one that was cut off behind its last token is finished (`end_of`).
- A trajectory has at most one request. Every stream of an engine that is given up is cancelled
  before its trajectory may be submitted again; nothing of it is kept, and nobody is blamed for it.
- What an engine says after the end of a response is not heard; that it did is a warning.
- Several failures in a row are the engine's fault; failures of one request alone end the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.interfaces import (
    EngineClient,
    EngineError,
    GenerationRequest,
    TokenChunk,
)
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.store import TrajectoryStore
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Trajectory,
    TrajectoryState,
)

_MAX_ERRORS_IN_ROW = 3
_MAX_FAILURES_OF_ONE = 6
_ABORT_RETRY_SECONDS = 2.0
_ABORT_TRIES = 10


@dataclass(eq=False)
class EngineSlot:
    """One engine as the driver sees it; `up` once it holds the current weights.

    `preemptions_seen` is None until its first report: what it counted for somebody else before (a
    trainer that was lost, an update that it missed) is no news.
    """

    client: EngineClient
    up: bool = False
    version: PolicyVersion | None = None
    errors_in_row: int = 0
    last_token_at: float = field(default_factory=time.monotonic)
    preemptions_seen: int | None = None
    running: int = 0


@dataclass(eq=False)
class Request:
    """One running request; `abort_wanted` is seen by a request that has not been sent yet."""

    trajectory_id: int
    request_id: str
    slot: EngineSlot
    abort_wanted: bool = False
    complete: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Reports:
    """Where news goes: events, an engine that is to blame, a failure, a task to look after.

    Blame goes by slot: an engine that was restarted meanwhile has the same id, and is not to blame.
    """

    feed: Callable[[ev.Event], None]
    blame: Callable[[EngineSlot, str], None]
    fail: Callable[[ComponentFailure], None]
    watch: Callable[[asyncio.Task[None]], None]


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
        self._requests: dict[int, Request] = {}
        self._failures: Counter[int] = Counter()
        self._serial = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    async def close(self) -> None:
        """Cancel every request; what arrived is in the store."""
        self._closed = True
        tasks = [request.task for request in self._requests.values() if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, trajectory_id: int, slot: EngineSlot) -> None:
        """Start a trajectory, or go on with it from its stored tokens."""
        self._store.set_state(trajectory_id, TrajectoryState.RUNNING)
        self._serial += 1
        request = Request(trajectory_id, f"t{trajectory_id}-{self._serial}", slot)
        self._requests[trajectory_id] = request
        slot.running += 1
        self._statistics.running_changed(len(self._requests))
        request.task = asyncio.get_running_loop().create_task(self._run(request))
        self._reports.watch(request.task)

    def of(self, trajectory_ids: Sequence[int] | None = None) -> list[Request]:
        """The running requests of these trajectories (of all), marked as unwanted."""
        wanted = list(self._requests) if trajectory_ids is None else trajectory_ids
        requests = [self._requests[i] for i in wanted if i in self._requests]
        for request in requests:
            request.abort_wanted = True
        return requests

    async def abort(self, requests: Sequence[Request]) -> None:
        """Until all have ended: an abort that overtakes its request is unknown to the engine."""
        left = list(requests)
        for _ in range(_ABORT_TRIES):
            left = self._unended(left)
            if not left:
                return
            by_slot: dict[EngineSlot, list[Request]] = {}
            for request in left:
                by_slot.setdefault(request.slot, []).append(request)
            await asyncio.gather(*(self._post_abort(*group) for group in by_slot.items()))
            tasks = [request.task for request in left if request.task is not None]
            await asyncio.wait(tasks, timeout=_ABORT_RETRY_SECONDS)
        for slot in {request.slot for request in self._unended(left)}:
            self._reports.blame(slot, f"engine {slot.client.engine_id} did not abort its requests")

    def _unended(self, requests: Sequence[Request]) -> list[Request]:
        return [r for r in requests if self._requests.get(r.trajectory_id) is r]

    async def _post_abort(self, slot: EngineSlot, requests: Sequence[Request]) -> None:
        try:
            await slot.client.abort([request.request_id for request in requests])
        except EngineError as error:
            self._reports.blame(slot, str(error))

    def forget_engine(self, slot: EngineSlot) -> None:
        """The engine is given up: its trajectories are finished or partial from now on.

        Call while the scheduler still knows the engine: what it submits there meanwhile is
        forgotten too.
        """
        for request in self._on(slot):
            _cancel(request)  # the store takes no more of it
            if not request.complete:
                request.complete = self.end_if_complete(request.trajectory_id)
        for request in [r for r in self._on(slot) if r.complete]:
            del self._requests[request.trajectory_id]
            self._reports.feed(ev.Finished(request.trajectory_id))
        for request in self._on(slot):
            del self._requests[request.trajectory_id]
            self._store.set_state(request.trajectory_id, TrajectoryState.PARTIAL)
        self._statistics.running_changed(len(self._requests))

    def _on(self, slot: EngineSlot) -> list[Request]:
        return [request for request in self._requests.values() if request.slot is slot]

    def end_if_complete(self, trajectory_id: int) -> bool:
        """Finish a trajectory whose request is gone if it needs no other; whether it was so.

        Its end is in the store, and on its way to the disk, when this returns.
        """
        trajectory = self._store.load_trajectory(trajectory_id)
        limit, forced = self._length_limit(trajectory_id)
        reason = end_of(trajectory, limit, () if forced else self._stop_token_ids)
        if reason is None:
            return False
        self._store.end(trajectory_id, reason)
        return True

    async def _run(self, request: Request) -> None:
        trajectory_id, slot = request.trajectory_id, request.slot
        try:
            async for chunk in self._stream(request):
                if request.complete:
                    self._statistics.warned(
                        "said_after_its_end",
                        f"engine {slot.client.engine_id} went on with trajectory {trajectory_id} "
                        "after it had said that the response was complete",
                    )
                    continue
                slot.errors_in_row = 0
                slot.last_token_at = time.monotonic()
                self._take(request, chunk)
                if request.complete:
                    await self._store.sync()
                else:
                    await self._store.written(trajectory_id)
            self._failures.pop(trajectory_id, None)
        except EngineError as error:
            self._failed(request, str(error))
        finally:
            slot.running -= 1
        if self._requests.get(trajectory_id) is not request or self._closed:
            return  # its engine was given up, and the scheduler knows that already
        del self._requests[trajectory_id]
        self._statistics.running_changed(len(self._requests))
        if request.complete or self.end_if_complete(trajectory_id):
            self._reports.feed(ev.Finished(trajectory_id))
            return
        self._store.set_state(trajectory_id, TrajectoryState.PARTIAL)
        self._reports.feed(ev.Aborted(trajectory_id))

    def _take(self, request: Request, chunk: TokenChunk) -> None:
        """Its tokens, and its end with them: whoever runs next finds both or neither."""
        trajectory_id, engine_id = request.trajectory_id, request.slot.client.engine_id
        end = None if chunk.end in (None, "abort") else FinishReason(chunk.end)
        self._store.append(
            trajectory_id, chunk.token_ids, chunk.logprobs, chunk.version, engine_id, end=end
        )
        request.complete = end is not None
        count = len(chunk.token_ids)
        if not count:
            return
        self._statistics.generated(count)
        self._reports.feed(ev.TokensArrived(trajectory_id, count, chunk.version.number))

    def _failed(self, request: Request, why: str) -> None:
        """Blame the engine when several requests fail in a row, the request when it alone does."""
        slot = request.slot
        slot.errors_in_row += 1
        self._failures[request.trajectory_id] += 1
        if slot.errors_in_row >= _MAX_ERRORS_IN_ROW:
            self._reports.blame(slot, why)
        elif self._failures[request.trajectory_id] >= _MAX_FAILURES_OF_ONE:
            self._reports.fail(
                ComponentFailure(
                    f"trajectory {request.trajectory_id} failed {_MAX_FAILURES_OF_ONE} times: {why}"
                )
            )

    async def _stream(self, request: Request) -> AsyncIterator[TokenChunk]:
        """The engine's stream; empty when the request is already unwanted."""
        if request.abort_wanted:
            return
        async for chunk in request.slot.client.generate(self._generation_request(request)):
            yield chunk

    def _generation_request(self, request: Request) -> GenerationRequest:
        trajectory = self._store.load_trajectory(request.trajectory_id)
        response = [segment.token_ids for segment in trajectory.segments]
        limit, forced = self._length_limit(request.trajectory_id)
        return GenerationRequest(
            request_id=request.request_id,
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
    trajectory: Trajectory, limit: int, stop_token_ids: Sequence[int]
) -> FinishReason | None:
    """Why a response is complete, by its tokens alone; None when it can go on.

    An engine says it with the last token, but that word is lost when the request is cut off just
    then; and a request for what follows would be answered with tokens behind the end.
    """
    last = trajectory.segments[-1:]
    if last and not last[0].from_environment and int(last[0].token_ids[-1]) in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if trajectory.response_length >= limit else None


def _cancel(request: Request) -> None:
    if request.task is not None:
        request.task.cancel()
