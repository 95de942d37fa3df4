# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""How the loss kernels find their sequence and read their streams.

Invariants
- A token with mask 0 is replaced by zeros right after the load.
- A log-prob that the head left as partial statistics is finished by exactly one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async_kernels.triton_forward import merge_splits


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


@triton.jit
def read_logprob(
    logprobs,
    log_sum_exp,
    entropy,
    max_in,
    sum_in,
    weighted_in,
    target_in,
    lanes,
    inside,
    stride,
    num_splits,
    BLOCK: tl.constexpr,
    SPEC: tl.constexpr,
):
    """(log-prob, entropy): read, or finished here from the head's partial statistics and written.

    Without entropy the second is 0.
    """
    finished_entropy = tl.zeros((BLOCK,), dtype=tl.float32)
    if SPEC.combine:
        best, total, weighted = merge_splits(
            max_in, sum_in, weighted_in, lanes, inside, stride, num_splits, BLOCK, SPEC.has_entropy
        )
        log_total = tl.log(total)
        logprob = (tl.load(target_in + lanes, mask=inside, other=0.0) - best) - log_total
        tl.store(logprobs + lanes, logprob, mask=inside)
        tl.store(log_sum_exp + lanes, best + log_total, mask=inside)
        if SPEC.has_entropy:
            finished_entropy = log_total - weighted / total
            tl.store(entropy + lanes, finished_entropy, mask=inside)
    else:
        logprob = tl.load(logprobs + lanes, mask=inside, other=0.0).to(tl.float32)
        if SPEC.has_entropy:
            finished_entropy = tl.load(entropy + lanes, mask=inside, other=0.0).to(tl.float32)
    return logprob, finished_entropy
