"""Lineages of a run and what is consumed along each: a pure model of commit and rollback.

A lineage begins at a start or a resume: it continues lineage `parent` from the checkpoint that
holds policy number `branch_step`, that is the weights after updates 0 .. branch_step - 1. A batch
is named by where it was made: (lineage, step).

Invariants
- Batch (l, s) is consumed at checkpoint (L, n) exactly when it lies on the path that leads there:
  l = L and s < n, or l is an ancestor of L and s < the step at which the path leaves l.
- Nothing is ever un-recorded at a rollback: a resume only adds a lineage, and every question is
  answered from the tree. So a second rollback, also to a lineage that an earlier one had abandoned,
  needs nothing undone.
- A lineage's number is larger than its parent's.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_async.trajectory.types import PolicyVersion

ALL: Final = sys.maxsize
"""Larger than every step: the path does not leave this lineage."""


class Lineage(NamedTuple):
    """Number `lineage`: a run between a (re)start and the next; the first one has no parent."""

    lineage: int
    parent: int | None
    branch_step: int


class LineageTree:
    """All lineages that a store has seen."""

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        self._lineages: dict[int, Lineage] = {}
        for one in sorted(lineages, key=lambda one: one.lineage):
            self.add(one)

    def add(self, one: Lineage) -> None:
        """Add a lineage. Raises ValueError if its number is not the largest, or no such parent."""
        if self._lineages and one.lineage <= self.newest:
            raise ValueError(f"lineage {one.lineage} is not newer than lineage {self.newest}")
        if one.parent is not None and one.parent not in self._lineages:
            raise ValueError(
                f"lineage {one.lineage} continues lineage {one.parent}, which is unknown"
            )
        self._lineages[one.lineage] = one

    def __contains__(self, lineage: int) -> bool:
        return lineage in self._lineages

    def __bool__(self) -> bool:
        return bool(self._lineages)

    @property
    def newest(self) -> int:
        """The largest lineage number. Raises ValueError for an empty tree."""
        return max(self._lineages)

    def lineages(self) -> list[Lineage]:
        """Oldest first."""
        return list(self._lineages.values())

    def path(self, lineage: int) -> dict[int, int]:
        """Lineage -> the step at which the path to `lineage` leaves it (ALL: `lineage` itself)."""
        limits: dict[int, int] = {}
        here: int | None = lineage
        limit = ALL
        while here is not None:
            limits[here] = limit
            _, parent, branch_step = self._lineages[here]
            here, limit = parent, min(limit, branch_step)
        return limits

    def branch_points(self, lineage: int) -> dict[int, int]:
        """Every other lineage -> the policy number n0 at which it parted from `lineage`."""
        ours = self.path(lineage)
        points: dict[int, int] = {}
        for other in self._lineages.keys() - {lineage}:
            theirs = self.path(other)
            common = next((here for here in theirs if here in ours), None)
            # With another root there is nothing in common but the initial weights.
            points[other] = 0 if common is None else min(theirs[common], ours[common])
        return points


@dataclass(frozen=True)
class Consumption:
    """Batches that are consumed at one place: policy number `number` on lineage `lineage`.

    `number=ALL` means all of that lineage so far.
    """

    limits: Mapping[int, int]

    @classmethod
    def at(cls, tree: LineageTree, lineage: int, number: int = ALL) -> "Consumption":
        """Return a lineage by its number. Raises KeyError for an unknown one."""
        return cls({on_path: min(limit, number) for on_path, limit in tree.path(lineage).items()})

    @classmethod
    def at_checkpoint(cls, tree: LineageTree, checkpoint: PolicyVersion) -> "Consumption":
        """Return the batches that the finalized checkpoint (lineage, number) commits."""
        return cls.at(tree, checkpoint.lineage, checkpoint.number)

    def holds(self, lineage: int, step: int) -> bool:
        """Return whether batch (lineage, step) is consumed here."""
        return step < self.limits.get(lineage, 0)

    def reaches(self, lineage: int, number: int) -> bool:
        """Return whether policy (lineage, number) is on the path to this place."""
        return number <= self.limits.get(lineage, -1)
