"""Provides the tree of a run's lineages, and which batches were consumed (trained) on each lineage.

It computes only, and reads and writes no files. Every start or resume of a run begins a lineage. A
resumed lineage continues lineage `parent` from the checkpoint of policy number `branch_step`, which
has the weights after updates 0 to branch_step - 1. A batch is identified by the lineage and the
step (update number) that it was made for: (lineage, step). It is consumed at a checkpoint if the
weights of that checkpoint were trained on it.

Invariants
- Batch (l, s) is consumed at checkpoint (L, n) exactly when it is on the path to that checkpoint:
  l = L and s < n, or l is an ancestor of L and s < the step at which the path leaves l.
- A resume from an older checkpoint deletes no records. It only adds a lineage, and which batches
  are consumed is always computed from the tree. So a later resume may continue any lineage, even
  one that an earlier resume abandoned, without having to undo anything.
- A lineage's number is larger than its parent's.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_async.trajectory.types import PolicyVersion

ALL: Final = sys.maxsize
"""A number larger than every step; as a limit it means that a path does not leave a lineage."""


class Lineage(NamedTuple):
    """One lineage: the part of a run between a start or resume and the next resume.

    Attributes:
        lineage: Number of the lineage.
        parent: Number of the lineage that it continues; None for the first lineage.
        branch_step: Policy number of the checkpoint in `parent` from which it continues, which is
            also its first step.
    """

    lineage: int
    parent: int | None
    branch_step: int


class LineageTree:
    """The lineages of one run, which form a tree through their parents.

    They are in ascending order of their numbers, which is the order in which they began.
    """

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        self._lineages: dict[int, Lineage] = {}
        for one in sorted(lineages, key=lambda one: one.lineage):
            self.add(one)

    def add(self, one: Lineage) -> None:
        """Add the lineage `one` to the tree.

        Raises:
            ValueError: Its number is not larger than all numbers in the tree, or its parent is not
                in the tree.
        """
        if self._lineages and one.lineage <= self.newest:
            raise ValueError(
                f"lineage is {one.lineage}, which is not larger than the newest, {self.newest}"
            )
        if one.parent is not None and one.parent not in self._lineages:
            raise ValueError(
                f"lineage {one.lineage} continues lineage {one.parent}, which does not exist"
            )
        self._lineages[one.lineage] = one

    def __contains__(self, lineage: int) -> bool:
        return lineage in self._lineages

    def __bool__(self) -> bool:
        return bool(self._lineages)

    @property
    def newest(self) -> int:
        """The number of the newest lineage in the tree, which is the largest number.

        Raises:
            ValueError: The tree is empty.
        """
        return max(self._lineages)

    def lineages(self) -> list[Lineage]:
        """Return all lineages of the tree, oldest first."""
        return list(self._lineages.values())

    def path(self, lineage: int) -> dict[int, int]:
        """Return, for `lineage` and each ancestor, the first step that did not lead to `lineage`.

        The path is the sequence of updates that led to `lineage`. It includes the updates of an
        ancestor before the step at which the next lineage continued that ancestor. If that next
        lineage was itself left at a smaller step, that smaller step counts. For `lineage` itself
        the value is `ALL`, since all its updates are on the path.
        """
        limits: dict[int, int] = {}
        here: int | None = lineage
        limit = ALL
        while here is not None:
            limits[here] = limit
            _, parent, branch_step = self._lineages[here]
            here, limit = parent, min(limit, branch_step)
        return limits

    def branch_points(self, lineage: int) -> dict[int, int]:
        """Return, for each other lineage, the last policy number that it shares with `lineage`.

        The two lineages have the same weights up to this policy number. It is 0 for lineages
        without a common ancestor.
        """
        ours = self.path(lineage)
        points: dict[int, int] = {}
        for other in self._lineages.keys() - {lineage}:
            theirs = self.path(other)
            common = next((here for here in theirs if here in ours), None)
            # Lineages without a common ancestor share only the initial weights, policy number 0.
            points[other] = 0 if common is None else min(theirs[common], ours[common])
        return points


@dataclass(frozen=True)
class Consumption:
    """The set of batches on which the weights of one policy version of a run were trained.

    These batches are called consumed at that version.

    Attributes:
        limits: For every lineage on the path to the policy version, its first step whose batch is
            not consumed.
    """

    limits: Mapping[int, int]

    @classmethod
    def at(cls, tree: LineageTree, lineage: int, number: int = ALL) -> "Consumption":
        """Return the set of batches on which version (`lineage`, `number`) was trained.

        Args:
            tree: All lineages of the run.
            lineage: Number of the lineage.
            number: Policy number; `ALL` includes every batch of the lineage so far.

        Raises:
            KeyError: The tree has no such lineage.
        """
        return cls({on_path: min(limit, number) for on_path, limit in tree.path(lineage).items()})

    @classmethod
    def at_checkpoint(cls, tree: LineageTree, checkpoint: PolicyVersion) -> "Consumption":
        """Return the set of batches on which the weights of `checkpoint` were trained."""
        return cls.at(tree, checkpoint.lineage, checkpoint.number)

    def contains(self, lineage: int, step: int) -> bool:
        """Return whether the batch of update `step` on lineage `lineage` is in this set."""
        return step < self.limits.get(lineage, 0)

    def descends_from(self, lineage: int, number: int) -> bool:
        """Return whether updates led from version (`lineage`, `number`) to this set's version.

        This set's version is the policy version whose batches the set has. The result is also true
        if both versions are the same.
        """
        return number <= self.limits.get(lineage, -1)
