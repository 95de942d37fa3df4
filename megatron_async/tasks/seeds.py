"""`task.kind: seeds`: rows `{seed}` for environments that make their own problems.

Invariants
- Row `index` depends on `task.train_seed` (held-out rows: on `HELDOUT_SEED`) and `index` only.
- Whether a seed is held out follows from the seed alone.
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
    """The row of a seed."""
    return Problem(f"seed {seed}", row_payload("", "", {"seed": seed}))


class SeedProblems:
    """Implements `base.ProblemSource`."""

    name = "seeds"

    def __init__(self, config: TaskConfig) -> None:
        self._config = config

    def train(self, index: int) -> Problem:
        """Row `index`; a seed that is held out is drawn again."""
        return next(
            problem
            for attempt in itertools.count()
            if not self._heldout(problem := self._drawn(self._config.train_seed, index, attempt))
        )

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out rows. Raises UserError where all are asked for."""
        if not count:
            raise UserError("eval.prompts 0 means all, and task.kind seeds has no end of them")
        drawn = (self._drawn(HELDOUT_SEED, index, 0) for index in itertools.count())
        return list(itertools.islice(filter(self._heldout, drawn), count))

    def counts(self, heldout: int) -> tuple[None, int]:
        """Rows have no end."""
        return None, heldout

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """The first: all are as long."""
        yield (0, 0), replace(self.train(0), where="task.kind seeds, row 0")

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Impossible: there is no file. Raises UserError."""
        raise UserError("task.long_prompts filter removes rows of files; task.kind seeds has none")

    def summary(self) -> str:
        """A name for the rows."""
        return "seeds for an environment"

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Raise UserError: there are none."""
        raise UserError("task.kind seeds has no worked answers; set sft.data to a file of some")

    def _heldout(self, problem: Problem) -> bool:
        return is_heldout(problem.question, self._config.heldout_share)

    def _drawn(self, order: int, index: int, attempt: int) -> Problem:
        return seed_problem(stable_hash("seed", order, index, attempt) % _SEEDS)
