"""Lines of a run and what is consumed along each: a pure model of commit and rollback.

A line begins at a start or a resume: it continues line `parent` from the checkpoint that holds
policy number `branch_step`, that is the weights after updates 0 .. branch_step - 1. A batch is
named by where it was made: (line, step).

Invariants
- Batch (l, s) is consumed at checkpoint (L, n) exactly when it lies on the path that leads there:
  l = L and s < n, or l is an ancestor of L and s < the step at which the path leaves l.
- Nothing is ever un-recorded at a rollback: a resume only adds a line, and every question is
  answered from the tree. So a second rollback, also to a line that an earlier one had abandoned,
  needs nothing undone.
- A line's number is larger than its parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_async.trajectory.types import PolicyVersion


@dataclass(frozen=True)
class Line:
    """A lineage: a run between a (re)start and the next; the first one has no parent."""

    lineage: int
    parent: int | None
    branch_step: int


class LineTree:
    """All lines that a store has seen."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._lines: dict[int, Line] = {}
        for line in sorted(lines, key=lambda line: line.lineage):
            self.add(line)

    def add(self, line: Line) -> None:
        """Raises ValueError for a number that is not the largest, or an unknown parent."""
        if self._lines and line.lineage <= self.newest:
            raise ValueError(f"line {line.lineage} is not newer than line {self.newest}")
        if line.parent is not None and line.parent not in self._lines:
            raise ValueError(f"line {line.lineage} continues line {line.parent}, which is unknown")
        self._lines[line.lineage] = line

    def __contains__(self, lineage: int) -> bool:
        return lineage in self._lines

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def newest(self) -> int:
        """The largest line number. Raises ValueError for an empty tree."""
        return max(self._lines)

    def lines(self) -> list[Line]:
        """Oldest first."""
        return list(self._lines.values())

    def line(self, lineage: int) -> Line:
        """Raises KeyError for an unknown line."""
        return self._lines[lineage]

    def path(self, lineage: int) -> dict[int, int | None]:
        """Line -> the step at which the path to `lineage` leaves it (None: `lineage` itself)."""
        limits: dict[int, int | None] = {}
        here: int | None = lineage
        limit: int | None = None
        while here is not None:
            limits[here] = limit
            line = self._lines[here]
            limit = line.branch_step if limit is None else min(limit, line.branch_step)
            here = line.parent
        return limits

    def branch_points(self, lineage: int) -> dict[int, int]:
        """Every other line -> the policy number n0 at which it parted from `lineage`."""
        path = self.path(lineage)
        points: dict[int, int] = {}
        for other in self._lines:
            limit: int | None = None
            here: int | None = other
            while here is not None and here not in path:
                line = self._lines[here]
                limit = line.branch_step if limit is None else min(limit, line.branch_step)
                here = line.parent
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

    `number=None` means all of that line so far.
    """

    limits: Mapping[int, int | None]

    @classmethod
    def at(cls, tree: LineTree, lineage: int, number: int | None = None) -> Consumption:
        """Raises KeyError for an unknown line."""
        limits = tree.path(lineage)
        limits[lineage] = number
        return cls(limits)

    @classmethod
    def at_checkpoint(cls, tree: LineTree, checkpoint: PolicyVersion) -> Consumption:
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


def reached(tree: LineTree, batches: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Line -> the largest policy number that it can have made, from its batches (line, step)."""
    numbers = {line.lineage: line.branch_step for line in tree.lines()}
    for lineage, step in batches:
        if lineage in numbers:
            numbers[lineage] = max(numbers[lineage], step + 1)
    return numbers
