"""Workers of environments as the rollout side calls them.

Invariants
- An episode belongs to one worker, by its number; a worker that dies is started again, and holds
  nothing then.
- A call ends within a limit that covers what the worker's own limits allow.
- When a worker dies, what was asked of it is asked again, of a restored environment; the last time
  one after the other: the episode that ends its worker must not cost others theirs.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

from megatron_async.config import RunConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import (
    EnvironmentWorker,
    EpisodeUnknown,
    Opened,
    Rehearsed,
    ReplayDiffers,
    Stepped,
)
from megatron_async.errors import ComponentFailure
from megatron_async.places.place import UNLIMITED, Place, PlacedLost
from megatron_async.trajectory.types import Turn

_START_SECONDS: Final = 180.0
_CALLS_OF_A_STEP: Final = 4  # of the user's methods: step, state, get_reward, close
_TRIES: Final = 3
_MOST_RESTORED: Final = 16  # for one call
T = TypeVar("T")


class EnvironmentWorkers:
    """`environment.workers` processes of `place`, started when made; they end with it."""

    def __init__(self, config: RunConfig, place: Place, model_path: str = "") -> None:
        """`model_path`: of the tokenizer, where it is not the run's own."""
        self._settings = config.episodes
        arguments: tuple[Any, ...] = (
            config.episodes.model_dump_json(),
            config.task.model_dump_json(),
            model_path or config.model.path,
        )
        what: type = EnvironmentWorker
        if config.agent.used:
            from megatron_async.environments.agents import AgentWorker

            what = AgentWorker
            arguments += (config.sampling.model_dump_json(), config.scores)
        self._workers = [
            place.start(what, *arguments, name=f"environments{index}", restarts=UNLIMITED)
            for index in range(config.episodes.workers)
        ]

    async def begin(self, number: int, key: str, payload: Mapping[str, Any]) -> Opened:
        """See `EnvironmentWorker.begin`; `number` is the episode's."""
        return await self._call(number, 1, "begin", key, payload)  # type: ignore[no-any-return]

    async def rehearse(self, payload: Mapping[str, Any]) -> Rehearsed:
        """See `EnvironmentWorker.rehearse`."""
        return await self._call(0, 2, "rehearse", payload)  # type: ignore[no-any-return]

    async def step(
        self,
        number: int,
        key: str,
        answer_ids: Sequence[int],
        turn: int,
        room: int,
        last: bool,
        logprobs: Sequence[float] = (),
    ) -> Stepped:
        """See `EnvironmentWorker.step`; `logprobs` of the answer are for agents alone."""
        of_agents = (logprobs,) if logprobs else ()
        asked = ("step", key, answer_ids, turn, room, last, *of_agents)
        return await self._call(number, 1, *asked)  # type: ignore[no-any-return]

    async def restore(
        self, number: int, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]
    ) -> None:
        """See `EnvironmentWorker.restore`."""
        await self._call(number, len(turns), "restore", key, payload, turns)

    async def forget(self, number: int, key: str) -> None:
        """See `EnvironmentWorker.forget`."""
        await self._call(number, 1, "forget", key)

    async def _call(self, number: int, steps: int, *asked: Any) -> Any:
        limit = _START_SECONDS + steps * _CALLS_OF_A_STEP * self._settings.step_seconds
        return await self._workers[number % len(self._workers)].call(*asked, limit=limit)


class HeldEpisodes:
    """Episodes that one caller plays: their keys, and what follows when a worker has died.

    `counts`: restored (environments), workers_lost (calls that a worker's death took),
    steps_repeated (those that may have had an effect before), replay_differs.
    """

    def __init__(self, workers: EnvironmentWorkers) -> None:
        self._workers = workers
        self._caller = secrets.token_hex(4)  # what an earlier one holds is not this one's
        self._serials = itertools.count()
        self._keys: dict[int, str] = {}
        self._alone = asyncio.Lock()
        self.counts: Counter[str] = Counter()

    async def begin(self, number: int, payload: Mapping[str, Any]) -> Opened:
        """Begin an episode. Raises EnvironmentFault."""

        async def begun() -> Opened:
            key = self._new_key(number)
            opened = await self._workers.begin(number, key, payload)
            self._keys[number] = key
            return opened

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
    ) -> Stepped:
        """Hand the answer of the last of `turns` to the environment, which is restored if need be.

        Raises EnvironmentFault, and ReplayDiffers where it cannot be restored.
        """
        turn = turns[-1].number

        async def stepped() -> Stepped:
            if number not in self._keys:
                await self._restore(number, payload, turns)
            key = self._keys[number]
            reply = await self._workers.step(number, key, answer_ids, turn, room, last, logprobs)
            self.counts.update(reply.counts)
            if reply.ended is not None:
                del self._keys[number]
            return reply

        return await self._tried(number, stepped)

    async def forget(self, number: int) -> None:
        """Close an episode, if it is held."""
        key = self._keys.pop(number, None)
        if key is not None:
            with suppress(EnvironmentFault, ComponentFailure):
                await self._workers.forget(number, key)

    async def _restore(
        self, number: int, payload: Mapping[str, Any], turns: Sequence[Turn]
    ) -> None:
        key = self._new_key(number)
        try:
            await self._workers.restore(number, key, payload, turns)
        except (ReplayDiffers, EnvironmentFault) as error:
            self.counts["replay_differs"] += 1
            raise ReplayDiffers(f"an environment cannot go on: {error}") from error
        self.counts["restored"] += 1
        self._keys[number] = key

    async def _tried(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, which is repeated when its worker dies; the last time alone."""
        lost = unknown = 0
        while True:
            try:
                async with self._alone if lost == _TRIES - 1 else nullcontext():
                    return await call()
            except EpisodeUnknown:  # the worker had died before
                unknown += 1
                if unknown > _MOST_RESTORED:
                    raise
            except PlacedLost as error:
                lost += 1
                self.counts["workers_lost"] += 1
                if lost == _TRIES:
                    raise EnvironmentFault(f"its worker died {_TRIES} times: {error}") from error
                self.counts["steps_repeated"] += number in self._keys
            except BaseException:
                self._keys.pop(number, None)
                raise
            self._keys.pop(number, None)

    def _new_key(self, number: int) -> str:
        return f"{self._caller}.{number}.{next(self._serials)}"
