"""Inputs and outputs of the model for one microbatch, as a packed token stream.

Invariants
- T tokens of S sequences follow each other without padding; `cu_seqlens_S1` starts with 0 and ends
  with T.
- Rotary positions restart at every sequence; attention never crosses a border between sequences.
- Only the hidden states that predict the R response tokens reach the vocabulary projection.
  Response token r is at position `response_index_R[r]`. Its log-prob comes from the hidden state
  one position earlier, in the same sequence, so the first token of a sequence has no log-prob.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron_async_kernels.packed import spread
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """The model's inputs for one packed microbatch.

    Attributes:
        token_ids_T: Tokens of all sequences, int64.
        position_ids_T: Position of each token in its sequence, int64.
        cu_seqlens_S1: Position of each sequence's first token, and T at the end, int32.
        max_seqlen: Length of the longest sequence in tokens.
        response_index_R: Positions of the tokens whose log-probs are computed, int64.
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

    `entropy_R` is the entropy, in nats, of the distribution from which each token was drawn; None
    if it was not requested.
    """

    logprobs_R: Tensor
    entropy_R: Tensor | None

    @property
    def device(self) -> torch.device:
        """Device of the log-probs. Megatron's pipeline schedule reads this attribute of the output
        of the last stage."""
        return self.logprobs_R.device


def pack_inputs(
    token_ids_T: Tensor, cu_seqlens_S1: Tensor, response_mask_T: Tensor
) -> PackedInputs:
    """Build the model's inputs from a packed stream and a mask of the tokens whose log-probs are
    wanted.

    The call waits for the device, because the host reads the number of these tokens and the borders
    of the sequences.

    Args:
        token_ids_T: Tokens of all sequences.
        cu_seqlens_S1: Position of each sequence's first token, and T at the end.
        response_mask_T: Nonzero at tokens whose log-probs are wanted. It must be zero at the first
            token of a sequence, whose log-prob is not defined.
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
