"""Runs the episodes of a training run in environment workers, and plays the episodes of an
evaluation.

An episode is a trajectory with turns; a turn is an input from the environment and then one response
of the policy. In training, a turn passes through the following steps. The response of the turn is
complete (`TurnEnded`). The scheduler emits `StepEnvironment`. `environments/worker.py` steps the
environment and makes tokens of its reply. The scheduler gets `EnvironmentReady` for the next turn,
or `EpisodeEnded`. After the last turn, `scoring.py` adds up the rewards of the turns. Once all
members of the group are scored, `driver._emit` passes the group to `trajectory/packing.py`, which
makes one sequence of each branch (`Trajectory.runs`).

`play` plays an episode of an evaluation with the same calls to the same workers, but without a
store.

Invariants
- An environment gets a response only after the response is committed to the store. The
  environment's reply is stored in one transaction, before the scheduler gets the event about the
  reply.
- When a trajectory is dropped or restarted, its episode is closed first. Each call to an
  environment has a key in the store, which dropping or restarting supersedes. The store refuses a
  reply that arrives later, because its key is superseded, and the reply is discarded.
- A failure affects only its own episode (`episode.on_failure`), and an episode that cannot be
  restored restarts from its prompt. If `MAX_FAILURES_IN_ROW` calls in a row fail without a success,
  the run ends.
- The time limit of an episode (`episode.seconds`) survives the death of the manager's process: the
  new process continues the clock from the value that is stored with the environment's last reply.
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
    ABANDONED,
    FinishReason,
    IntArray,
    PolicyVersion,
    RequestKey,
    TrajectoryState,
    Turn,
    last_of,
)

_logger = logging.getLogger(__name__)

PLAYED_SECONDS: Final = "played_seconds"
"""Key in the stored response of a turn: number of seconds for which the episode had been played
when the environment replied to the turn."""
MAX_FAILURES_IN_ROW: Final = 64
_MAX_NOTICES: Final = 16
UNLIMITED_BUDGET: Final = 1 << 31


def input_budget(longest: int | None, taken: int, max_new_tokens: int) -> int:
    """Return how many tokens the environment's next input may add to an episode so that a response
    of `max_new_tokens` still fits after it.

    Args:
        longest: Maximum number of tokens of prompt and response together that an engine accepts;
            None if there is no limit.
        taken: Number of tokens that the episode's branch has so far.
    """
    return UNLIMITED_BUDGET if longest is None else longest - taken - max_new_tokens


class Episodes:
    """All open episodes of one driver, and the running calls to their environments."""

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
        """Set up the episodes of one driver; nothing is started.

        Args:
            workers: Workers that run the environments; None if trajectories are not episodes.
            feed: Function that passes an event to the scheduler.
            longest: Function that returns the maximum number of tokens that an engine accepts, or
                None.
        """
        self._settings, self._display_name = config.episode, config.player.display_name
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
        self._possibly_called: set[int] = set()
        self._failures = 0
        self._noticed: set[str] = set()

    @property
    def _sessions(self) -> EpisodeSessions:
        # `None` only if the run has no episodes, and then no method that uses the sessions is
        # called.
        assert self._episodes is not None
        return self._episodes

    def recovered(self, groups: Sequence[ev.RecoveredGroup]) -> None:
        """Register the episodes without an end that a resumed run found in its store, with the time
        for which each has been played.

        If an episode waited for its environment, the environment may have received the call already
        and only its reply was lost. The next step of such an episode is marked as possibly
        repeated.
        """
        if self._episodes is None:
            return
        for known in (known for group in groups for known in group.trajectories):
            if known.state in (TrajectoryState.WAITING, TrajectoryState.PARTIAL):
                turns = self._store.load_trajectory(known.trajectory_id).turns
                before = (
                    (turns[-2].answer or {}).get(PLAYED_SECONDS, 0.0) if len(turns) > 1 else 0.0
                )
                self._began[known.trajectory_id] = time.monotonic() - before
            if known.state is TrajectoryState.WAITING:
                self._possibly_called.add(known.trajectory_id)

    def begin(self, trajectory_id: int) -> None:
        """Start the environment of an episode in the background; the scheduler gets an event with
        the outcome."""
        self._began[trajectory_id] = time.monotonic()
        self._calls[trajectory_id] = self._background.spawn(self._call(trajectory_id, self._begin))

    def step(self, trajectory_id: int) -> None:
        """Pass the response of an episode's newest turn to its environment in the background.

        The scheduler gets an event with the outcome.
        """
        self._calls[trajectory_id] = self._background.spawn(self._call(trajectory_id, self._step))

    def forget(self, trajectory_id: int) -> None:
        """Cancel the running environment call of a trajectory and close its environment in the
        background.

        Call this when the trajectory is dropped or restarted.
        """
        if self._episodes is None:
            return
        call = self._calls.pop(trajectory_id, None)
        if call is not None:
            call.cancel()
        self._began.pop(trajectory_id, None)
        self._possibly_called.discard(trajectory_id)
        self._background.spawn(self._forgotten(trajectory_id))

    async def _forgotten(self, trajectory_id: int) -> None:
        fault = await self._sessions.forget(trajectory_id)
        if fault is not None:
            self._warn(trajectory_id, fault)

    async def _call(
        self,
        trajectory_id: int,
        ask: Callable[[int, RequestKey], Coroutine[Any, Any, ev.Event]],
    ) -> None:
        await self._store.sync()
        call, started = self._store.episodes.begin_step(trajectory_id), time.monotonic()
        try:
            event = await ask(trajectory_id, call)
        except SupersededRequest as superseded:
            self._statistics.warned("superseded_append", str(superseded))
            return
        except (EnvironmentFault, ComponentFailure, UserError) as error:
            event = self._failed(trajectory_id, call, error)
        else:
            # Only a successful step resets the count, because an environment that starts may still
            # fail at every step.
            if ask == self._step:
                self._failures = 0
        self._statistics.environment_called(time.monotonic() - started, self._sessions.counts)
        del self._calls[trajectory_id]
        if isinstance(event, ev.EpisodeEnded | ev.EnvironmentFailed):
            self._began.pop(trajectory_id, None)
        self._feed(event)

    async def _begin(self, trajectory_id: int, call: RequestKey) -> ev.Event:
        prompt = self._store.load_trajectory(trajectory_id).prompt
        taken = len(prompt.token_ids)
        budget = input_budget(self._longest(), taken, self._max_new_tokens)
        opened = await self._sessions.begin(trajectory_id, prompt.payload, budget)
        self._notice(opened.notices)
        added = len(opened.token_ids)
        if added > budget:
            raise EnvironmentFault(
                f"the first prompt has {taken + added} tokens; with sampling.max_new_tokens "
                f"{self._max_new_tokens} that exceeds the {self._longest()} an engine accepts"
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
        stepped = await self._sessions.step(
            trajectory_id,
            payload,
            turns,
            [int(token) for piece in answer for token in piece],
            logprobs=[float(n) for s in made for n in s.logprobs] if self._logprobs else (),
            input_budget=input_budget(self._longest(), taken, self._max_new_tokens),
            last=self._is_last(trajectory_id, turns[-1]),
            may_repeat=trajectory_id in self._possibly_called,
        )
        self._possibly_called.discard(trajectory_id)
        self._notice(stepped.notices)
        if stepped.fault is not None:
            self._warn(trajectory_id, stepped.fault)
        played = round(time.monotonic() - self._began[trajectory_id], 2)
        outcome = TurnOutcome({**stepped.answer, PLAYED_SECONDS: played}, stepped.reward)
        if stepped.ended is not None:
            ended = FinishReason(stepped.ended)
            self._store.episodes.end_episode(call, ended, outcome, stepped.abandoned)
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
        context = trajectory.branch_length(before) + len(stepped.token_ids)
        context -= len(trajectory.prompt.token_ids)
        return ev.EnvironmentReady(trajectory_id, context)

    def _notice(self, notices: Sequence[str]) -> None:
        """Report each notice of an environment as a warning `agent`, unless it was reported before.

        At most `_MAX_NOTICES` different notices are reported in a session.
        """
        for notice in notices:
            if notice not in self._noticed and len(self._noticed) < _MAX_NOTICES:
                self._noticed.add(notice)
                self._statistics.warned("agent", notice)

    def _is_last(self, trajectory_id: int, turn: Turn) -> bool:
        played = time.monotonic() - self._began[trajectory_id]
        return played > self._settings.seconds or turn.number + 1 >= self._settings.max_turns

    def _warn(self, trajectory_id: int, fault: str) -> None:
        """Count a failure of an environment, and report `fault` as a warning that names the
        trajectory."""
        self._statistics.environment_failed()
        self._statistics.warned(
            "environment_failed",
            f"trajectory {trajectory_id} (megatron-async trajectories RUN --show {trajectory_id}): "
            f"{fault}",
        )

    def _failed(self, trajectory_id: int, call: RequestKey, error: Exception) -> ev.Event:
        """Handle a failed environment call: count and report it, and return the event for the
        scheduler.

        Depending on `episode.on_failure`, the event ends the episode, restarts it, or drops its
        group. An episode that was lost with its worker and could not be restored (`ReplayDiffers`)
        restarts with every setting. The run ends after `MAX_FAILURES_IN_ROW` failures in a row,
        without counting lost episodes.
        """
        # A lost episode could not be restored. Such failures do not count toward the end of the
        # run, because the death of one worker causes hundreds at once.
        lost = isinstance(error, ReplayDiffers)
        if not lost:
            self._failures += 1
        self._warn(trajectory_id, str(error))
        if self._failures >= MAX_FAILURES_IN_ROW:
            self._background.fail(
                ComponentFailure(
                    f"{self._failures} calls to {self._display_name} failed "
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
    """An episode of an evaluation, which is kept in memory and not in the store.

    Attributes:
        answers: Tokens of the policy's response in each turn.
        versions: Number of tokens that each policy version has made.
        end: Reason why the episode ended; None while it is being played.
        turns: Turns so far, the newest last.
    """

    answers: list[list[int]] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the last response that the episode's agent program received, which is the
        response to be scored."""
        return self.answers[last_of(self.turns).number]

    def add(self, response: ResponseTokens) -> None:
        """Append the tokens of a turn's response to this episode."""
        self.answers.append(response.token_ids)
        self.versions += response.versions

    def end_as(self, reason: str, abandoned: Sequence[int]) -> None:
        """Record the reason why this episode ended, and mark the turns whose numbers are in
        `abandoned` as never received by the agent program."""
        self.end = FinishReason(reason)
        for number in abandoned:
            turn = self.turns[number]
            self.turns[number] = replace(turn, answer={**(turn.answer or {}), ABANDONED: True})


