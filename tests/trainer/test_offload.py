"""Tests that offloading frees the trainer's device memory, and that reloading restores the trainer
bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_async.config.load import merge
from megatron_async.trainer.offload import (
    DeviceContents,
    HostCopies,
    TrainerOffloader,
    gradient_tensors,
    optimizer_tensors,
    weight_tensors,
)
from megatron_async.trainer.step import PolicyTrainer
from tests.trainer.cases import ragged_batch, settings, trainer_session


def everything(_tensor: torch.Tensor) -> bool:
    """Select every tensor for offloading; on a CPU no tensor would have to move."""
    return True


def test_host_copies_allocate_host_memory_only_once() -> None:
    """Pinning memory takes longer than copying, and the same tensors are offloaded every step."""
    tensors = [torch.randn(1000), torch.randn(7)]
    copies = HostCopies(everything)
    copies.offload(tensors)
    copies.onload()
    pointers = [buffer.data_ptr() for buffer in copies._host._kept]
    assert len(pointers) == len(tensors)
    originals = [tensor.clone() for tensor in tensors]
    copies.offload(tensors)
    assert [buffer.data_ptr() for buffer in copies._host._kept] == pointers
    copies.onload()
    assert all(torch.equal(a, b) for a, b in zip(tensors, originals, strict=True))


@pytest.mark.slow
@pytest.mark.one_core
def test_offload_frees_gradients_without_copying_them_to_the_host(
    model_dir: Path, process: None
) -> None:
    with trainer_session(settings(model_dir, {"model": {"dtype": "bfloat16"}})) as trainer:
        memory = TrainerOffloader(trainer, everything)
        kept = [
            x.untyped_storage() for x in (*weight_tensors(trainer), *optimizer_tensors(trainer))
        ]
        expected = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
        gradients = list(gradient_tensors(trainer))
        assert gradients and all(x.untyped_storage().nbytes() for x in gradients)
        memory.keep_on_device(DeviceContents.NOTHING)
        assert not any(x.untyped_storage().nbytes() for x in gradients)
        copied = [*memory._weights._host._kept, *memory._optimizer._host._kept]
        assert sum(copy.nbytes for copy in copied) == expected
        memory.keep_on_device(DeviceContents.ALL)
        assert all(x.untyped_storage().nbytes() for x in gradients)


def memory_of(trainer: PolicyTrainer) -> tuple[int, int]:
    """Return the bytes of the weights, and of gradients and optimizer states together."""

    def size(tensors: Iterator[torch.Tensor]) -> int:
        storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    others = (*gradient_tensors(trainer), *optimizer_tensors(trainer))
    return size(weight_tensors(trainer)), size(iter(others))


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_trainer_trains_bit_for_bit_as_a_resident_one(
    model_dir: Path, process: None, distributed: bool, dtype: str
) -> None:
    kind = merge(
        {"optimizer": {"lr": 1e-3, "distributed": distributed}}, {"model": {"dtype": dtype}}
    )
    losses: dict[bool, list[float]] = {}
    for offloads in (False, True):
        with trainer_session(settings(model_dir, kind)) as trainer:
            memory = TrainerOffloader(trainer, everything)
            full = memory_of(trainer)
            losses[offloads] = []
            for step in range(3):
                memory.keep_on_device(DeviceContents.ALL)
                losses[offloads].append(trainer.train_batch(ragged_batch(step)).loss)
                if not offloads:
                    continue
                memory.keep_on_device(DeviceContents.WEIGHTS)
                weights, rest = memory_of(trainer)
                assert weights > 0 and rest < full[1]
                before = trainer.compute_logprobs(ragged_batch(step))
                memory.keep_on_device(DeviceContents.NOTHING)
                assert memory_of(trainer) == (0, 0)
                memory.keep_on_device(DeviceContents.WEIGHTS)
                assert (trainer.compute_logprobs(ragged_batch(step)) == before).all()
                memory.keep_on_device(DeviceContents.NOTHING)
            memory.keep_on_device(DeviceContents.ALL)
            assert memory_of(trainer) == full
    assert losses[True] == losses[False]
