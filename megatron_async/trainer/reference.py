"""`ReferencePolicy`: the weights that log-probs of a frozen reference are computed with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_async.runtime.host_buffers import HostBuffers


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
