"""The loss of a microbatch by the run's algorithm; the reference policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron_async_kernels.loss_types import Denominators, LossOutput

from megatron_async.algorithms.algorithm import Algorithm
from megatron_async.host_buffers import HostBuffers
from megatron_async.trainer.forward import LossFunction, Microbatch
from megatron_async.trainer.packed import TokenLogprobs


def loss_of(algorithm: Algorithm, denominators: Denominators) -> LossFunction:
    """The algorithm's loss, of microbatches of one prepared minibatch."""

    def loss(micro: Microbatch, output: TokenLogprobs, *, check: bool) -> LossOutput:
        inputs = algorithm.inputs(micro.rows, output.logprobs_R, output.entropy_R)
        return algorithm.loss(inputs, denominators, check=check)

    return loss


class ReferencePolicy:
    """The weights that a model had when this was made, kept in host memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own = HostBuffers()
        self._frozen = self._snapshot(HostBuffers())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference weights inside, bit-exactly its own after."""
        own = self._snapshot(self._own)
        try:
            self._install(self._frozen)
            yield
        finally:
            self._install(own)

    def _snapshot(self, buffers: HostBuffers) -> list[torch.Tensor]:
        return [
            buffers.copy(place, parameter.detach())
            for place, parameter in enumerate(self._model.parameters())
        ]

    @torch.no_grad()
    def _install(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def mean_of(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it."""
    names = {name: None for one in metrics for name in one}
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}
