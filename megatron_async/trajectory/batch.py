"""`TokenBatch`: what one optimizer batch is, as packed token streams.

Invariants
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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """S sequences, T tokens. `version_T`: policy numbers along the current lineage (-1 = none).

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

        def optional(array_T: FloatArray | None) -> FloatArray | None:
            return None if array_T is None else array_T[token_T]

        return replace(
            self,
            token_ids_T=self.token_ids_T[token_T],
            loss_mask_T=self.loss_mask_T[token_T],
            rollout_logprobs_T=self.rollout_logprobs_T[token_T],
            version_T=self.version_T[token_T],
            lag_T=self.lag_T[token_T],
            advantages_T=optional(self.advantages_T),
            old_logprobs_T=optional(self.old_logprobs_T),
            ref_logprobs_T=optional(self.ref_logprobs_T),
            is_weights_T=optional(self.is_weights_T),
            cu_seqlens_S1=cu_S1,
            rewards_S=self.rewards_S[index_S],
            group_ids_S=self.group_ids_S[index_S],
            trajectory_ids_S=self.trajectory_ids_S[index_S],
            prompt_lengths_S=self.prompt_lengths_S[index_S],
            truncated_S=self.truncated_S[index_S],
            resumed_S=self.resumed_S[index_S],
        )

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
