"""Provides an attention backend for SGLang that computes decode attention on CPU for many requests
at once.

SGLang's `torch_native` backend runs one `scaled_dot_product_attention` per request in a Python
loop. With 64 requests this loop takes most of the time of a decode step. Here the keys and values
of all requests are gathered into one padded block, and a step is a few batched operations.

Invariants
- The result equals the loop's, except for rounding in another order of summation (float32: 1e-5).
- Only plain self-attention decode is batched; cross-attention and prefill use SGLang's own code.
  Sliding windows are masked as in SGLang: a token sees the `window` tokens before itself.
- A padded position never affects the result. Its attention score is -inf, so its weight is 0. Its
  value is read from slot 0 of the KV cache, which is a real slot, so it is finite and 0 times it is
  0.
- The memory of a step is bounded. Requests are sorted by length, so that short ones are not padded
  to long ones, and processed in blocks of at most `_BLOCK_BYTES` of gathered keys. That is about
  the size of a CPU core's cache; larger blocks were measured to be slower.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_BLOCK_BYTES = 2 << 20


def batched_decode_attention(
    query_SHD: torch.Tensor,
    k_cache_PKD: torch.Tensor,
    v_cache_PKE: torch.Tensor,
    slots_SC: torch.Tensor,
    lengths_S: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Compute the attention of one new token per request over its cached tokens, where several
    query heads share one key/value head.

    There are S requests, H query heads, K key/value heads (H is a multiple of K), head sizes D and
    E, and P slots in the pool; C is at least the longest length.

    Args:
        slots_SC: `slots_SC[s, :lengths_S[s]]` are the slots of request s in order, the new token's
            last.
        window: If set, only the last `window` + 1 slots of a request are used.

    Returns:
        The output [S, H, E], in the dtype of the query.
    """
    longest = int(lengths_S.max())
    S, H, D = query_SHD.shape
    K = k_cache_PKD.shape[1]
    position_C = torch.arange(longest, device=query_SHD.device)
    hidden_SC = position_C[None, :] >= lengths_S[:, None]
    slots_SC = slots_SC[:, :longest].masked_fill(hidden_SC, 0)
    if window is not None:
        hidden_SC = hidden_SC | (position_C[None, :] < lengths_S[:, None] - 1 - window)
    flat = slots_SC.reshape(-1)
    keys_SKCD = k_cache_PKD.index_select(0, flat).view(S, longest, K, D).transpose(1, 2)
    values_SKCE = v_cache_PKE.index_select(0, flat).view(S, longest, K, -1).transpose(1, 2)
    # Treat the H / K query heads that share a key/value head as positions of one query, so that
    # keys need not be repeated for each of them.
    output_SKGE = scaled_dot_product_attention(
        query_SHD.view(S, K, H // K, D),
        keys_SKCD.to(query_SHD.dtype),
        values_SKCE.to(query_SHD.dtype),
        attn_mask=~hidden_SC[:, None, None, :],
        scale=scaling,
    )
    return output_SKGE.reshape(S, H, -1)


def decode_in_blocks(
    query_SHD: torch.Tensor,
    output_SHE: torch.Tensor,
    k_cache_PKD: torch.Tensor,
    v_cache_PKE: torch.Tensor,
    req_to_token_RC: torch.Tensor,
    req_pool_indices_S: torch.Tensor,
    lengths_S: torch.Tensor,
    scaling: float,
    window: int | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> torch.Tensor:
    """Run `batched_decode_attention` for one block of requests of similar length after another;
    write the result to `output_SHE` and return it. A block has at most `block_bytes` of gathered
    keys, or a single request."""
    block_tokens = block_bytes // k_cache_PKD[0].nbytes
    longest = int(lengths_S.max())
    if len(lengths_S) * longest <= block_tokens:
        slots = req_to_token_RC[req_pool_indices_S, :longest].to(torch.int64)
        return output_SHE.copy_(
            batched_decode_attention(
                query_SHD, k_cache_PKD, v_cache_PKE, slots, lengths_S, scaling, window
            )
        )
    order_S = torch.argsort(lengths_S, descending=True)
    lengths = lengths_S[order_S].tolist()
    start = 0
    while start < len(lengths):
        size = max(1, block_tokens // max(lengths[start], 1))
        block = order_S[start : start + size]
        slots = req_to_token_RC[req_pool_indices_S[block], : lengths[start]].to(torch.int64)
        output_SHE[block] = batched_decode_attention(
            query_SHD[block], k_cache_PKD, v_cache_PKE, slots, lengths_S[block], scaling, window
        ).to(output_SHE.dtype)
        start += size
    return output_SHE


def register(name: str) -> None:
    """Register this module's attention backend under `name` in SGLang, also as a value of
    `--attention-backend`.

    This imports SGLang, so stand-ins for missing packages (cpu.py) must be installed before. Call
    it in every SGLang process.
    """
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])
        register_attention_backend(name)(_make_backend)


def _make_backend(runner: Any) -> Any:
    """Create the attention backend of one of SGLang's model runners: SGLang's torch backend with
    batched decode. SGLang calls this in its scheduler process."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class TorchBatchedAttnBackend(TorchNativeAttnBackend):
        """SGLang's torch backend with its per-request decode loop replaced."""

        def _run_sdpa_forward_decode(self, *tensors: Any, **how: Any) -> torch.Tensor:
            query, output, keys, values, slots, requests, lengths, encoder_lengths = tensors
            if how["is_cross_attn"] or encoder_lengths is not None:
                return super()._run_sdpa_forward_decode(*tensors, **how)
            scaling, window = how["scaling"], how["sliding_window_size"]
            return decode_in_blocks(
                query, output, keys, values, slots, requests, lengths, scaling, window
            )

    return TorchBatchedAttnBackend(runner)
