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

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_async.trajectory.types import PolicyVersion


@dataclass(frozen=True)
class Lineage:
    """A run between a (re)start and the next; the first one has no parent."""

    number: int
    parent: int | None
    branch_step: int


class LineageTree:
    """All lineages that a store has seen."""

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        self._lineages: dict[int, Lineage] = {}
        for lineage in sorted(lineages, key=lambda lineage: lineage.number):
            self.add(lineage)

    def add(self, lineage: Lineage) -> None:
        """Add a lineage. Raises ValueError if its number is not the largest, or no such parent."""
        if self._lineages and lineage.number <= self.newest:
            raise ValueError(f"lineage {lineage.number} is not newer than lineage {self.newest}")
        if lineage.parent is not None and lineage.parent not in self._lineages:
            raise ValueError(
                f"lineage {lineage.number} continues lineage {lineage.parent}, which is unknown"
            )
        self._lineages[lineage.number] = lineage

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

    def path(self, lineage: int) -> dict[int, int | None]:
        """Lineage -> the step at which the path to `lineage` leaves it (None: `lineage` itself)."""
        limits: dict[int, int | None] = {}
        here: int | None = lineage
        limit: int | None = None
        while here is not None:
            limits[here] = limit
            step = self._lineages[here].branch_step
            limit = step if limit is None else min(limit, step)
            here = self._lineages[here].parent
        return limits

    def branch_points(self, lineage: int) -> dict[int, int]:
        """Every other lineage -> the policy number n0 at which it parted from `lineage`."""
        path = self.path(lineage)
        points: dict[int, int] = {}
        for other in self._lineages:
            limit: int | None = None
            here: int | None = other
            while here is not None and here not in path:
                step = self._lineages[here].branch_step
                limit = step if limit is None else min(limit, step)
                here = self._lineages[here].parent
            if here is None:  # another root: nothing in common but the initial weights
                points[other] = 0
                continue
            known = [value for value in (limit, path[here]) if value is not None]
            if known:
                points[other] = min(known)
        return points


@dataclass(frozen=True)
class Consumption:
    """Batches that are consumed at one place: policy number `number` on lineage `lineage`.

    `number=None` means all of that lineage so far.
    """

    limits: Mapping[int, int | None]

    @classmethod
    def at(cls, tree: LineageTree, lineage: int, number: int | None = None) -> Consumption:
        """Return a lineage by its number. Raises KeyError for an unknown one."""
        limits = tree.path(lineage)
        limits[lineage] = number
        return cls(limits)

    @classmethod
    def at_checkpoint(cls, tree: LineageTree, checkpoint: PolicyVersion) -> Consumption:
        """Return the batches that the finalised checkpoint (lineage, number) commits."""
        return cls.at(tree, checkpoint.lineage, checkpoint.number)

    def holds(self, lineage: int, step: int) -> bool:
        """Return whether batch (lineage, step) is consumed here."""
        if lineage not in self.limits:
            return False
        limit = self.limits[lineage]
        return limit is None or step < limit

    def reaches(self, lineage: int, number: int) -> bool:
        """Return whether policy (lineage, number) is on the path to this place."""
        limit = self.limits.get(lineage, -1)
        return limit is None or number <= limit


def reached(tree: LineageTree, batches: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the largest policy number that each lineage can have made, from its batches."""
    numbers = {lineage.number: lineage.branch_step for lineage in tree.lineages()}
    for lineage, step in batches:
        if lineage in numbers:
            numbers[lineage] = max(numbers[lineage], step + 1)
    return numbers
