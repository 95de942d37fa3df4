"""`PackedInputs`: what one microbatch is to the model, as a packed token stream.

Invariants
- T tokens of S sequences end to end, no padding; `cu_seqlens_S1` starts with 0 and ends with T.
- RoPE positions restart at every sequence; attention never crosses a sequence border.
- Only the R response rows reach the vocabulary: row r is the token at position
  `response_index_R[r]`, its log-prob is read from the hidden state one position earlier, and
  that position belongs to the same sequence (the first token of a sequence has no log-prob).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron_async_kernels.packed import spread
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """A packed microbatch: `token_ids_T`, `position_ids_T` int64, `cu_seqlens_S1` int32.

    `max_seqlen` is the longest sequence in tokens. `response_index_R` (int64) holds the positions
    of the tokens whose log-prob is asked for.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    response_index_R: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probs of the response tokens at the sampling temperature, [R], float32.

    `entropy_R` is the entropy in nats of the distribution that each token was drawn from, where
    it was asked for.
    """

    logprobs_R: Tensor
    entropy_R: Tensor | None

    @property
    def device(self) -> torch.device:
        """Megatron's schedule asks a last stage's output where it lives (for expert models)."""
        return self.logprobs_R.device


def pack_inputs(
    token_ids_T: Tensor, cu_seqlens_S1: Tensor, response_mask_T: Tensor
) -> PackedInputs:
    """Positions and response rows from a stream and a mask of the tokens to score.

    `response_mask_T` is nonzero on tokens whose log-prob is wanted, never on the first of a
    sequence (nothing precedes it). Waits for the device.
    """
    num_tokens, borders = len(token_ids_T), cu_seqlens_S1.tolist()
    starts_T = spread(cu_seqlens_S1[:-1], cu_seqlens_S1, tokens=num_tokens)
    position_ids_T = torch.arange(num_tokens, device=starts_T.device) - starts_T
    response_index_R = response_mask_T.nonzero()[:, 0]
    return PackedInputs(
        token_ids_T=token_ids_T.to(torch.int64),
        position_ids_T=position_ids_T,
        cu_seqlens_S1=cu_seqlens_S1.to(torch.int32),
        max_seqlen=max((stop - start for start, stop in pairwise(borders)), default=0),
        response_index_R=response_index_R,
    )
