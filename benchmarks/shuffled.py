"""A reward for the negative control: each member of a group gets the reward of another one.

Rewards are drawn anew among the members, so that groups keep their rewards and what a member did
has nothing to do with what it gets. An evaluation asks each problem once; there it changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_async.scoring.rewards import Sample


def guessed(sample: Sample, high: int = 100) -> float:
    """What `examples/guessing_game` gives for the episode: 1 where its last guess is right."""
    number = random.Random(sample.metadata["seed"]).randint(1, high)
    text = sample.response.strip()
    return float(text.isdecimal() and int(text) == number)


def calculated(sample: Sample) -> float:
    """1 for the right product as the last answer."""
    return float(sample.response.strip() == sample.answer)


class Shuffled:
    """`of`: `game`, whose environment has given its own reward already, or `product`."""

    def __init__(self, of: str, seed: int = 0) -> None:
        self._score = guessed if of == "game" else calculated
        self._given = of == "game"
        self._random = random.Random(seed)

    def __call__(self, samples: Sequence[Sample]) -> list[tuple[float, dict[str, float]]]:
        """The difference to what another member has; the part `true` is the member's own."""
        own = list(map(self._score, samples))
        others = self._random.sample(own, len(own))
        return [
            (other - mine * self._given, {"true": mine})
            for mine, other in zip(own, others, strict=True)
        ]
