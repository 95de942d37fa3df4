"""Episodes of the simulation: turns, observations and the seconds of tools, drawn.

Invariants
- Group number g of a seed always has the same episodes, whatever was asked before.
- An episode whose next turn would not fit into an engine's KV cache ends, as a live one does whose
  context is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron_async.config.simulate import LengthConfig, SimulatedEpisodeConfig
from megatron_async.simulate.engine import SimulatedRequest
from megatron_async.simulate.lengths import length_at_score

_STREAM = 1  # of random numbers, beside that of responses


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """The tokens that the environment sends, the answer's, and the tool's seconds after it."""

    observation: int
    tokens: int
    seconds: float


@dataclass(slots=True, eq=False)
class Response(SimulatedRequest):
    """A simulated trajectory and its reward; an episode has `plan` and is at `turn`.

    `call` counts what its environment was asked, so that a reply to an earlier life is known.
    """

    reward: float = 0.0
    plan: list[SimulatedTurn] = field(default_factory=list)
    turn: int = -1
    call: int = 0

    def restart(self) -> None:
        """Back to the prompt."""
        self.remaining += self.before
        self.before = self.reported = 0
        self.written = []
        self.turn = -1
        self.call += 1

    def next_turn(self, most: int) -> bool:
        """The environment has replied: the next turn's input; False where the episode ends.

        Prompt, context and answer are at most `most` tokens.
        """
        if self.turn + 1 == len(self.plan):
            return False
        coming = self.plan[self.turn + 1]
        grown = self.before + coming.observation
        if self.turn >= 0 and self.prompt + grown + coming.tokens > most:
            return False
        self.turn += 1
        self.before, self.remaining, self.unseen = grown, coming.tokens, coming.observation
        return True

    @property
    def generated(self) -> int:
        """The policy's tokens."""
        return sum(count for _, count in self.written)

    @property
    def tool_seconds(self) -> float:
        """The environment's time for its next reply."""
        return self.plan[max(0, self.turn)].seconds


class EpisodeSource:
    """Episodes of groups."""

    def __init__(
        self,
        settings: SimulatedEpisodeConfig,
        lengths: LengthConfig,
        *,
        group_size: int,
        longest: int,
        seed: int,
    ) -> None:
        """`longest` cuts answers. Raises UserError when a length file cannot be used."""
        self._settings = settings
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._length_at = length_at_score(lengths, longest)

    def group(self, number: int) -> list[list[SimulatedTurn]]:
        """The turns of each member of group `number`."""
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
