"""Starts the worker processes of environments and agents, and calls them for episodes.

The rollout manager and evaluations use this module; `worker.py` and `agents.py` have the code that
runs in the processes.

Invariants
- An episode belongs to one worker, chosen by its number. A worker that dies is started again, and
  then has no open episodes.
- Each call has a time limit, which covers the time limits inside the worker and its queue.
- A call whose worker dies is repeated on a restored environment. The last attempt runs while no
  other episode begins or steps in the worker. So an episode that kills its worker makes only itself
  fail, because it cannot disturb the last attempts of other episodes.
- The key of an episode is registered before its worker is called to begin it. So `forget` closes
  the episode even if the caller of `begin` is canceled or fails while the worker starts the
  episode.
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
# Number of time-limited calls that one step may need: `step`, the computation of its tokens,
# `state`, `get_reward` and `close`.
_CALLS_OF_A_STEP: Final = 5
_MAX_ATTEMPTS: Final = 3
# Largest number of times that one call restores its episode because the worker has lost it.
_MAX_RESTORES: Final = 16
T = TypeVar("T")


class SharedExclusiveLock:
    """Lock on one worker process, which callers hold either together or one of them exclusively.

    While a caller waits for the exclusive lock, new shared callers wait too.
    """

    def __init__(self) -> None:
        self.holders = 0
        self._exclusive_waiters = 0
        self._exclusive = False
        self._changed = asyncio.Event()

    def _is_available(self, exclusive: bool) -> bool:
        return not self._exclusive and not (self.holders if exclusive else self._exclusive_waiters)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def acquired(self, *, exclusive: bool) -> AsyncIterator[None]:
        """Hold the lock during the block, shared with other callers or exclusively.

        An exclusive caller waits until no other caller holds the lock. That takes a limited time,
        because the calls of the other callers have time limits.
        """
        self._exclusive_waiters += int(exclusive)
        try:
            while not self._is_available(exclusive):
                await self._changed.wait()
            self.holders, self._exclusive = self.holders + 1, exclusive
        finally:
            self._exclusive_waiters -= int(exclusive)
            self._wake()
        try:
            yield
        finally:
            self.holders, self._exclusive = self.holders - 1, False
            self._wake()


class EnvironmentWorkers:
    """The `episode.workers` worker processes of a run's environment or agent.

    They start when this object is created, and end when the process backend that started them
    is closed.
    """

    def __init__(self, config: RunConfig, backend: ProcessBackend, model_path: str = "") -> None:
        """Start the worker processes on `backend`, without waiting until they are ready.

        `model_path` is the folder of the tokenizer; if empty, that of the run's model is used.
        """
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
        self._locks = [SharedExclusiveLock() for _ in self._workers]

    def locked(self, number: int, *, exclusive: bool) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds the lock on the worker of episode `number`.

        With `exclusive`, no other call to this worker runs during the block.
        """
        return self._locks[number % len(self._locks)].acquired(exclusive=exclusive)

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """Play a trial episode with made-up responses in the first worker; return measurements.

        `payload` is that of the prompt for which the episode is played. See
        `EnvironmentWorker.trial_run`.
        """
        return await self.call(0, 2, lambda worker: worker.trial_run(payload))

    async def call(
        self,
        number: int,
        steps: int,
        what: Callable[["EnvironmentProcess | AgentProcess"], Awaitable[T]],
    ) -> T:
        """Call the worker process of episode `number` with a time limit, and return its reply.

        The time limit covers `steps` steps, the start of the worker and the wait for its threads.

        Args:
            number: Number of the episode, which determines its worker.
            steps: Largest number of steps of the environment that the call makes.
            what: Calls a method of the worker.

        Raises:
            RemoteObjectLost: The worker died.
            ComponentFailure: The call exceeded the time limit.
            EnvironmentFault: The environment or agent failed.
        """
        index, settings = number % len(self._workers), self._settings
        # The calls of other callers use the same threads. They delay this call by about one step
        # for every `episode.threads` of them.
        rounds = steps + self._locks[index].holders / settings.threads
        limit = _START_SECONDS + rounds * _CALLS_OF_A_STEP * settings.step_seconds
        return await self._workers[index].call(what, limit=limit)


