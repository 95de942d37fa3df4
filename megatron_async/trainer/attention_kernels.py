"""Attention over a packed stream by whichever library is installed; torch alone is enough.

Invariants
- A query attends only to keys of its own sequence, at or before it, and within the window where
  there is one.
- Grouped key/value heads are not expanded in memory, but where torch's kernel takes none.

On a GPU in half precision `choose_kernel` takes the first of torch's variable-length attention,
FlashAttention and FlexAttention that is installed and whose signature has what the layer needs (the
last two have not run on a GPU here; SGLang's own kernels have no backward pass). On the CPU, and in
float32 on a GPU (flash attention has no float32), it is one `scaled_dot_product_attention` per
sequence.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, partial
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Stream(NamedTuple):
    """Queries, [T, H, D], of packed sequences, and their G key/value heads.

    `window` is the number of keys that a query sees, itself included; None for all before it.
    """

    query_THD: Tensor
    key_TGD: Tensor
    value_TGD: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    scale: float
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query_THD.shape[1] // self.key_TGD.shape[1]


def packed_attention(stream: Stream) -> Tensor:
    """softmax(scale · QKᵀ) V within each sequence, causal."""
    query_THD = stream.query_THD
    if not query_THD.is_cuda or query_THD.dtype not in (torch.float16, torch.bfloat16):
        return _per_sequence(stream)
    return choose_kernel(find).attend(stream)


class Kernel(NamedTuple):
    """A way to attend, and its name for `doctor`."""

    name: str
    attend: Callable[[Stream], Tensor]


class Library(NamedTuple):
    """A function that may be installed, the arguments it must take, and how it is called."""

    function: str
    modules: tuple[str, ...]
    needs: frozenset[str]
    call: Callable[[Callable[..., Any], Stream], Tensor]


def choose_kernel(found: Callable[[str], Callable[..., Any] | None]) -> Kernel:
    """The kernel of a layer on a GPU in half precision; `found` as `find`."""
    for name, library in LIBRARIES.items():
        function = found(name)
        if function is not None and _parameters(function) >= library.needs:
            return Kernel(name, partial(library.call, function))
    return PER_SEQUENCE


@cache
def find(name: str) -> Callable[..., Any] | None:
    """The function of one of `LIBRARIES`, of the first of its modules that can be imported here."""
    library = LIBRARIES[name]
    for module in library.modules:
        with suppress(ImportError, OSError, RuntimeError, AttributeError, AssertionError):
            function: Callable[..., Any] = getattr(
                importlib.import_module(module), library.function
            )
            return function
    return None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def varlen_call(attend: Callable[..., Any], stream: Stream) -> Tensor:
    """Torch 2.11 to 2.14: the first takes no grouped key/value heads, so they are repeated."""
    query, key, value, borders, longest, scale, window = stream
    arguments: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if stream.group > 1 and "enable_gqa" in _parameters(attend):
        arguments["enable_gqa"] = True
    elif stream.group > 1:
        key, value = (x.repeat_interleave(stream.group, 1) for x in (key, value))
    out_THD: Tensor = attend(
        query, key, value, borders, borders, longest, longest, scale=scale, **arguments
    )
    return out_THD


def flash_call(attend: Callable[..., Any], stream: Stream) -> Tensor:
    """FlashAttention 2 to 4: other places of the arguments, other marks for no window."""
    query, key, value, borders, longest, scale, window = stream
    arguments: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    arguments.update(cu_seqlens_q=borders, cu_seqlens_k=borders, softmax_scale=scale)
    arguments.update(max_seqlen_q=longest, max_seqlen_k=longest, causal=True)
    result = attend(query, key, value, **arguments)
    out_THD: Tensor = result[0] if isinstance(result, tuple) else result
    return out_THD


def flex_call(attend: Callable[..., Any], stream: Stream) -> Tensor:
    """FlexAttention over the whole stream; blocks of scores that the mask empties are skipped."""
    query, key, value = (x.transpose(0, 1)[None] for x in stream[:3])
    mask = _block_mask(stream.cu_seqlens_S1, query.shape[2], stream.window)
    attend = _compiled(attend) if query.is_cuda else attend
    out_1HTD: Tensor = attend(
        query, key, value, block_mask=mask, scale=stream.scale, enable_gqa=stream.group > 1
    )
    return out_1HTD[0].transpose(0, 1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


@lru_cache(maxsize=2)  # the layers of a microbatch share them: with a window, and without
def _block_mask(cu_seqlens_S1: Tensor, tokens: int, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    position_T = torch.arange(tokens, device=cu_seqlens_S1.device, dtype=cu_seqlens_S1.dtype)
    sequence_T = torch.bucketize(position_T, cu_seqlens_S1[1:], right=True)
    seen = tokens if window is None else window

    def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        same = sequence_T[query] == sequence_T[key]
        return same & (key <= query) & (query - key < seen)

    # Not compiled, it would hold the mask of every score before it looks at blocks.
    create = _compiled(create_block_mask) if cu_seqlens_S1.is_cuda else create_block_mask
    return create(visible, None, None, tokens, tokens, device=str(cu_seqlens_S1.device))


def _per_sequence(stream: Stream) -> Tensor:
    lengths = torch.diff(stream.cu_seqlens_S1).tolist()
    window, grouped = stream.window, stream.group > 1
    wide: tuple[Tensor, ...] = (stream.query_THD, stream.key_TGD, stream.value_TGD)
    if not stream.query_THD.is_cuda and stream.query_THD.dtype.itemsize == 2:
        # torch's backward pass on a CPU is five times slower in half precision.
        wide = tuple(x_THD.float() for x_THD in wide)
    # Transposed before the split: a call in the loop is paid for by every sequence of every layer.
    split_1HLD = [x_THD.transpose(0, 1)[None].split(lengths, dim=2) for x_THD in wide]
    parts = []
    for length, query_1HLD, key_1GLD, value_1GLD in zip(lengths, *split_1HLD, strict=True):
        mask = None
        if window is not None and window < length:
            position = torch.arange(length, device=query_1HLD.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        parts.append(
            F.scaled_dot_product_attention(
                query_1HLD,
                key_1GLD,
                value_1GLD,
                attn_mask=mask,
                is_causal=mask is None,
                scale=stream.scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1).to(stream.query_THD.dtype)


PER_SEQUENCE: Final = Kernel(
    "torch scaled_dot_product_attention, one call per sequence", _per_sequence
)
# In the order of choice. FlashAttention 2, 3 and 4 are packages of their own; 2 runs on most GPUs.
LIBRARIES: Final = {
    "torch variable-length flash attention": Library(
        "varlen_attn",
        ("torch.nn.attention.varlen",),
        frozenset({"scale", "window_size"}),
        varlen_call,
    ),
    "FlashAttention": Library(
        "flash_attn_varlen_func",
        ("flash_attn", "flash_attn_interface", "flash_attn.cute"),
        frozenset({"cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size"}),
        flash_call,
    ),
    "torch FlexAttention": Library(
        "flex_attention",
        ("torch.nn.attention.flex_attention",),
        frozenset({"block_mask", "scale", "enable_gqa"}),
        flex_call,
    ),
}
