"""Copies that must be equal: found by name, compared over all ranks bit for bit.

Most of a model is held more than once: everything by the data-parallel ranks, norms and routers by
the tensor ranks of a stage too, a tied embedding by the first and the last stage. Each rank updates
its own copy, so a gradient that does not reach all of them, or a device that computes wrongly, lets
copies drift apart with nothing to see: what is exported and saved is one of them.

Invariants
- Which copies must be equal follows from the rules of the model's family, not from Megatron's
  process groups: a wrong group is one of the things to find.
- Values never leave their device; a rank sends one number and a name for each tensor that is held
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
from megatron_async.models.parameters import PlacedParameter, placed_parameters
from megatron_async.models.shards import ShardLayout
from megatron_async.trainer.optimizer import optimizer_parts
from megatron_async.trainer.policy_model import PolicyModel

Report: TypeAlias = list[tuple[str, int, int]]
"""A rank's tensors that other ranks hold too: name, owner and checksum of each."""


@dataclass(frozen=True, eq=False)
class HeldCopy:
    """This rank's part of one copy of a tensor: elements from `begin` on, of `count`.

    Copies with the same `name` must be equal. `owner`: the lowest of the ranks that hold this copy
    together, each a part of it; this rank, where it holds the whole.
    """

    name: str
    owner: int
    values_N: Tensor
    begin: int
    count: int

    def checksum(self) -> Tensor:
        """Return the sum of this part, [] on its device; sums add over the parts of a copy."""
        return checksum(self.values_N, (self.begin,), (self.count,))


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ, and the ranks that hold each of its versions."""

    name: str
    sides: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.name} (not the same on {' and on '.join(map(_ranks, self.sides))})"


def differences(reports: Sequence[Report]) -> list[Difference]:
    """Return the tensors whose copies differ, from the report of each rank."""
    totals: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name, owner, part in report:
            totals[name][owner] = signed(totals[name][owner] + part)
            holders[name].append((rank, owner))
    found = []
    for name, total_of in totals.items():
        if len(set(total_of.values())) > 1:
            sides: defaultdict[int, list[int]] = defaultdict(list)
            for rank, owner in holders[name]:
                sides[total_of[owner]].append(rank)
            found.append(Difference(name, tuple(map(tuple, sides.values()))))
    return found


class ReplicaCheck:
    """Compares the copies of a model and of its optimizer's float32 weights over all ranks."""

    def __init__(self, model: PolicyModel, optimizer: ChainedOptimizer, every_steps: int) -> None:
        """Collective: the ranks find the tensors that several of them hold. 0 steps: never."""
        self._model = model
        self._optimizer = optimizer
        self._every_steps = every_steps
        self._compared = False
        owners: defaultdict[str, set[int]] = defaultdict(set)
        mine = [(held.name, held.owner) for held in held_tensors(model, optimizer)]
        for part in _gathered(mine):
            for name, owner in part:
                owners[name].add(owner)
        self._shared = {name for name, of in owners.items() if len(of) > 1}

    def after_step(self, step: int) -> None:
        """Compare after the first step of this process, and where `step` divides.

        Raises ComponentFailure, on every rank.
        """
        if self._every_steps and (not self._compared or step % self._every_steps == 0):
            self.require_equal()
            self._compared = True

    def compare(self) -> list[Difference]:
        """Collective. Return the tensors whose copies differ, the same on every rank."""
        if not self._shared:
            return []
        held = [
            one for one in held_tensors(self._model, self._optimizer) if one.name in self._shared
        ]
        sums = torch.stack([one.checksum() for one in held]).tolist() if held else []
        report = [(one.name, one.owner, found) for one, found in zip(held, sums, strict=True)]
        return differences(_gathered(report))

    def require_equal(self) -> None:
        """Collective. Raises ComponentFailure, on all ranks alike, when any copies differ."""
        found = self.compare()
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ComponentFailure(
                f"trainer ranks that must hold equal weights do not: {found[0]}{more}; "
                "these weights are neither published nor saved. Start again from a checkpoint "
                "(--resume); if it happens again at the same ranks suspect their device, if at "
                "others the layout (parallel.*)"
            )


def held_tensors(model: PolicyModel, optimizer: ChainedOptimizer) -> Iterator[HeldCopy]:
    """This rank's parameters, and the float32 copies that the optimizer has of half-precision ones.

    In an order that never changes. Parameters in float32 are the optimizer's own.
    """
    rank = dist.get_rank()
    names = {}
    for placed in placed_parameters([model], model.architecture):
        names[id(placed.parameter)] = _name(placed)
        values_N = placed.parameter.detach().view(-1)
        yield HeldCopy(_name(placed), rank, values_N, 0, values_N.numel())
    for part in optimizer_parts(optimizer):
        for parameter, main_N, begin, owner in _main_parameters(part, rank):
            name = f"the optimizer's copy of {names[id(parameter)]}"
            yield HeldCopy(name, owner, main_N, begin, parameter.numel())


def _main_parameters(part: Any, rank: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """(parameter, this rank's part of its float32 copy, where that begins, owner of the copy)."""
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


def _name(placed: PlacedParameter) -> str:
    """The same on all ranks that hold the same values, and only there."""
    name = ", ".join(placed.tensor_names)
    if placed.size == 1 or placed.rule.layout is ShardLayout.REPLICATED:
        return name
    return f"{name} (tensor shard {placed.rank} of {placed.size})"


def _gathered(mine: list[Any]) -> list[list[Any]]:
    """Collective. Return the values of all ranks, in the order of ranks."""
    found: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks 0-3, 8` of 0, 1, 2, 3, 8."""
    starts = [ranks[0]] + [b for a, b in pairwise(ranks) if b != a + 1]
    ends = [a for a, b in pairwise(ranks) if b != a + 1] + [ranks[-1]]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
