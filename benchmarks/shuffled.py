"""Reward for a negative control: it shuffles the rewards of a group among the group's members.

A group keeps its rewards, but the reward of a member does not depend on the member's response. In
an evaluation, each problem has one response, so the reward is unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_async.scoring.rewards import Sample


def guessed(sample: Sample, high: int = 100) -> float:
    """Return the reward of `examples/guessing_game`: 1 if the last guess is right, else 0."""
    number = random.Random(sample.metadata["seed"]).randint(1, high)
    text = sample.response.strip()
    return float(text.isdecimal() and int(text) == number)


def calculated(sample: Sample) -> float:
    """Return 1 if the last response is the right product, else 0."""
    return float(sample.response.strip() == sample.answer)


class Shuffled:
    """Group reward with shuffled rewards of the game or the products.

    If `of` is `game`, the environment itself also gives the true reward, which is subtracted. If it
    is `product`, only this reward counts.
    """

    def __init__(self, of: str, seed: int = 0) -> None:
        self._score = guessed if of == "game" else calculated
        self._given = of == "game"
        self._random = random.Random(seed)

    def __call__(self, samples: Sequence[Sample]) -> list[tuple[float, dict[str, float]]]:
        """Return the reward of each member, with the member's true reward as component `true`.

        Together with the environment's reward, if any, it is the true reward of a random member.
        """
        own = list(map(self._score, samples))
        others = self._random.sample(own, len(own))
        return [
            (other - mine * self._given, {"true": mine})
            for mine, other in zip(own, others, strict=True)
        ]
