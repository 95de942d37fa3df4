"""Provides `DeviceBatch`, a batch as tensors on the device that computes with it.

Invariants
- The arrays of a `TokenBatch` are copied to the device once, in `DeviceBatch.of`. All further
  computations, to the loss and the metrics, use torch tensors on that device, and subsets of a
  batch are selected there.
- In the trainer and the losses, only `to_device` and `to_host` convert between NumPy arrays and
  tensors.
- An array is copied to a GPU through pinned memory. A copy from other host memory would make the
  host wait until the GPU has finished all its work. Pinned memory comes from torch's cache, so the
  slow pinning is done only once.
- Fields in `_T` have one entry for each token and fields in `_S` one for each sequence, with the
  types that they have in `TokenBatch`.
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
    """Copy an array to `device` as a new tensor. The tensor shares no memory with the array,
    because the arrays of a batch may be read-only."""
    tensor, target = torch.tensor(array), torch.device(device)
    return (tensor.pin_memory() if target.type == "cuda" else tensor).to(target, non_blocking=True)


def to_host(values: Tensor) -> npt.NDArray[Any]:
    """Copy a tensor to the host as an array; wait until the device has computed it."""
    array: npt.NDArray[Any] = values.cpu().numpy()
    return array


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch of S sequences and T tokens on the device.

    Fields that are also in `TokenBatch` have the same meaning. The others are None until they are
    computed. The trainer fills in `old_logprobs_T` (log-probs of the policy before the update) and
    `ref_logprobs_T` (of the reference policy). The algorithm fills in `shaped_rewards_S` (rewards
    with the length penalty and the KL to the reference), `advantages_T`, and in decoupled mode
    `is_weights_T` (importance weights). `columns` has further values of each token, [T, ...], for a
    user's own loss.
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
        """Copy a `TokenBatch` to the device."""
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
        """Number of trained tokens of each sequence, [S]."""
        return segment_sum((self.loss_mask_T != 0).double(), self.cu_seqlens_S1)

    @property
    def episodes(self) -> tuple[Tensor, Tensor]:
        """Index of the first sequence of each trajectory, [E], and index of the trajectory of each
        sequence, [S].

        The branches of an episode are adjacent sequences of one trajectory. If no trajectory has
        several branches, both results are 0, 1, 2, ...
        """
        _, index_S, count_E = torch.unique_consecutive(
            self.trajectory_ids_S, return_inverse=True, return_counts=True
        )
        return count_E.cumsum(0) - count_E, index_S

    @property
    def group_index_S(self) -> Tensor:
        """Index of each sequence's group, numbered from 0 in the order of the group ids."""
        return torch.unique(self.group_ids_S, return_inverse=True)[1]

    def sizes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the numbers of tokens and of trained tokens of each sequence, on the host.

        This waits for the device.
        """
        sizes_2S = torch.stack([self.cu_seqlens_S1.diff(), self.trained_S]).tolist()
        lengths_S, trained_S = np.array(sizes_2S, dtype=np.int64)
        return lengths_S, trained_S

    def tokens_of(self, sequences: Tensor) -> Tensor:
        """Return the indices of all tokens of `sequences` in the packed arrays ([T]), sequence by
        sequence in the order of `sequences`."""
        lengths_S = self.cu_seqlens_S1.diff()[sequences]
        shift_S = self.cu_seqlens_S1[sequences] - (lengths_S.cumsum(0) - lengths_S)
        shift_T = shift_S.repeat_interleave(lengths_S)
        return shift_T + torch.arange(len(shift_T), device=shift_T.device)

    def select(self, sequences: Tensor) -> "DeviceBatch":
        """Return a batch that consists of these sequences, in this order."""
        lengths_S = self.cu_seqlens_S1.diff()[sequences]
        return self._taken(self.tokens_of(sequences), sequences, lengths_S)

    def trained(self) -> "DeviceBatch":
        """Return a batch that consists of only the trained tokens of each sequence; its
        `cu_seqlens_S1` are the borders of the shortened sequences."""
        return self._taken(self.loss_mask_T.nonzero()[:, 0], slice(None), self.trained_S)

    def minibatches(self, count: int) -> "list[DeviceBatch]":
        """Split the batch into `count` minibatches of whole groups, whose numbers of groups differ
        by at most one. If there are fewer groups, there are fewer minibatches."""
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
