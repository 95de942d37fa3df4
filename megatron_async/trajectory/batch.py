"""`TokenBatch`: what one optimizer batch is, as packed token streams.

Invariants
- Names end in the shape: fields in `_T` have an entry for each token, those in `_S` for each
  sequence (`select` goes by it).
- All per-token arrays have length T (prompts and responses of S sequences end to end) and are
  aligned to the token itself: `rollout_logprobs_T[t]` is the behaviour policy's log-prob of
  token t given the earlier tokens of its sequence.
- `loss_mask_T` is 1 exactly on trained response tokens; prompts, environment tokens and tokens
  masked for staleness carry 0 and a zero log-prob. The first token of a sequence is never trained.
- `cu_seqlens_S1` has S + 1 entries, starts with 0, ends with T and never decreases.
- Sequences of a group are neighbours, so that minibatches of whole groups are slices.
- There is no padding anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """S sequences, T tokens. `version_T`: policy numbers along the current lineage (-1 = none).

    `columns`, by name, are what tokens have beside ids and log-probs: [T, *inner].
    `lag_T` is `step - version`, 0 where untrained; a policy token masked for staleness keeps its
    number in `version_T`. `old_logprobs_T` and `ref_logprobs_T` are filled in by the trainer,
    `advantages_T` and `is_weights_T` (decoupled correction) by the algorithm; `None` until then.
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
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    advantages_T: FloatArray | None = None
    old_logprobs_T: FloatArray | None = None
    ref_logprobs_T: FloatArray | None = None
    is_weights_T: FloatArray | None = None
    extra_metrics: dict[str, float] = field(default_factory=dict)
    store_position: int = 0

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens_S1.shape[0] - 1)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask_T.sum())

    def lengths_S(self) -> IntArray:
        """Tokens of each sequence, prompt included, [S]."""
        return np.diff(self.cu_seqlens_S1)

    def select(self, sequences: Sequence[int] | npt.NDArray[np.integer]) -> TokenBatch:
        """A batch of just these sequences, in this order."""
        index_S = np.asarray(sequences, dtype=np.int64)
        lengths_S = self.lengths_S()[index_S]
        starts_S = self.cu_seqlens_S1[:-1][index_S]
        cu_S1 = np.zeros(len(index_S) + 1, dtype=np.int32)
        np.cumsum(lengths_S, out=cu_S1[1:])
        token_T = (
            np.repeat(starts_S - cu_S1[:-1], lengths_S) + np.arange(cu_S1[-1], dtype=np.int64)
        ).astype(np.int64)
        chosen: dict[str, Any] = {"cu_seqlens_S1": cu_S1}
        for name, array in vars(self).items():
            if name.endswith("_T") and array is not None:
                chosen[name] = array[token_T]
            elif name.endswith("_S"):
                chosen[name] = array[index_S]
        chosen["columns"] = {name: values[token_T] for name, values in self.columns.items()}
        return replace(self, **chosen)

    def minibatches(self, count: int) -> list[TokenBatch]:
        """Split into `count` parts of whole groups, as even in groups as they can be."""
        _, group_of_S = np.unique(self.group_ids_S, return_inverse=True)
        num_groups = int(group_of_S.max()) + 1 if len(group_of_S) else 0
        bounds = np.linspace(0, num_groups, count + 1).round().astype(int)
        return [
            self.select(np.flatnonzero((group_of_S >= low) & (group_of_S < high)))
            for low, high in itertools.pairwise(bounds)
            if high > low
        ]
