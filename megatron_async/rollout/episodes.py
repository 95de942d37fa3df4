"""Episodes of a run: from the scheduler's `StartEpisode` and `StepEnvironment` to its events.

From an answer to a training sample: an answer is complete (`TurnEnded`); the scheduler asks for
`StepEnvironment`; `environments/worker.py` steps the environment and makes tokens of its reply; the
scheduler gets `EnvironmentReady` for the next turn, or `EpisodeEnded`. Then `scoring.py` adds the
rewards of the turns up, and a complete group goes through `driver._emit` to
`trajectory/packing.py`, which makes one sequence of each branch (`Trajectory.runs`).

`play` plays an episode of an evaluation by the same calls of the same workers, without a store.

Invariants
- An environment gets an answer only when that is committed; what it sends back is in the store, in
  one transaction, before the scheduler hears of it.
- A trajectory that is dropped or starts again is forgotten first; a reply that comes later meets a
  superseded call in the store, and is discarded.
- A failure costs its own episode (`episode.on_failure`), and one that cannot be restored begins
  anew. `FAILURES` of others in a row without a success end the run.
- An episode's time goes on after a death, from the last reply of its environment.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.config.environment import EpisodeConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import ReplayDiffers
from megatron_async.environments.workers import EnvironmentWorkers, EpisodeSessions
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.rollout.background import BackgroundTasks
from megatron_async.rollout.responses import EnginePool, ResponseSpec, ResponseTokens, respond
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.store.episodes import TurnOutcome
from megatron_async.store.records import SupersededRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    LEFT,
    FinishReason,
    IntArray,
    PolicyVersion,
    RequestKey,
    TrajectoryState,
    Turn,
    last_of,
)

_logger = logging.getLogger(__name__)

PLAYED: Final = "played_seconds"
"""In a stored answer: for how long its episode had been played when the environment replied."""
FAILURES: Final = 64
_MOST_NOTICES: Final = 16
UNLIMITED_ROOM: Final = 1 << 31


def input_budget(longest: int | None, taken: int, max_new_tokens: int) -> int:
    """Tokens that a turn's input may add so that an answer fits behind it."""
    return UNLIMITED_ROOM if longest is None else longest - taken - max_new_tokens


