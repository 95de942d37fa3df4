"""Workers of environments as the rollout side calls them.

Invariants
- An episode belongs to one worker, by its number; a worker that dies is started again, and holds
  nothing then.
- A call ends within a limit that covers what the worker's own limits allow, and its queue.
- When a worker dies, what was asked of it is asked again, of a restored environment; the last time
  with nothing else under way there: the episode that ends its worker must not cost others theirs.
- An episode's key is known before a worker is asked to begin it: what is under way there when its
  caller is canceled, or fails, is closed when it is forgotten.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from megatron_async.config import RunConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import (
    EnvironmentProcess,
    EpisodeStart,
    EpisodeUnknown,
    ReplayDiffers,
    StepResult,
    TrialEpisode,
)
from megatron_async.errors import ComponentFailure
from megatron_async.process_backends.backend import (
    UNLIMITED,
    ProcessBackend,
    RemoteObject,
    RemoteObjectLost,
)
from megatron_async.trajectory.types import Turn

if TYPE_CHECKING:
    from megatron_async.environments.agents import AgentProcess

_START_SECONDS: Final = 180.0
_CALLS_OF_A_STEP: Final = 5  # step, its tokens, state, get_reward, close
_TRIES: Final = 3
_MOST_RESTORED: Final = 16  # for one call
T = TypeVar("T")


class SharedExclusiveLock:
    """The way to one worker: whoever wants it alone waits for those inside, and others for him."""

    def __init__(self) -> None:
        self.inside = 0
        self._wanting = 0  # it alone
        self._alone = False
        self._changed = asyncio.Event()

    def _opens(self, alone: bool) -> bool:
        return not self._alone and not (self.inside if alone else self._wanting)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def through(self, *, alone: bool) -> AsyncIterator[None]:
        """Be inside for the time of the block; those inside have limits."""
        self._wanting += alone
        try:
            while not self._opens(alone):
                await self._changed.wait()
            self.inside, self._alone = self.inside + 1, alone
        finally:
            self._wanting -= alone
            self._wake()
        try:
            yield
        finally:
            self.inside, self._alone = self.inside - 1, False
            self._wake()


class EnvironmentWorkers:
    """`episode.workers` processes of `place`, started when made; they end with it."""

    def __init__(self, config: RunConfig, backend: ProcessBackend, model_path: str = "") -> None:
        """`model_path`: of the tokenizer, where it is not the run's own."""
        self._settings = config.episode
        what: type[EnvironmentProcess] | type[AgentProcess] = EnvironmentProcess
        if config.agent.used:
            from megatron_async.environments import agents

            what = agents.AgentProcess
        path = model_path or config.model.path
        self._workers: list[RemoteObject[EnvironmentProcess | AgentProcess]] = [
            backend.start(what, config, path, name=f"environments{index}", restarts=UNLIMITED)
            for index in range(config.episode.workers)
        ]
        self._doors = [SharedExclusiveLock() for _ in self._workers]

    def through(self, number: int, *, alone: bool) -> AbstractAsyncContextManager[None]:
        """Ask inside, for the episode `number`; `alone`: nothing else is asked meanwhile."""
        return self._doors[number % len(self._doors)].through(alone=alone)

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """See `EnvironmentWorker.rehearse`."""
        return await self.call(0, 2, lambda worker: worker.trial_run(payload))

    async def call(
        self,
        number: int,
        steps: int,
        what: Callable[["EnvironmentProcess | AgentProcess"], Awaitable[T]],
    ) -> T:
        """Make a call of the worker of the episode `number`, which takes so many steps at most."""
        index, settings = number % len(self._workers), self._settings
        turns = steps + self._doors[index].inside / settings.threads  # of the threads
        limit = _START_SECONDS + turns * _CALLS_OF_A_STEP * settings.step_seconds
        return await self._workers[index].call(what, limit=limit)


class EpisodeSessions:
    """Episodes that one caller plays: their keys, and what follows when a worker has died.

    `counts`: restored (environments), workers_lost (calls that a worker's death took),
    steps_repeated (answers that an environment may have got before), replay_mismatches.
    """

    def __init__(self, workers: EnvironmentWorkers) -> None:
        self._workers = workers
        self._caller = secrets.token_hex(4)  # what an earlier one holds is not this one's
        self._serials = itertools.count()
        self._keys: dict[int, str] = {}
        self.counts: Counter[str] = Counter()

    async def begin(
        self, number: int, payload: Mapping[str, Any], room: int | None = None
    ) -> EpisodeStart:
        """Begin an episode; `room`: tokens of a first call. Raises EnvironmentFault."""

        async def begun() -> EpisodeStart:
            key = self._new_key(number)
            return await self._workers.call(
                number, 1, lambda worker: worker.begin(key, payload, room)
            )

        return await self._tried(number, begun)

    async def step(
        self,
        number: int,
        payload: Mapping[str, Any],
        turns: Sequence[Turn],
        answer_ids: Sequence[int],
        *,
        room: int,
        last: bool,
        logprobs: Sequence[float] = (),
        asked_before: bool = False,
    ) -> StepResult:
        """Hand the answer of the last of `turns` to the environment, which is restored if need be.

        `asked_before`: an earlier caller may have done so. Raises EnvironmentFault, and
        ReplayDiffers where it cannot be restored.
        """
        turn, asked = turns[-1].number, asked_before

        async def stepped() -> StepResult:
            nonlocal asked
            if number not in self._keys:
                await self._restore(number, payload, turns)
            if asked:
                self.counts["steps_repeated"] += 1
            asked, key = True, self._keys[number]
            try:
                reply = await self._workers.call(
                    number,
                    1,
                    lambda worker: worker.step(key, answer_ids, turn, room, last, logprobs),
                )
            except EpisodeUnknown:
                asked = False
                raise
            self.counts.update(reply.counts)
            if reply.ended is not None:
                del self._keys[number]
            return reply

        return await self._tried(number, stepped)

    async def forget(self, number: int) -> str | None:
        """Close an episode, if it is held; what was wrong with that."""
        key = self._keys.pop(number, None)
        if key is not None:
            try:
                return await self._workers.call(number, 1, lambda worker: worker.forget(key))
            except RemoteObjectLost:
                return None  # and with it what it held
            except ComponentFailure as late:
                return str(late)
        return None

    async def _restore(
        self, number: int, payload: Mapping[str, Any], turns: Sequence[Turn]
    ) -> None:
        key = self._new_key(number)
        try:
            await self._workers.call(
                number, len(turns), lambda worker: worker.restore(key, payload, turns)
            )
        except (ReplayDiffers, EnvironmentFault) as error:
            self.counts["replay_mismatches"] += 1
            raise ReplayDiffers(f"an environment cannot go on: {error}") from error
        self.counts["restored"] += 1

    async def _tried(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, which is repeated when its worker dies; the last time alone."""
        lost = unknown = 0
        while True:
            try:
                async with self._workers.through(number, alone=lost == _TRIES - 1):
                    return await call()
            except EpisodeUnknown:  # the worker had died before
                unknown += 1
                if unknown > _MOST_RESTORED:
                    raise
            except RemoteObjectLost as error:
                lost += 1
                self.counts["workers_lost"] += 1
                if lost == _TRIES:
                    raise EnvironmentFault(f"its worker died {_TRIES} times: {error}") from error
            self._keys.pop(number, None)

    def _new_key(self, number: int) -> str:
        """The key of an episode from now on; what is asked of its worker has it in it."""
        key = self._keys[number] = f"{self._caller}.{number}.{next(self._serials)}"
        return key
