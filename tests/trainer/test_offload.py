"""Device memory given away and taken back: bit for bit the same trainer, and really away."""

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
    """On a CPU nothing has to move; for the tests all of it does."""
    return True


def test_host_memory_is_asked_for_once() -> None:
    """Pinning takes longer than copying, and what leaves is the same every step."""
    tensors = [torch.randn(1000), torch.randn(7)]
    copies = HostCopies(everything)
    copies.offload(tensors)
    copies.onload()
    held = [buffer.data_ptr() for buffer in copies._host._kept]
    assert len(held) == len(tensors)
    originals = [tensor.clone() for tensor in tensors]
    copies.offload(tensors)
    assert [buffer.data_ptr() for buffer in copies._host._kept] == held
    copies.onload()
    assert all(torch.equal(a, b) for a, b in zip(tensors, originals, strict=True))


@pytest.mark.slow
@pytest.mark.one_core
def test_gradients_are_freed_and_not_copied_to_host_memory(model_dir: Path, process: None) -> None:
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


def held(trainer: PolicyTrainer) -> tuple[int, int]:
    """Bytes of the weights, and of everything else."""

    def size(tensors: Iterator[torch.Tensor]) -> int:
        storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    others = (*gradient_tensors(trainer), *optimizer_tensors(trainer))
    return size(weight_tensors(trainer)), size(iter(others))


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_was_away_trains_on_as_if_it_had_not_been(
    model_dir: Path, process: None, distributed: bool, dtype: str
) -> None:
    kind = merge(
        {"optimizer": {"lr": 1e-3, "distributed": distributed}}, {"model": {"dtype": dtype}}
    )
    losses: dict[bool, list[float]] = {}
    for away in (False, True):
        with trainer_session(settings(model_dir, kind)) as trainer:
            memory = TrainerOffloader(trainer, everything)
            full = held(trainer)
            losses[away] = []
            for step in range(3):
                memory.keep_on_device(DeviceContents.ALL)
                losses[away].append(trainer.train_batch(ragged_batch(step)).loss)
                if not away:
                    continue
                memory.keep_on_device(DeviceContents.WEIGHTS)
                weights, rest = held(trainer)
                assert weights > 0 and rest < full[1]
                before = trainer.compute_logprobs(ragged_batch(step))
                memory.keep_on_device(DeviceContents.NOTHING)
                assert held(trainer) == (0, 0)
                memory.keep_on_device(DeviceContents.WEIGHTS)
                assert (trainer.compute_logprobs(ragged_batch(step)) == before).all()
                memory.keep_on_device(DeviceContents.NOTHING)
            memory.keep_on_device(DeviceContents.ALL)
            assert held(trainer) == full
    assert losses[True] == losses[False]