class Episodes:
    """All environments of one driver."""

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        workers: EnvironmentWorkers | None,
        statistics: RolloutStatistics,
        background: BackgroundTasks,
        feed: Callable[[ev.Event], None],
        longest: Callable[[], int | None],
    ) -> None:
        """`feed` gets the events, for the scheduler; `longest`: tokens that an engine takes.

        Without `workers` there are no episodes.
        """
        self._settings, self._shown = config.episode, config.player.display_name
        self._logprobs = config.agent.used
        self._max_new_tokens = config.sampling.max_new_tokens
        self._store = store
        self._episodes = None if workers is None else EpisodeSessions(workers)
        self._statistics = statistics
        self._background = background
        self._feed = feed
        self._longest = longest
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._began: dict[int, float] = {}
        self._asked_before: set[int] = set()
        self._failures = 0
        self._noticed: set[str] = set()

    @property
    def _held(self) -> EpisodeSessions:
        assert self._episodes is not None  # else the scheduler begins none
        return self._episodes

    def recovered(self, groups: Sequence[ev.RecoveredGroup]) -> None:
        """Open episodes of a life before go on, with the time for which they had been played."""
        if self._episodes is None:
            return
        for known in (known for group in groups for known in group.trajectories):
            if known.state in (TrajectoryState.WAITING, TrajectoryState.PARTIAL):
                turns = self._store.load_trajectory(known.trajectory_id).turns
                before = (turns[-2].answer or {}).get(PLAYED, 0.0) if len(turns) > 1 else 0.0
                self._began[known.trajectory_id] = time.monotonic() - before
            if known.state is TrajectoryState.WAITING:
                self._asked_before.add(known.trajectory_id)

    def begin(self, trajectory_id: int) -> None:
        """Begin an episode's environment."""
        self._began[trajectory_id] = time.monotonic()
        self._calls[trajectory_id] = self._background.spawn(self._asked(trajectory_id, self._begin))

    def step(self, trajectory_id: int) -> None:
        """Hand the answer of its newest turn to its environment."""
        self._calls[trajectory_id] = self._background.spawn(self._asked(trajectory_id, self._step))

    def forget(self, trajectory_id: int) -> None:
        """The trajectory leaves or starts again: what is under way is not waited for."""
        if self._episodes is None:
            return
        call = self._calls.pop(trajectory_id, None)
        if call is not None:
            call.cancel()
        self._began.pop(trajectory_id, None)
        self._asked_before.discard(trajectory_id)
        self._background.spawn(self._forgotten(trajectory_id))

    async def _forgotten(self, trajectory_id: int) -> None:
        fault = await self._held.forget(trajectory_id)
        if fault is not None:
            self._warn(trajectory_id, fault)

    async def _asked(
        self,
        trajectory_id: int,
        ask: Callable[[int, RequestKey], Coroutine[Any, Any, ev.Event]],
    ) -> None:
        await self._store.sync()
        call, asked = self._store.episodes.begin_step(trajectory_id), time.monotonic()
        try:
            event = await ask(trajectory_id, call)
        except SupersededRequest as superseded:
            self._statistics.warned("superseded_append", str(superseded))
            return
        except (EnvironmentFault, ComponentFailure, UserError) as error:
            event = self._failed(trajectory_id, call, error)
        else:
            if ask == self._step:  # one that begins and then always fails has no success
                self._failures = 0
        self._statistics.environment_called(time.monotonic() - asked, self._held.counts)
        del self._calls[trajectory_id]
        if isinstance(event, ev.EpisodeEnded | ev.EnvironmentFailed):
            self._began.pop(trajectory_id, None)
        self._feed(event)

    async def _begin(self, trajectory_id: int, call: RequestKey) -> ev.Event:
        prompt = self._store.load_trajectory(trajectory_id).prompt
        taken = len(prompt.token_ids)
        room = input_budget(self._longest(), taken, self._max_new_tokens)
        opened = await self._held.begin(trajectory_id, prompt.payload, room)
        self._notice(opened.notices)
        added = len(opened.token_ids)
        if added > room:
            raise EnvironmentFault(
                f"the first prompt has {taken + added} tokens, which with sampling.max_new_tokens "
                f"{self._max_new_tokens} is longer than the {self._longest()} that an engine takes"
            )
        self._store.episodes.begin_turn(
            call, opened.token_ids, opened.messages, parent=None, state=opened.state
        )
        return ev.EnvironmentReady(trajectory_id, added)

    async def _step(self, trajectory_id: int, call: RequestKey) -> ev.Event:
        trajectory = self._store.load_trajectory(trajectory_id)
        turns, payload = trajectory.turns, trajectory.prompt.payload
        prompt, answer = trajectory.input_parts()
        taken = sum(map(len, (*prompt, *answer)))
        made = [s for s in trajectory.segments_of(turns[-1]) if not s.from_environment]
        stepped = await self._held.step(
            trajectory_id,
            payload,
            turns,
            [int(token) for piece in answer for token in piece],
            logprobs=[float(n) for s in made for n in s.logprobs] if self._logprobs else (),
            room=input_budget(self._longest(), taken, self._max_new_tokens),
            last=self._is_last(trajectory_id, turns[-1]),
            asked_before=trajectory_id in self._asked_before,
        )
        self._asked_before.discard(trajectory_id)
        self._notice(stepped.notices)
        if stepped.fault is not None:
            self._warn(trajectory_id, stepped.fault)
        played = round(time.monotonic() - self._began[trajectory_id], 2)
        outcome = TurnOutcome({**stepped.answer, PLAYED: played}, stepped.reward)
        if stepped.ended is not None:
            ended = FinishReason(stepped.ended)
            self._store.episodes.end_episode(call, ended, outcome, stepped.left)
            self._statistics.episode_ended(len(turns))
            return ev.EpisodeEnded(trajectory_id)
        assert stepped.token_ids is not None
        self._store.episodes.begin_turn(
            call,
            stepped.token_ids,
            stepped.messages,
            parent=stepped.parent,
            state=stepped.state,
            outcome=outcome,
        )
        before = None if stepped.parent is None else turns[stepped.parent]
        held = trajectory.branch_length(before) + len(stepped.token_ids)
        held -= len(trajectory.prompt.token_ids)
        return ev.EnvironmentReady(trajectory_id, held)

    def _notice(self, notices: Sequence[str]) -> None:
        """Warn of what a person should read, once."""
        for notice in notices:
            if notice not in self._noticed and len(self._noticed) < _MOST_NOTICES:
                self._noticed.add(notice)
                self._statistics.warned("agent", notice)

    def _is_last(self, trajectory_id: int, turn: Turn) -> bool:
        played = time.monotonic() - self._began[trajectory_id]
        return played > self._settings.seconds or turn.number + 1 >= self._settings.max_turns

    def _warn(self, trajectory_id: int, fault: str) -> None:
        """Count what is wrong with an environment, and name it."""
        self._statistics.environment_failed()
        self._statistics.warned(
            "environment_failed",
            f"trajectory {trajectory_id} (megatron-async trajectories RUN --show {trajectory_id}): "
            f"{fault}",
        )

    def _failed(self, trajectory_id: int, call: RequestKey, error: Exception) -> ev.Event:
        """Count a failure of an environment; return what follows from it."""
        lost = isinstance(error, ReplayDiffers)  # with a worker hundreds are, at once
        if not lost:
            self._failures += 1
        self._warn(trajectory_id, str(error))
        if self._failures >= FAILURES:
            self._background.fail(
                ComponentFailure(
                    f"{self._failures} calls of {self._shown} failed "
                    f"in a row and none succeeded; the last: {error}"
                )
            )
        self._background.spawn(self._forgotten(trajectory_id))
        wanted = "regenerate" if lost else self._settings.on_failure
        if wanted == "zero" and self._store.load_trajectory(trajectory_id).turns:
            self._store.episodes.end_episode(call, FinishReason.LENGTH)
            return ev.EpisodeEnded(trajectory_id)
        return ev.EnvironmentFailed(trajectory_id, again=wanted != "drop")


