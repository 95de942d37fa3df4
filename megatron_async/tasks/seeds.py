"""Provides `task.kind: seeds`: rows that contain only a seed, for environments that make problems.

Invariants
- A row depends only on its index and on `task.train_seed` (a held-out row: on `HELDOUT_SEED`).
- Whether a seed is held out for evaluation depends on the seed alone.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

from megatron_async.config.evaluation import HELDOUT_SEED
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.base import (
    Problem,
    ProblemLocation,
    is_heldout,
    row_payload,
    stable_hash,
)

_SEEDS: Final = 1 << 31


def seed_problem(seed: Any) -> Problem:
    """Return the problem of a seed, whose payload contains no question but only the seed."""
    return Problem(f"seed {seed}", row_payload("", "", {"seed": seed}))


class SeedProblems:
    """Problem source of endless rows that contain only a seed; see `base.ProblemSource`."""

    name = "seeds"

    def __init__(self, config: TaskConfig) -> None:
        self._config = config

    def train(self, index: int) -> Problem:
        """Return training row `index`; if the drawn seed is held out, draw again."""
        return next(
            problem
            for attempt in itertools.count()
            if not self._heldout(problem := self._drawn(self._config.train_seed, index, attempt))
        )

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` rows that are held out for evaluation.

        Raises:
            UserError: If `count` is 0 (all), since the rows have no end.
        """
        if not count:
            raise UserError(
                "eval.prompts is 0 (all), but task.kind seeds generates rows endlessly. Set a "
                "positive number."
            )
        drawn = (self._drawn(HELDOUT_SEED, index, 0) for index in itertools.count())
        return list(itertools.islice(filter(self._heldout, drawn), count))

    def counts(self, heldout: int) -> tuple[None, int]:
        """Return None and `heldout`, since both training rows and held-out rows are endless."""
        return None, heldout

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Yield the first training row only, since rows have no end."""
        yield (0, 0), replace(self.train(0), where="task.kind seeds, row 0")

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Raise a UserError, because generated rows cannot be removed."""
        raise UserError("task.long_prompts filter removes rows of files; task.kind seeds has none")

    def summary(self) -> str:
        """Return a phrase that describes the rows."""
        return "seeds for an environment"

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Raise a UserError, because seeds have no worked answers."""
        raise UserError(
            "task.kind seeds has no worked answers; set sft.data to a file of worked answers"
        )

    def _heldout(self, problem: Problem) -> bool:
        return is_heldout(problem.question, self._config.heldout_share)

    def _drawn(self, order: int, index: int, attempt: int) -> Problem:
        return seed_problem(stable_hash("seed", order, index, attempt) % _SEEDS)
