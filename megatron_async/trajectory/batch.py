"""`TokenBatch`: what one optimizer batch is, as packed token streams.

Invariants
- Names end in the shape: fields in `_T` have an entry for each token, those in `_S` for each
  sequence (algorithms/device_batch.py goes by it).
- All per-token arrays, those of `columns` too, have length T (prompts and responses of S sequences
  end to end) and are aligned to the token itself: `rollout_logprobs_T[t]` is the behavior policy's
  log-prob of token t given the earlier tokens of its sequence.
- `loss_mask_T` is 1 exactly on trained response tokens; prompts, environment tokens and tokens
  masked for staleness carry 0 and a zero log-prob. The first token of a sequence is never trained.
- `cu_seqlens_S1` has S + 1 entries, starts with 0, ends with T and never decreases.
- Sequences of a group are neighbors, so that minibatches of whole groups are slices; so are those
  of an episode, its branches, which have one trajectory id.
- There is no padding anywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """S sequences, T tokens. `version_T`: policy numbers along the current lineage (-1 = none).

    `columns`, by name, are what tokens have beside ids and log-probs: [T, *inner], 0 where a token
    has none. `lag_T` is `step - version`, 0 where untrained; a policy token masked for staleness
    keeps its number in `version_T`.
    `store_position`: where the store stood when the batch was durable, for the next `attach`.
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
        """The first sequence of each trajectory."""
        return np.flatnonzero(np.diff(self.trajectory_ids_S, prepend=-1))

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask_T.sum())

    def lengths_S(self) -> IntArray:
        """Tokens of each sequence, prompt included, [S]."""
        return np.diff(self.cu_seqlens_S1)