@dataclass
class EvalEpisode:
    """An episode's turns and its end, the tokens of each answer, and the versions of them all."""

    answers: list[list[int]] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the last answer that counts."""
        return self.answers[last_of(self.turns).number]

    def add(self, response: ResponseTokens) -> None:
        """Take an answer."""
        self.answers.append(response.token_ids)
        self.versions += response.versions

    def end_as(self, reason: str, left: Sequence[int]) -> None:
        """Note its end, and the turns that do not count."""
        self.end = FinishReason(reason)
        for number in left:
            turn = self.turns[number]
            self.turns[number] = replace(turn, answer={**(turn.answer or {}), LEFT: True})


async def play(
    held: EpisodeSessions,
    number: int,
    payload: Mapping[str, Any],
    wanted: ResponseSpec,
    name: str,
    engines: EnginePool,
    settings: EpisodeConfig,
    longest: int | None,
) -> EvalEpisode | None:
    """Play an episode; None where its environment fails or engines refuse it.

    `number` and `name` are unique among those under way. Raises EngineError.
    """
    began, played = time.monotonic(), EvalEpisode()
    branches: list[IntArray] = []  # up to the end of each turn
    try:
        opened = await held.begin(number, payload, input_budget(longest, 0, wanted.limit))
        ids = opened.token_ids
        played.turns.append(Turn(0, None, 0, opened.messages, state=opened.state))
        while True:
            turn = played.turns[-1]
            response = await respond(wanted, ids, f"{name}.{turn.number}", engines)
            if response is None:
                return None
            played.add(response)
            ids = np.concatenate([ids, np.asarray(response.token_ids, np.int32)])
            branches.append(ids)
            late = time.monotonic() - began > settings.seconds
            stepped = await held.step(
                number,
                payload,
                played.turns,
                response.token_ids,
                logprobs=response.logprobs,
                room=input_budget(longest, len(ids), wanted.limit),
                last=late or turn.number + 1 >= settings.max_turns,
            )
            played.turns[-1] = replace(
                turn, end=response.end, reward=stepped.reward, answer=stepped.answer, state=None
            )
            if stepped.ended is not None:
                played.end_as(stepped.ended, stepped.left)
                return played
            assert stepped.token_ids is not None
            parent = stepped.parent
            before = branches[parent] if parent is not None else ids[:0]
            ids = np.concatenate([before, stepped.token_ids])
            following = Turn(turn.number + 1, parent, 0, stepped.messages, state=stepped.state)
            played.turns.append(following)
    except (EnvironmentFault, ComponentFailure) as error:
        _logger.warning("episode %s failed: %s", name, error)
        return None
    finally:
        await held.forget(number)
