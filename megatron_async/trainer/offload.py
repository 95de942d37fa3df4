"""A trainer's device memory, given away while engines on the same devices generate, and back.

`engines.placement: colocated` alternates: weights and optimizer state are in host memory while
engines generate; only the weights are on the device while they are sent; all of it is while the
trainer trains.

Invariants
- A tensor's values survive bit for bit, and so do all views of it: its storage is emptied and
  filled again, never replaced (Megatron's parameters, buckets and shards are views of buffers).
- Gradients are the exception: every update zeroes them first, so their memory is only freed.
- While a part is away nothing may read it: an emptied storage has no bytes.
- What is in host memory anyway (on a CPU: everything) is left where it is.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.config import RunConfig
from megatron_async.runtime.host_buffers import HostBuffers
from megatron_async.trainer.optimizer import optimizer_parts


class DeviceContents(enum.Enum):
    """Part of a trainer that is on its device."""

    ALL = "all"
    WEIGHTS = "weights"
    NOTHING = "nothing"


class NoOffload:
    """`engines.placement: disaggregated`: the trainer has its devices for itself."""

    def keep_on_device(self, residence: DeviceContents) -> None:
        """Leave all of it on the device."""


class FreedStorages:
    """Storages whose values may be lost; each has its memory on the device, or none."""

    def __init__(self, moves: Callable[[Tensor], bool]) -> None:
        """`moves(tensor)`: whether a tensor is on a device that must be cleared."""
        self._moves = moves
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def free(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._moves(tensor) and storage.nbytes():
                self._away.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate(self) -> None:
        """Give them memory of the same size again, whose values are undefined."""
        for storage, size in self._away:
            storage.resize_(size)
        self._away = []


class HostCopies:
    """Storages of one part of the trainer, which are on the device or in host memory."""

    def __init__(self, moves: Callable[[Tensor], bool]) -> None:
        """`moves(tensor)`: whether a tensor is on a device that must be cleared."""
        self._moves = moves
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host = HostBuffers()

    @property
    def offloaded(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
        """Copy to host memory and empty; storages of `but` stay. Returns the bytes that moved."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in but}
        moved = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._moves(tensor) or not storage.nbytes() or storage.data_ptr() in kept:
                continue
            copy = self._host.copy(len(self._away), _bytes_of(storage))
            self._away.append((storage, copy))
            moved += copy.nbytes
            storage.resize_(0)
        return moved

    def onload(self) -> None:
        """Fill the storages again."""
        for storage, copy in self._away:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
        self._away = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class TrainerOffloader:
    """The memory of one rank's trainer."""

    def __init__(self, trainer: Any, moves: Callable[[Tensor], bool] = _on_gpu) -> None:
        """`trainer` has `wrapped` (Megatron's DDP) and `optimizer` (Megatron's)."""
        self._trainer = trainer
        self._weights = HostCopies(moves)
        self._optimizer = HostCopies(moves)
        self._gradients = FreedStorages(moves)
        self.residence = DeviceContents.ALL

    def keep_on_device(self, residence: DeviceContents) -> None:
        """Move what must move so that exactly this is on the device."""
        if residence is DeviceContents.ALL:
            self._weights.onload()
            self._optimizer.onload()
            self._gradients.allocate()
        else:
            self._gradients.free(gradient_tensors(self._trainer))
            if not self._optimizer.offloaded:
                weights = [] if self._weights.offloaded else list(weight_tensors(self._trainer))
                self._optimizer.offload(optimizer_tensors(self._trainer), but=weights)
            if residence is DeviceContents.WEIGHTS:
                self._weights.onload()
            elif not self._weights.offloaded:
                self._weights.offload(weight_tensors(self._trainer))
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()  # buckets that engines have opened and let go
                torch.cuda.empty_cache()  # else the caching allocator keeps what was freed
        self.residence = residence


TrainerMemory = NoOffload | TrainerOffloader


def trainer_memory(config: RunConfig, trainer: Any) -> TrainerMemory:
    """Return the memory manager that `engines.placement` asks for."""
    return TrainerOffloader(trainer) if config.engines.placement == "colocated" else NoOffload()


def weight_tensors(trainer: Any) -> Iterator[Tensor]:
    """Parameters and buffers of the model."""
    yield from (parameter.data for parameter in trainer.wrapped.parameters())
    yield from trainer.wrapped.module.buffers()


def gradient_tensors(trainer: Any) -> Iterator[Tensor]:
    """Buffers in which an update adds up its gradients."""
    wrapped = trainer.wrapped
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        yield buffer.grad_data


def optimizer_tensors(trainer: Any) -> Iterator[Tensor]:
    """The optimizer's own copies of the weights, and its moments."""
    for part in optimizer_parts(trainer.optimizer):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
