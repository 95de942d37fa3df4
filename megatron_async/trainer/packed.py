"""`PackedInputs`: what one microbatch is to the model, as a packed token stream.

Invariants
- T tokens of S sequences end to end, no padding; `cu_seqlens_S1` starts with 0 and ends with T.
- RoPE positions restart at every sequence; attention never crosses a sequence border.
- Only the R response rows reach the vocabulary: row r is the token at position
  `response_index_R[r]`, its log-prob is read from the hidden state one position earlier, and
  that position belongs to the same sequence (the first token of a sequence has no log-prob).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.algorithms.transfer import to_device


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

    def detached(self) -> TokenLogprobs:
        """The same values without their graph."""
        entropy_R = None if self.entropy_R is None else self.entropy_R.detach()
        return TokenLogprobs(self.logprobs_R.detach(), entropy_R)

    @property
    def device(self) -> torch.device:
        """Megatron's schedule asks a last stage's output where it lives (for expert models)."""
        return self.logprobs_R.device


def pack_inputs(
    token_ids_T: Tensor,
    cu_seqlens_S1: Tensor,
    response_mask_T: Tensor,
    device: torch.device | str | None = None,
) -> PackedInputs:
    """Positions and response rows from a stream and a mask of the tokens to score.

    `response_mask_T` is nonzero on tokens whose log-prob is wanted. Raises ValueError when it
    marks the first token of a sequence (nothing precedes it) or the borders do not cover the
    stream.
    """
    token_ids_T = token_ids_T.to(dtype=torch.int64)
    cu_seqlens_S1 = cu_seqlens_S1.to(dtype=torch.int32)
    num_tokens = int(token_ids_T.shape[0])
    if int(cu_seqlens_S1[0]) != 0 or int(cu_seqlens_S1[-1]) != num_tokens:
        raise ValueError(
            f"cu_seqlens goes from {int(cu_seqlens_S1[0])} to {int(cu_seqlens_S1[-1])}, "
            f"the stream has {num_tokens} tokens"
        )
    lengths_S = torch.diff(cu_seqlens_S1).to(torch.int64)
    starts_T = torch.repeat_interleave(cu_seqlens_S1[:-1].to(torch.int64), lengths_S)
    position_ids_T = torch.arange(num_tokens) - starts_T
    response_index_R = torch.nonzero(response_mask_T, as_tuple=True)[0]
    if bool((position_ids_T[response_index_R] == 0).any()):
        raise ValueError("the first token of a sequence has no log-prob and cannot be a response")
    return PackedInputs(
        token_ids_T=to_device(token_ids_T, device),
        position_ids_T=to_device(position_ids_T, device),
        cu_seqlens_S1=to_device(cu_seqlens_S1, device),
        max_seqlen=int(lengths_S.max()) if num_tokens else 0,
        response_index_R=to_device(response_index_R, device),
    )
