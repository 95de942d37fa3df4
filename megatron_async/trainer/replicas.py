"""Copies that must be equal: found by name, compared over all ranks bit for bit.

Most of a model is held more than once: everything by the data-parallel ranks, norms and routers by
the tensor ranks of a stage too, a tied embedding by the first and the last stage. Each rank updates
its own copy, so a gradient that does not reach all of them, or a device that computes wrongly, lets
copies drift apart with nothing to see: what is exported and saved is one of them.

Invariants
- Which copies must be equal follows from the rules of the model's family, not from Megatron's
  process groups: a wrong group is one of the things to find.
- Values never leave their device; each rank sends one number for each of its tensors.
- Every rank raises the same error, or none does.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_async.checkpoint.checksum import checksum
from megatron_async.errors import ComponentFailure
from megatron_async.models.parameters import PlacedParameter, placed_parameters
from megatron_async.models.shards import ShardLayout
from megatron_async.trainer.device import current_device
from megatron_async.trainer.optimizer import optimizer_parts
from megatron_async.trainer.policy_model import PolicyModel

SumMatrix = npt.NDArray[np.int64]


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
        return checksum(self.values_N, (self.begin,), (self.count,))


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies are not equal: the ranks that hold each version of it."""

    name: str
    sides: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.name} (not the same on {' and on '.join(map(_ranks, self.sides))})"


class DifferingEntry(NamedTuple):
    """The first rank that holds a tensor, its column there, and the ranks of each version of it."""

    rank: int
    column: int
    sides: tuple[tuple[int, ...], ...]


class Copies:
    """Pure: which entries of the ranks' lists are copies of each other.

    `described[rank]` lists (name's hash, owner) in the order in which that rank sends its numbers.
    """

    def __init__(self, described: Sequence[Sequence[tuple[int, int]]]) -> None:
        owners: defaultdict[int, set[int]] = defaultdict(set)
        for key, owner in chain.from_iterable(described):
            owners[key].add(owner)
        self.sent = [
            [slot for slot, (key, _) in enumerate(part) if len(owners[key]) > 1]
            for part in described
        ]
        self.width = max((len(slots) for slots in self.sent), default=0)
        entries = [
            (rank, column, *described[rank][slot])
            for rank, slots in enumerate(self.sent)
            for column, slot in enumerate(slots)
        ]
        table_E4 = np.array(entries, dtype=np.int64).reshape(-1, 4)
        self._rank_E, self._column_E, self._key_E, _ = table_E4.T
        copies_C2, copy_E = np.unique(table_E4[:, 2:], axis=0, return_inverse=True)
        self._copy_E, self._key_C = copy_E.reshape(-1), copies_C2[:, 0]

    def differing(self, sums_RW: SumMatrix) -> list[DifferingEntry]:
        """The tensors whose copies are not equal, where `sums_RW[rank, column]` was sent."""
        totals_C = np.zeros(len(self._key_C), np.int64)
        np.add.at(totals_C, self._copy_E, sums_RW[self._rank_E, self._column_E])  # modulo 2^64
        first_C = np.searchsorted(self._key_C, self._key_C)
        found = []
        for key in np.unique(self._key_C[totals_C != totals_C[first_C]]):
            members = np.flatnonzero(self._key_E == key)
            totals, ranks = totals_C[self._copy_E[members]].tolist(), self._rank_E[members].tolist()
            sides: defaultdict[int, list[int]] = defaultdict(list)
            for total, rank in zip(totals, ranks, strict=True):
                sides[total].append(rank)
            column = int(self._column_E[members[0]])
            found.append(DifferingEntry(ranks[0], column, tuple(map(tuple, sides.values()))))
        return sorted(found)


class ReplicaCheck:
    """Compares the copies of one model and its optimizer. All ranks make and call it together.

    `every_steps` of 0: never.
    """

    def __init__(self, model: PolicyModel, optimizer: ChainedOptimizer, every_steps: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._every_steps = every_steps
        self._compared = False
        described: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
        mine = [(_key(held.name), held.owner) for held in held_tensors(model, optimizer)]
        dist.all_gather_object(described, mine)
        self._copies = Copies(described)
        self._mine = set(self._copies.sent[dist.get_rank()])

    def after_step(self, step: int) -> None:
        """Collective. `require_equal`, after this process's first step and every so many."""
        if self._every_steps and (not self._compared or step % self._every_steps == 0):
            self.require_equal()
            self._compared = True

    def compare(self) -> list[Difference]:
        """Collective. The tensors whose copies differ, in the order of the model."""
        if not self._copies.width:
            return []
        chosen = [
            held
            for slot, held in enumerate(held_tensors(self._model, self._optimizer))
            if slot in self._mine
        ]
        sums_W = torch.zeros(self._copies.width, dtype=torch.int64, device=current_device())
        for column, held in enumerate(chosen):
            sums_W[column] = held.checksum()
        sums_RW = [torch.empty_like(sums_W) for _ in range(dist.get_world_size())]
        dist.all_gather(sums_RW, sums_W)
        found = self._copies.differing(torch.stack(sums_RW).cpu().numpy())
        if not found:
            return []
        # A hash has no meaning: the first rank that holds a tensor has its name.
        names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        mine = [chosen[entry.column].name for entry in found if entry.rank == dist.get_rank()]
        dist.all_gather_object(names, mine)
        ordered = [name for part in names for name in part]
        return [Difference(name, entry.sides) for name, entry in zip(ordered, found, strict=True)]

    def require_equal(self) -> None:
        """Collective. Raises ComponentFailure, on all ranks alike, when any copies differ."""
        differences = self.compare()
        if differences:
            more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
            raise ComponentFailure(
                f"trainer ranks that must hold equal weights do not: {differences[0]}{more}; "
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


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks 0-3, 8` of 0, 1, 2, 3, 8."""
    starts = [ranks[0]] + [b for a, b in pairwise(ranks) if b != a + 1]
    ends = [a for a, b in pairwise(ranks) if b != a + 1] + [ranks[-1]]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
