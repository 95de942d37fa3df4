"""Checks that copies of the same weights on several ranks are equal bit for bit.

Most of a model is stored more than once: everything on all data-parallel ranks, norms and routers
also on all tensor ranks of a stage, a tied embedding on the first and the last stage. Each rank
updates its own copy. If a gradient does not reach all copies, or a device computes wrongly, the
copies become different. Without this check nothing would show it, because only one of the copies is
exported and saved.

Invariants
- Which copies must be equal is derived from the rules of the model's family. It is not derived from
  Megatron's process groups, because a wrong group is one of the faults that this check detects.
- Values never leave their device. A rank sends one number and a name for each tensor that is stored
  more than once.
- Every rank raises the same error, or none does.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_async.checkpoint.checksum import checksum, signed
from megatron_async.errors import ComponentFailure
from megatron_async.models.parameters import LocalParameter, local_parameters
from megatron_async.models.shards import ShardLayout
from megatron_async.trainer.optimizer import optimizer_parts
from megatron_async.trainer.policy_model import PolicyModel

Report: TypeAlias = list[tuple[str, int, int]]
"""Report of one rank: for each tensor of which several ranks have copies, its name, the owner of
this rank's copy (`TensorCopy.owner`), and the checksum of this rank's slice of the copy."""


@dataclass(frozen=True, eq=False)
class TensorCopy:
    """This rank's slice of one copy of a tensor. A copy is stored by one rank, or in slices by
    several ranks.

    Copies with the same `name` must be equal.

    Attributes:
        name: Name of the tensor.
        owner: The lowest of the ranks that store this copy, which identifies the copy.
        values_N: The elements of this rank's slice.
        begin: Index of the slice's first element in the copy.
        count: Number of elements of the whole copy.
    """

    name: str
    owner: int
    values_N: Tensor
    begin: int
    count: int

    def checksum(self) -> Tensor:
        """Return the checksum of this slice, on its device. The sum of the checksums of all slices
        is the checksum of the whole copy."""
        return checksum(self.values_N, (self.begin,), (self.count,))


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ. Within each of `rank_groups`, the copies are equal."""

    name: str
    rank_groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.name} (not the same on {' and on '.join(map(_ranks, self.rank_groups))})"


def differences(reports: Sequence[Report]) -> list[Difference]:
    """Return the tensors whose copies differ, according to the reports of all ranks in the order of
    their numbers."""
    totals: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name, owner, value in report:
            totals[name][owner] = signed(totals[name][owner] + value)
            holders[name].append((rank, owner))
    found = []
    for name, total_of in totals.items():
        if len(set(total_of.values())) > 1:
            by_total: defaultdict[int, list[int]] = defaultdict(list)
            for rank, owner in holders[name]:
                by_total[total_of[owner]].append(rank)
            found.append(Difference(name, tuple(map(tuple, by_total.values()))))
    return found


class ReplicaCheck:
    """Compares copies of the model's weights, and of the optimizer's float32 weights, over all
    ranks."""

    def __init__(self, model: PolicyModel, optimizer: ChainedOptimizer, every_steps: int) -> None:
        """Determine of which tensors several ranks have copies. All ranks must create the object
        together.

        Args:
            model: This rank's part of the model.
            optimizer: Its optimizer.
            every_steps: Training steps between two comparisons; 0 for none.
        """
        self._model = model
        self._optimizer = optimizer
        self._every_steps = every_steps
        self._compared = False
        owners: defaultdict[str, set[int]] = defaultdict(set)
        mine = [(copy.name, copy.owner) for copy in stored_copies(model, optimizer)]
        for rank_copies in _gathered(mine):
            for name, owner in rank_copies:
                owners[name].add(owner)
        self._shared = {name for name, of in owners.items() if len(of) > 1}

    def after_step(self, step: int) -> None:
        """Compare copies if `step` is the first step after this object's creation, or a multiple of
        `every_steps`. If `every_steps` is 0, do nothing.

        Raises:
            ComponentFailure: Copies differ; raised on every rank.
        """
        if self._every_steps and (not self._compared or step % self._every_steps == 0):
            self.require_equal()
            self._compared = True

    def compare(self) -> list[Difference]:
        """Return the tensors whose copies on several ranks differ; every rank gets the same result.
        Collective."""
        if not self._shared:
            return []
        copies = [
            copy
            for copy in stored_copies(self._model, self._optimizer)
            if copy.name in self._shared
        ]
        sums = torch.stack([copy.checksum() for copy in copies]).tolist() if copies else []
        report = [(copy.name, copy.owner, found) for copy, found in zip(copies, sums, strict=True)]
        return differences(_gathered(report))

    def require_equal(self) -> None:
        """Compare all weights that several ranks store; if any rank's copy of a weight differs from
        another rank's, raise ComponentFailure on every rank. Collective."""
        found = self.compare()
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ComponentFailure(
                f"weights that must be equal on several trainer ranks differ: {found[0]}{more}; "
                "these weights are neither published nor saved. Resume from a checkpoint "
                "(--resume). If the same ranks differ again, suspect their device; if other ranks "
                "differ, suspect the layout (parallel.*)."
            )


def stored_copies(model: PolicyModel, optimizer: ChainedOptimizer) -> Iterator[TensorCopy]:
    """Yield this rank's parameters, and then the float32 copies that the optimizer has of
    half-precision parameters.

    The order is the same at every call. The optimizer has no copies of float32 parameters; it
    updates them directly.
    """
    rank = dist.get_rank()
    names = {}
    for placed in local_parameters([model], model.architecture):
        names[id(placed.parameter)] = _name(placed)
        values_N = placed.parameter.detach().view(-1)
        yield TensorCopy(_name(placed), rank, values_N, 0, values_N.numel())
    for part in optimizer_parts(optimizer):
        for parameter, main_N, begin, owner in _main_parameters(part, rank):
            name = f"the optimizer's copy of {names[id(parameter)]}"
            yield TensorCopy(name, owner, main_N, begin, parameter.numel())


def _main_parameters(part: Any, rank: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield this rank's slices of the optimizer's float32 copies.

    Yields:
        The parameter, this rank's slice of its float32 copy, the index of the slice's first
        element, and the owner of the copy.
    """
    if isinstance(part, DistributedOptimizer):
        owner = dist.get_process_group_ranks(part.data_parallel_group)[0]
        for parameter in part.model_param_gbuf_map:
            if getattr(parameter, "main_param", None) is not None:
                begin = part._get_model_param_range_map(parameter)["param"].start
                yield parameter, parameter.main_param.detach(), begin, owner
        return
    for group in getattr(part, "float16_groups", ()):
        for parameter in group:
            yield parameter, parameter.main_param.detach().view(-1), 0, rank


def _name(placed: LocalParameter) -> str:
    """Return a name for a parameter. Two ranks have the same name if and only if their values of
    the parameter must be equal."""
    name = ", ".join(placed.tensor_names)
    if placed.size == 1 or placed.rule.layout is ShardLayout.REPLICATED:
        return name
    return f"{name} (tensor shard {placed.rank} of {placed.size})"


def _gathered(mine: list[Any]) -> list[list[Any]]:
    """Return `mine` of every rank, in the order of ranks. Collective."""
    found: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers for a message: (0, 1, 2, 3, 8) becomes "ranks 0-3, 8"."""
    starts = [ranks[0]] + [b for a, b in pairwise(ranks) if b != a + 1]
    ends = [a for a, b in pairwise(ranks) if b != a + 1] + [ranks[-1]]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
