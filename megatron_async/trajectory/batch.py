"""Provides `TokenBatch`, the packed token streams that one optimizer batch consists of.

Invariants
- Field names end in their shape: a field in `_T` has one entry for each token, a field in `_S` one
  entry for each sequence. `algorithms/device_batch.py` relies on these names.
- All per-token arrays, including those in `columns`, have length T: the prompts and responses of S
  sequences, one after the other. They are aligned to the token itself: `rollout_logprobs_T[t]` is
  the behavior policy's log-prob of token t given the earlier tokens of its sequence.
- `loss_mask_T` is 1 exactly on trained response tokens. Prompts, environment tokens and tokens that
  are masked for staleness have mask 0 and log-prob 0. The first token of a sequence is never
  trained.
- `cu_seqlens_S1` has S + 1 entries, starts with 0, ends with T and never decreases.
- The sequences of a group are adjacent, so that a minibatch of whole groups is a slice. The
  branches of an episode, which share one trajectory id, are adjacent too.
- There is no padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One optimizer batch: S sequences with T tokens in total, one after the other without padding.

    Attributes:
        step: Number of the update that trains the batch.
        version_T: For each token of the policy, the policy number on the current lineage that the
            version which generated it counts as (`packing.number_on_lineage`); -1 for other tokens.
            A policy token that is masked for staleness keeps its number.
        lag_T: `step - version_T` for trained tokens, 0 for all others.
        temperature: Sampling temperature of the log-probs.
        columns: Further per-token arrays by name, each of shape [T, *inner]; 0 where a token has no
            value.
        store_position: Number of transactions of the trajectory store once the record of this batch
            was on disk. The trainer passes it to a restarted rollout manager, which detects from it
            whether a restored store lacks transactions.
    """

    step: int
    token_ids_T: IntArray
    loss_mask_T: FloatArray
    rollout_logprobs_T: FloatArray
    version_T: IntArray
    lag_T: IntArray
    cu_seqlens_S1: IntArray
    rewards_S: FloatArray
    group_ids_S: npt.NDArray[np.int64]
    trajectory_ids_S: npt.NDArray[np.int64]
    prompt_lengths_S: IntArray
    truncated_S: npt.NDArray[np.bool_]
    resumed_S: npt.NDArray[np.bool_]
    temperature: float = 1.0
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    extra_metrics: dict[str, float] = field(default_factory=dict)
    store_position: int = 0

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens_S1.shape[0] - 1)

    @property
    def first_E(self) -> npt.NDArray[np.int64]:
        """Index of the first sequence of each trajectory, [E] for E trajectories."""
        return np.flatnonzero(np.diff(self.trajectory_ids_S, prepend=-1))

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask_T.sum())

    def lengths_S(self) -> IntArray:
        """Return the number of tokens of each sequence, prompt included, [S]."""
        return np.diff(self.cu_seqlens_S1)
