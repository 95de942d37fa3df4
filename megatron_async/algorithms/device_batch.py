"""`DeviceBatch`: a batch as tensors on the device that computes with it.

Invariants
- The arrays of a `TokenBatch` go to the device once, in `DeviceBatch.of`. From there to the loss
  and the metrics all is torch on that device, and parts of a batch are picked there.
- In the trainer and in losses only `to_device` and `to_host` turn arrays into tensors and back.
- To a GPU an array goes through pinned memory (of torch's cache, so that it is pinned once): a copy
  from other host memory makes the host wait for all that the GPU has been given.
- Fields in `_T` have an entry for each token and those in `_S` for each sequence, as in
  `TokenBatch`, and its type.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from megatron_async_kernels.packed import segment_sum
from torch import Tensor

from megatron_async.trajectory.batch import TokenBatch


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """A tensor of its own there: arrays of a batch may be read-only."""
    tensor, target = torch.tensor(array), torch.device(device)
    return (tensor.pin_memory() if target.type == "cuda" else tensor).to(target, non_blocking=True)


def to_host(values: Tensor) -> npt.NDArray[Any]:
    """Results as an array; waits for the device."""
    array: npt.NDArray[Any] = values.cpu().numpy()
    return array


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """S sequences, T tokens; what `TokenBatch` does not have is None until it is computed.

    `old_logprobs_T` and `ref_logprobs_T` are filled in by the trainer. The algorithm fills in
    `shaped_rewards_S` (rewards with length shaping and the reference KL), `advantages_T` and
    `is_weights_T` (decoupled correction). `columns` holds further values of each token, [T, ...],
    for a loss function of the user's.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    rollout_logprobs_T: Tensor
    lag_T: Tensor
    cu_seqlens_S1: Tensor
    rewards_S: Tensor
    group_ids_S: Tensor
    trajectory_ids_S: Tensor
    prompt_lengths_S: Tensor
    temperature: float
    shaped_rewards_S: Tensor | None = None
    advantages_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    is_weights_T: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: TokenBatch, device: torch.device | str = "cpu") -> "DeviceBatch":
        """Upload it."""
        names = {one.name for one in fields(cls)}
        arrays = {name: x for name, x in vars(batch).items() if isinstance(x, np.ndarray)}
        return cls(
            **{name: to_device(x, device) for name, x in arrays.items() if name in names},
            temperature=batch.temperature,
            columns={name: to_device(x, device) for name, x in batch.columns.items()},
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens_S1) - 1

    @property
    def trained_S(self) -> Tensor:
        """Trained tokens of each sequence."""
        return segment_sum((self.loss_mask_T != 0).double(), self.cu_seqlens_S1)

    @property
    def episodes(self) -> tuple[Tensor, Tensor]:
        """The first sequence of each trajectory [E], and each sequence's trajectory [S], from 0.

        Branches of an episode are neighbors: without any, both count the sequences.
        """
        _, index_S, count_E = torch.unique_consecutive(
            self.trajectory_ids_S, return_inverse=True, return_counts=True
        )
        return count_E.cumsum(0) - count_E, index_S

    @property
    def group_index_S(self) -> Tensor:
        """Each sequence's group, numbered from 0 as the ids rise."""
        return torch.unique(self.group_ids_S, return_inverse=True)[1]

    def sizes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens, and trained tokens, of each sequence, on the host; waits for the device."""
        sizes_2S = torch.stack([self.cu_seqlens_S1.diff(), self.trained_S]).tolist()
        lengths_S, trained_S = np.array(sizes_2S, dtype=np.int64)
        return lengths_S, trained_S

    def tokens_of(self, sequences: Tensor) -> Tensor:
        """Places in this stream of the tokens of these sequences, in their order."""
        lengths_S = self.cu_seqlens_S1.diff()[sequences]
        shift_S = self.cu_seqlens_S1[sequences] - (lengths_S.cumsum(0) - lengths_S)
        shift_T = shift_S.repeat_interleave(lengths_S)
        return shift_T + torch.arange(len(shift_T), device=shift_T.device)

    def select(self, sequences: Tensor) -> "DeviceBatch":
        """A batch of just these sequences, in this order."""
        lengths_S = self.cu_seqlens_S1.diff()[sequences]
        return self._taken(self.tokens_of(sequences), sequences, lengths_S)

    def trained(self) -> "DeviceBatch":
        """A batch of just the trained tokens; `cu_seqlens_S1` keeps sequences apart among them."""
        return self._taken(self.loss_mask_T.nonzero()[:, 0], slice(None), self.trained_S)

    def minibatches(self, count: int) -> "list[DeviceBatch]":
        """Split into `count` parts of whole groups, as even in groups as they can be."""
        group_S = self.group_index_S
        groups = int(group_S.max()) + 1 if len(group_S) else 0
        bounds = np.linspace(0, groups, count + 1).round().astype(int).tolist()
        return [
            self.select(((group_S >= low) & (group_S < high)).nonzero()[:, 0])
            for low, high in itertools.pairwise(bounds)
            if high > low
        ]

    def _taken(self, tokens: Tensor, sequences: Tensor | slice, lengths_S: Tensor) -> "DeviceBatch":
        chosen: dict[str, Any] = {
            name: values[tokens if name.endswith("_T") else sequences]
            for name, values in vars(self).items()
            if name.endswith(("_T", "_S")) and values is not None
        }
        borders_S1 = F.pad(lengths_S.cumsum(0), (1, 0)).to(self.cu_seqlens_S1.dtype)
        columns = {name: values[tokens] for name, values in self.columns.items()}
        return replace(self, **chosen, cu_seqlens_S1=borders_S1, columns=columns)
