"""Scores finished responses, one by one or in whole groups, and writes their rewards to the store.

Invariants
- For each response passed to `score`, the callback `ready` is called exactly once, with its reward
  or None. A group is all responses to one prompt. If a group is dropped while a response waits for
  the other members, the caller of `dropped` makes the call.
- With scorers of groups, a group is scored once every member has a complete response. The states of
  the members are read from the store, so a restarted process comes to the same decision. If a
  member is generated again after its group was scored, the group is scored again, but the other
  members keep the rewards they have.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scoring.interface import CONVERSATIONS, SCORER_FAULTS, Scorers
from megatron_async.store.store import TrajectoryStore
from megatron_async.telemetry.learning import FailingScores
from megatron_async.trajectory.types import (
    Group,
    Prompt,
    Trajectory,
    TrajectoryState,
    Turn,
    last_of,
)

_WHOLE = (TrajectoryState.FINISHED, TrajectoryState.SCORED)


@dataclass(eq=False)
class Scoring:
    """Scores the trajectories that the scheduler names and stores their rewards.

    Attributes:
        prompts: Source of the training prompts, which counts every score in the pass rate of its
            prompt.
        of_groups: Whether some reward function scores whole groups.
        ready: Function that gets a trajectory's id and reward; the reward is None if the scorer
            failed and the settings do not count that as 0.
    """

    store: TrajectoryStore
    prompts: TaskPrompts
    scorers: Scorers
    statistics: RolloutStatistics
    of_groups: bool
    ready: Callable[[int, float | None], None]

    def __post_init__(self) -> None:
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)
        self._busy: set[int] = set()
        self._failing = FailingScores()

    async def score(self, trajectory_id: int) -> None:
        """Score a finished trajectory and pass its reward to `ready`.

        If a reward function scores whole groups, the trajectory waits until every member of its
        group has finished, and then all members are scored together. If a member was dropped,
        `ready` gets None.
        """
        trajectory = self.store.load_trajectory(trajectory_id)
        if not self.of_groups:
            await self._score([trajectory], {trajectory_id})
            return
        number = trajectory.group_id
        self._waiting[number].add(trajectory_id)
        if number in self._busy:
            return
        self._busy.add(number)
        try:
            while self._waiting[number]:
                group = self.store.load_group(number)
                if any(t.state is TrajectoryState.DROPPED for t in group.trajectories):
                    for member in self._waiting[number].copy():
                        self._report(number, member, None)
                    return
                if any(t.state not in _WHOLE for t in group.trajectories):
                    return
                finished = [t for t in group.trajectories if t.state is TrajectoryState.FINISHED]
                await self._score(group.trajectories, {t.trajectory_id for t in finished})
        finally:
            self._busy.discard(number)
            if not self._waiting[number]:
                del self._waiting[number]

    def dropped(self, trajectory_id: int) -> list[int]:
        """Return the trajectories that have waited to be scored together with a dropped trajectory;
        they wait no longer.

        The caller must call `ready` with None for each of them. The result is empty if the group is
        being scored at the moment, because `score` calls `ready` in this case.
        """
        if not self._waiting:
            return []
        number = self.store.load_trajectory(trajectory_id).group_id
        return [] if number in self._busy else list(self._waiting.pop(number, ()))

    async def _score(self, members: Sequence[Trajectory], wanted: Set[int]) -> None:
        """Score the trajectories `members`, and store and report the rewards of those whose ids are
        in `wanted`."""
        responses = [_response(trajectory) for trajectory in members]
        prompt = members[0].prompt
        if any(trajectory.turns for trajectory in members):
            prompt = with_conversations(prompt, [conversation_of(t.turns) for t in members])
        for _ in wanted:
            self.statistics.score_wanted()
        started = time.monotonic()
        if self.of_groups:
            scores = await self.scorers.score_group(prompt, responses)
        else:
            scores = [await self.scorers.score(prompt, responses[0])]
        scores = [with_turns(*score, t.turns) for score, t in zip(scores, members, strict=True)]
        seconds = time.monotonic() - started
        for reward, _ in scores:
            self.prompts.scored(prompt, reward)
        for trajectory, (reward, detail) in zip(members, scores, strict=True):
            number = trajectory.trajectory_id
            if number not in wanted:
                continue
            self.statistics.scored(detail, seconds)
            for warning in self._failing.scored(detail, self.scorers.failures):
                self.statistics.warned(*warning)
            if reward is not None:
                await self.store.set_reward(number, reward, detail)
            self._report(trajectory.group_id, number, reward)

    def _report(self, group_id: int, trajectory_id: int, reward: float | None) -> None:
        if self.of_groups:
            self._waiting[group_id].discard(trajectory_id)
        self.ready(trajectory_id, reward)


def _response(trajectory: Trajectory) -> list[int]:
    """Return the token ids to score: the response, or for an episode the last response that its
    agent program received."""
    pieces = [segment.token_ids for segment in trajectory.segments]
    if trajectory.turns:
        last = trajectory.segments_of(last_of(trajectory.turns))
        pieces = [segment.token_ids for segment in last if not segment.from_environment]
    return np.concatenate(pieces or [np.zeros(0, np.int32)]).tolist()


def conversation_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the chat messages of the branch that ends with the last turn whose response the agent
    program received, including the policy's responses."""
    messages: list[dict[str, Any]] = []
    path = [last_of(turns)] if turns else []
    while path and path[-1].parent is not None:
        path.append(turns[path[-1].parent])
    for turn in reversed(path):
        messages += [dict(message) for message in turn.messages]
        if turn.answer is not None:
            messages.append({"role": "assistant", "content": turn.answer["text"]})
    return messages


def with_conversations(prompt: Prompt, conversations: Sequence[Sequence[Any]]) -> Prompt:
    """Return the prompt with one list of chat messages for each response, which reward functions
    read as `Sample.messages`."""
    return replace(prompt, payload={**prompt.payload, CONVERSATIONS: list(conversations)})


def with_turns(
    reward: float | None, detail: dict[str, float], turns: Sequence[Turn]
) -> tuple[float | None, dict[str, float]]:
    """Add the environment's rewards of an episode's turns to the scorers' reward, and their named
    components to `detail`.

    Without turns, or if the reward is None, both are returned unchanged.
    """
    if not turns or reward is None:
        return reward, detail
    parts: Counter[str] = Counter()
    for turn in turns:
        parts.update((turn.answer or {}).get("parts", {}))
    return reward + sum(turn.reward for turn in turns), {**parts, **detail}


def reward_means(groups: Iterable[Group]) -> dict[str, float]:
    """Return the mean reward of the trajectories in a batch, and the mean of each named reward
    component.

    The reward of an episode contains the rewards of its turns without a discount. The mean of a
    component is over the trajectories that have this component.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    rewards = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.state is not TrajectoryState.DROPPED and trajectory.reward is not None:
                rewards.append(trajectory.reward)
            for name, value in trajectory.reward_detail.items():
                if name not in SCORER_FAULTS:
                    values[name].append(value)
    parts = {f"reward/{name}": float(np.mean(found)) for name, found in sorted(values.items())}
    return {"rollout/reward_mean": float(np.mean(rewards or [0.0])), **parts}
