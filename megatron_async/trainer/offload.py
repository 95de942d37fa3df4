"""Moves a trainer off its device while engines on the same device generate, and back.

With `engines.placement: colocated`, trainer and engines alternate. While engines generate, weights
and optimizer state are in host memory. While weights are sent, only the weights are on the device.
While the trainer trains, all of its tensors are.

Invariants
- A tensor's values survive bit for bit, and so do all views of it: its storage is emptied and
  filled again, never replaced (Megatron's parameters, buckets and shards are views of buffers).
- The values of gradients are not kept: every optimizer update sets them to zero first, so their
  memory is freed without a copy.
- No code may read a tensor while it is off the device, because its emptied storage has no bytes.
- Tensors that are in host memory anyway (on a CPU, all of them) are not moved.
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
    """Tensors of a trainer that are on its device."""

    ALL = "all"
    WEIGHTS = "weights"
    NOTHING = "nothing"


class NoOffload:
    """Replacement of `TrainerOffloader` that does nothing, for `engines.placement: disaggregated`,
    where the trainer has its own devices."""

    def keep_on_device(self, contents: DeviceContents) -> None:
        """Do nothing: all of the trainer stays on the device."""


class FreedStorages:
    """Frees the device memory of tensors whose values need not be kept, and allocates it again."""

    def __init__(self, moves: Callable[[Tensor], bool]) -> None:
        """Start with no memory freed; `moves(tensor)` returns whether a tensor is on a device to be
        cleared."""
        self._moves = moves
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    def free(self, tensors: Iterable[Tensor]) -> None:
        """Free the device memory of these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._moves(tensor) and storage.nbytes():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the freed memory again; the values of the tensors are then undefined."""
        for storage, size in self._freed:
            storage.resize_(size)
        self._freed = []


class HostCopies:
    """Moves tensors to host memory and back, keeping their values."""

    def __init__(self, moves: Callable[[Tensor], bool]) -> None:
        """Start with nothing moved; `moves(tensor)` returns whether a tensor is on a device to be
        cleared."""
        self._moves = moves
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host = HostBuffers()

    @property
    def offloaded(self) -> bool:
        """Whether any tensor is in host memory at present."""
        return bool(self._moved)

    def offload(self, tensors: Iterable[Tensor], excluded: Iterable[Tensor] = ()) -> int:
        """Copy `tensors` to host memory and free their device memory; return the number of bytes
        moved.

        Tensors that share memory with one of `excluded` stay on the device.
        """
        kept = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        moved = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._moves(tensor) or not storage.nbytes() or storage.data_ptr() in kept:
                continue
            copy = self._host.copy(len(self._moved), _bytes_of(storage))
            self._moved.append((storage, copy))
            moved += copy.nbytes
            storage.resize_(0)
        return moved

    def onload(self) -> None:
        """Copy all moved tensors back to the device."""
        for storage, copy in self._moved:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
        self._moved = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class TrainerOffloader:
    """Moves one rank's weights, gradients and optimizer state between its device and host
    memory."""

    def __init__(self, trainer: Any, moves: Callable[[Tensor], bool] = _on_gpu) -> None:
        """Manage `trainer`, which is on its device at first.

        Args:
            trainer: Object with `wrapped` (Megatron's DistributedDataParallel) and `optimizer`
                (Megatron's).
            moves: Function that returns whether a tensor is on a device that must be cleared. By
                default, these are the tensors on a GPU.
        """
        self._trainer = trainer
        self._weights = HostCopies(moves)
        self._optimizer = HostCopies(moves)
        self._gradients = FreedStorages(moves)
        self.contents = DeviceContents.ALL

    def keep_on_device(self, contents: DeviceContents) -> None:
        """Move tensors so that exactly those of `contents` are on the device: all, only the
        weights, or none."""
        if contents is DeviceContents.ALL:
            self._weights.onload()
            self._optimizer.onload()
            self._gradients.allocate()
        else:
            self._gradients.free(gradient_tensors(self._trainer))
            if not self._optimizer.offloaded:
                weights = [] if self._weights.offloaded else list(weight_tensors(self._trainer))
                self._optimizer.offload(optimizer_tensors(self._trainer), excluded=weights)
            if contents is DeviceContents.WEIGHTS:
                self._weights.onload()
            elif not self._weights.offloaded:
                self._weights.offload(weight_tensors(self._trainer))
            if torch.cuda.is_available():
                # Frees the buckets of a weight update that engines have closed.
                torch.cuda.ipc_collect()
                # Returns freed memory to the device, so that engines can use it.
                torch.cuda.empty_cache()
        self.contents = contents


TrainerMemory = NoOffload | TrainerOffloader


def trainer_memory(config: RunConfig, trainer: Any) -> TrainerMemory:
    """Return the memory manager for the setting `engines.placement`."""
    return TrainerOffloader(trainer) if config.engines.placement == "colocated" else NoOffload()


def weight_tensors(trainer: Any) -> Iterator[Tensor]:
    """Yield the parameters and buffers of the trainer's model."""
    yield from (parameter.data for parameter in trainer.wrapped.parameters())
    yield from trainer.wrapped.module.buffers()


def gradient_tensors(trainer: Any) -> Iterator[Tensor]:
    """Yield the buffers in which Megatron sums the gradients of an update."""
    wrapped = trainer.wrapped
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        yield buffer.grad_data


def optimizer_tensors(trainer: Any) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer updates (its copies of the weights or, in float32, the
    weights themselves), and its state (Adam's moments, Muon's momentum)."""
    for part in optimizer_parts(trainer.optimizer):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
