"""Draws simulated episodes: the number of turns and, for each turn, the length of the observation,
the length of the response, and the time of the environment's reply.

Invariants
- Group g of a seed always has the same episodes, whatever other groups were drawn before.
- An episode whose next turn would not fit into an engine's KV cache ends, as a live episode ends
  when its context is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron_async.config.simulate import LengthConfig, SimulatedEpisodeConfig
from megatron_async.simulate.engine import SimulatedRequest
from megatron_async.simulate.lengths import length_at_score

_STREAM = 1
"""Part of the random seed of episodes, which makes their random numbers independent of those of
`GroupSource`."""


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One turn of a simulated episode.

    Attributes:
        observation: Number of tokens that the environment sends before the response.
        tokens: Number of tokens of the policy's response.
        seconds: Time that the environment takes to reply to the response.
    """

    observation: int
    tokens: int
    seconds: float


@dataclass(slots=True, eq=False)
class Response(SimulatedRequest):
    """Simulated trajectory with its reward; for an episode, also with its turns.

    Attributes:
        reward: Reward of the trajectory.
        plan: Turns of the episode; empty for a response without an environment.
        turn: Index of the current turn; -1 before the first turn.
        call: Number of calls to the environment and of restarts so far. If it has changed since a
            call was made, the reply to the call belongs to the time before a restart and is
            ignored.
        rewarded: Policy number that engines served when the trajectory got its reward.
    """

    reward: float = 0.0
    plan: list[SimulatedTurn] = field(default_factory=list)
    turn: int = -1
    call: int = 0
    rewarded: int = 0

    def restart(self) -> None:
        """Discard all tokens of the trajectory, so that it starts again from its prompt."""
        self.remaining += self.before
        self.before = self.reported = 0
        self.written = []
        self.turn = -1
        self.call += 1

    def next_turn(self, max_tokens: int) -> bool:
        """Start the episode's next turn, after the environment has replied; return False if the
        episode ends instead.

        An episode ends after its last turn, or if prompt, context and the next response would
        exceed `max_tokens` tokens.
        """
        if self.turn + 1 == len(self.plan):
            return False
        coming = self.plan[self.turn + 1]
        grown = self.before + coming.observation
        if self.turn >= 0 and self.prompt + grown + coming.tokens > max_tokens:
            return False
        self.turn += 1
        self.before, self.remaining, self.unseen = grown, coming.tokens, coming.observation
        return True

    @property
    def generated(self) -> int:
        """Number of tokens that the policy has generated for this trajectory."""
        return sum(count for _, count in self.written)

    @property
    def tool_seconds(self) -> float:
        """Seconds that the environment takes for its next reply."""
        return self.plan[max(0, self.turn)].seconds


class EpisodeSource:
    """Draws the episodes of each group from the random seed of a run."""

    def __init__(
        self,
        settings: SimulatedEpisodeConfig,
        lengths: LengthConfig,
        *,
        group_size: int,
        longest: int,
        seed: int,
    ) -> None:
        """Prepare to draw episodes.

        Args:
            settings: Distribution of turns, observations and tool times.
            lengths: Distribution of the length of a response.
            group_size: Number of episodes of a group.
            longest: Maximum number of tokens of a response.
            seed: Random seed.

        Raises:
            UserError: A length file cannot be used.
        """
        self._settings = settings
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._length_at = length_at_score(lengths, longest)

    def group(self, number: int) -> list[list[SimulatedTurn]]:
        """Draw the turns of each episode of group `number`."""
        rng = np.random.default_rng([self._seed, _STREAM, number])
        return [self._episode(rng) for _ in range(self._size)]

    def _episode(self, rng: np.random.Generator) -> list[SimulatedTurn]:
        settings = self._settings
        assert settings.turns is not None
        count = round(settings.turns)
        if settings.spread == "geometric":
            count = int(rng.geometric(1 / settings.turns))
        count = min(max(1, count), settings.max_turns)
        z_2N = rng.standard_normal((2, count))
        answers = np.clip(np.rint(self._length_at(z_2N[0])), 1, self._longest).astype(int)
        tools = (math.exp(settings.tool_sigma * z) * settings.tool_seconds for z in z_2N[1])
        return [
            SimulatedTurn(settings.observation_tokens, tokens, seconds)
            for tokens, seconds in zip(answers.tolist(), tools, strict=True)
        ]
