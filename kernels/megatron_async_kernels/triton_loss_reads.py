# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Reads of the loss kernels: the sequence of a token, and its streams.

Invariant
- A token with mask 0 is replaced by zeros right after the load.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_sequence(cu_seqlens, num_sequences, token):
    """The sequence that holds `token`: the first with cu[s + 1] > token."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle + 1).to(tl.int32) > token:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def read_stream(stream, at, inside, trained):
    """Values as float32, 0 at untrained tokens."""
    return tl.where(trained, tl.load(stream + at, mask=inside, other=0.0).to(tl.float32), 0.0)