async def play(
    sessions: EpisodeSessions,
    number: int,
    payload: Mapping[str, Any],
    wanted: ResponseSpec,
    name: str,
    engines: EnginePool,
    settings: EpisodeConfig,
    longest: int | None,
) -> EvalEpisode | None:
    """Play one episode of an evaluation to its end; return None if its environment fails or engines
    refuse a request.

    Args:
        sessions: Open episodes of the evaluation, through which the environment is called.
        number: Number of the episode, unique among the episodes being played.
        payload: Row of the task from which the environment starts.
        wanted: Sampling and limits of each response.
        name: Prefix of the request ids, unique among the episodes being played.
        longest: Maximum number of tokens that an engine accepts; None if there is no limit.

    Raises:
        EngineError: Three requests for one response failed.
    """
    began, played = time.monotonic(), EvalEpisode()
    branches: list[IntArray] = []  # tokens of the branch up to the end of each turn
    try:
        opened = await sessions.begin(number, payload, input_budget(longest, 0, wanted.limit))
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
            stepped = await sessions.step(
                number,
                payload,
                played.turns,
                response.token_ids,
                logprobs=response.logprobs,
                input_budget=input_budget(longest, len(ids), wanted.limit),
                last=late or turn.number + 1 >= settings.max_turns,
            )
            played.turns[-1] = replace(
                turn, end=response.end, reward=stepped.reward, answer=stepped.answer, state=None
            )
            if stepped.ended is not None:
                played.end_as(stepped.ended, stepped.abandoned)
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
        await sessions.forget(number)