class EpisodeSessions:
    """Plays one caller's episodes in worker processes, and restores them after a worker's death.

    Each open episode has a key, under which its worker knows it; callers use episode numbers.

    Attributes:
        counts: Numbers of restored episodes (`restored`), of calls that failed with the death of
            their worker (`workers_lost`), of responses that an environment may have received twice
            (`steps_repeated`), and of episodes that could not be restored (`replay_mismatches`).
    """

    def __init__(self, workers: EnvironmentWorkers) -> None:
        self._workers = workers
        # Keys differ between callers, because an earlier caller's episodes may still be open.
        self._caller = secrets.token_hex(4)
        self._serials = itertools.count()
        self._keys: dict[int, str] = {}
        self.counts: Counter[str] = Counter()

    async def begin(
        self, number: int, payload: Mapping[str, Any], input_budget: int | None = None
    ) -> EpisodeStart:
        """Start episode `number` in its worker, and return the input of its first turn.

        Args:
            number: Number of the episode, unique among the caller's open episodes.
            payload: Payload of the task's prompt, from which the environment's row is made.
            input_budget: Largest number of tokens of an agent's first call; None for no limit.

        Raises:
            EnvironmentFault: The environment or agent failed, or its worker died three times.
        """

        async def start() -> EpisodeStart:
            key = self._new_key(number)
            return await self._workers.call(
                number, 1, lambda worker: worker.begin(key, payload, input_budget)
            )

        return await self._with_retries(number, start)

    async def step(
        self,
        number: int,
        payload: Mapping[str, Any],
        turns: Sequence[Turn],
        answer_ids: Sequence[int],
        *,
        input_budget: int,
        last: bool,
        logprobs: Sequence[float] = (),
        may_repeat: bool = False,
    ) -> StepResult:
        """Send the response of the last turn to episode `number`'s environment; return its reply.

        An episode that is not open in its worker, as after the worker's death, is restored first.

        Args:
            number: Number of the episode.
            payload: Payload of the task's prompt, from which the environment's row is made.
            turns: All turns of the episode.
            answer_ids: Tokens of the response of the last turn.
            input_budget: Number of tokens that the next turn's input may add to its branch.
            last: Whether a limit of the episode is reached, so that there is no next turn.
            logprobs: Log-probability of each token of the response; only agents need them.
            may_repeat: Whether an earlier caller, which did not store the reply, may already have
                sent this response. Sending it is then counted as a repetition.

        Raises:
            EnvironmentFault: The environment or agent failed, or its worker died three times.
            ReplayDiffers: The episode cannot be restored.
        """
        turn, sent = turns[-1].number, may_repeat

        async def send() -> StepResult:
            nonlocal sent
            if number not in self._keys:
                await self._restore(number, payload, turns)
            if sent:
                self.counts["steps_repeated"] += 1
            sent, key = True, self._keys[number]
            try:
                reply = await self._workers.call(
                    number,
                    1,
                    lambda worker: worker.step(key, answer_ids, turn, input_budget, last, logprobs),
                )
            except EpisodeUnknown:
                sent = False
                raise
            self.counts.update(reply.counts)
            if reply.ended is not None:
                del self._keys[number]
            return reply

        return await self._with_retries(number, send)

    async def forget(self, number: int) -> str | None:
        """Close episode `number` in its worker, if it is open.

        Returns:
            The error message from closing the environment; None if there was no error.
        """
        key = self._keys.pop(number, None)
        if key is not None:
            try:
                return await self._workers.call(number, 1, lambda worker: worker.forget(key))
            except RemoteObjectLost:
                return None  # The worker died, and its open episodes with it.
            except ComponentFailure as late:
                return str(late)
        return None

    async def _restore(
        self, number: int, payload: Mapping[str, Any], turns: Sequence[Turn]
    ) -> None:
        """Restore episode `number` in its worker from its stored `turns`.

        The success or failure is counted. The worker opens the episode under a new key, because a
        key is never used twice.

        Raises:
            ReplayDiffers: The episode cannot be restored.
        """
        key = self._new_key(number)
        try:
            await self._workers.call(
                number, len(turns), lambda worker: worker.restore(key, payload, turns)
            )
        except (ReplayDiffers, EnvironmentFault) as error:
            self.counts["replay_mismatches"] += 1
            raise ReplayDiffers(f"an episode cannot be restored: {error}") from error
        self.counts["restored"] += 1

    async def _with_retries(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()` for episode `number`, and repeat it if the worker dies; return the result.

        It is also repeated if the worker does not have the episode. During the last attempt after
        deaths, no other episode begins or steps in the worker.

        Raises:
            EnvironmentFault: The worker died during each of `_MAX_ATTEMPTS` attempts.
            EpisodeUnknown: The worker did not have the episode in more than `_MAX_RESTORES`
                attempts, because it kept dying between them.
        """
        lost = unknown = 0
        while True:
            try:
                async with self._workers.locked(number, exclusive=lost == _MAX_ATTEMPTS - 1):
                    return await call()
            except EpisodeUnknown:
                # The worker died and was started again before this call, without the episode.
                unknown += 1
                if unknown > _MAX_RESTORES:
                    raise
            except RemoteObjectLost as error:
                lost += 1
                self.counts["workers_lost"] += 1
                if lost == _MAX_ATTEMPTS:
                    raise EnvironmentFault(
                        f"the worker of this episode died {_MAX_ATTEMPTS} times: {error}"
                    ) from error
            # Remove the key, which makes the next attempt of a step restore the episode.
            self._keys.pop(number, None)

    def _new_key(self, number: int) -> str:
        """Register and return a new key for episode `number`, under which its worker opens it.

        A key is never used twice, so a restored episode gets a new key too.
        """
        key = self._keys[number] = f"{self._caller}.{number}.{next(self._serials)}"
        return key
