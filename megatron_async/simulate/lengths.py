"""Response lengths and rewards of simulated groups, drawn once and the same for every schedule.

Invariants
- Group number g of a seed always has the same lengths and rewards, whatever was asked before.
- Lengths are integers in 1..`longest`.
- Correlation within a prompt comes from a Gaussian copula: z_i = sqrt(rho) z_prompt +
  sqrt(1 - rho) z_i', and a length is the distribution's quantile at Phi(z_i), so that every
  distribution keeps its marginal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_async.config.simulate import LengthConfig, SimulatedRewardConfig
from megatron_async.simulate.recorded_lengths import read_lengths

Array = npt.NDArray[np.float64]
_BLOCK = 1024


class GroupSource:
    """Groups in order; `lengths(g)` and `rewards(g)` have one entry per member."""

    def __init__(
        self,
        lengths: LengthConfig,
        reward: SimulatedRewardConfig,
        *,
        group_size: int,
        longest: int,
        seed: int,
    ) -> None:
        """`longest` cuts responses. Raises UserError when a length file cannot be used."""
        self._reward = reward
        self._correlation = lengths.prompt_correlation
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._length_at = length_at_score(lengths)
        self._blocks: dict[int, tuple[list[list[int]], list[list[float]]]] = {}

    def group(self, number: int) -> tuple[list[int], list[float]]:
        """Lengths in tokens and rewards (0 or 1) of group `number`."""
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            self._blocks = {block: self._draw(block)}  # groups are asked for in order
        lengths, rewards = self._blocks[block]
        return lengths[place], rewards[place]

    def _draw(self, block: int) -> tuple[list[list[int]], list[list[float]]]:
        rng = np.random.default_rng([self._seed, block])
        shape = (_BLOCK, self._size)
        rho = self._correlation
        z = math.sqrt(rho) * rng.standard_normal((_BLOCK, 1))
        z = z + math.sqrt(1 - rho) * rng.standard_normal(shape)
        lengths = np.clip(np.rint(self._length_at(z)), 1, self._longest).astype(np.int64)
        rates = rng.beta(self._reward.success_alpha, self._reward.success_beta, (_BLOCK, 1))
        rewards = (rng.random(shape) < rates).astype(np.float64)
        return lengths.tolist(), rewards.tolist()


def length_at_score(config: LengthConfig) -> Callable[[Array], Array]:
    """The uncut length whose quantile is that of a standard normal's z."""
    if config.distribution == "constant":
        return lambda z: np.full_like(z, config.median)
    if config.distribution == "weibull":
        return lambda z: config.scale * (-np.log(_normal_cdf(-z))) ** (1 / config.shape)
    if config.distribution == "uniform":
        return lambda z: 0.5 + config.scale * _normal_cdf(z)
    if config.distribution == "file":
        recorded = np.sort(read_lengths(Path(config.path)))
        return lambda z: recorded[(_normal_cdf(z) * (len(recorded) - 1e-9)).astype(int)]
    return lambda z: config.median * np.exp(config.sigma * z)


def _normal_cdf(z: Array) -> Array:
    return 0.5 * np.asarray(np.vectorize(math.erfc)(-z / math.sqrt(2.0)), dtype=np.float64)
