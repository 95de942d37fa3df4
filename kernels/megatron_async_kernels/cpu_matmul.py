"""Computes float32 matrix products on AMD processors with oneDNN instead of MKL.

torch uses MKL for these products. On processors that are not Intel's, MKL reaches only half of the
possible speed: on an EPYC with AVX-512, 57 to 114 GFLOP/s a core were measured with MKL, and 140 to
260 with oneDNN. With oneDNN, each product is called from Python, which takes 3 us. In a block of
`torch.backends.mkldnn.flags(enabled=False)`, MKL is used.

Invariants
- MKL still computes a product if it is the better choice: on another processor, for another dtype
  or memory layout, or for a small product. Arguments that torch rejects are rejected with torch's
  error.
- Only the order of sums changes. This also holds for gradients, which are matrix products too.
- The change lasts as long as the process: call `use_onednn` at the start of a process that trains
  or generates.
- Memory is bounded. By default torch and oneDNN each cache 1,024 compiled products, one for each
  shape, of 0.65 MB on average (tests/kernels/test_cpu_matmul.py), and packed batches have new
  shapes in every step, so the caches would fill. Here they are limited to 64 products, enough for
  the shapes that recur within one microbatch.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor

_CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
# Number of multiplications of a product below which starting oneDNN costs more than it saves.
_SMALL = 1 << 20


def mkl_is_slow() -> bool:
    """Return whether the processor is from AMD and torch was built with both MKL and oneDNN."""
    names = torch.cpu.get_capabilities().get("cpu_name", "")
    return "AMD" in str(names) and torch.backends.mkl.is_available() and has_onednn()


def has_onednn() -> bool:
    """Return whether torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


@cache
def use_onednn() -> torch.library.Library | None:
    """If MKL is slow on this processor, make this process compute float32 matrix products on the
    CPU with oneDNN from now on. Otherwise do nothing and return None.

    Returns:
        The registration of the replaced operations, which stay replaced as long as this object
        exists. The function's cache keeps it alive, so callers may ignore it.
    """
    if not mkl_is_slow():
        return None
    # torch and oneDNN read these variables at the first product, so set them before.
    for variable in _CAPACITIES:
        os.environ.setdefault(variable, "64")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
        library.impl("mm", mm, "CPU")
        library.impl("addmm", addmm, "CPU")
    return library


def mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Compute `torch.mm`, with oneDNN if that is faster."""
    if not _pays(left_MK, right_KN):
        return torch.mm(left_MK, right_KN, out=left_MK.new_empty(0))
    return _onednn(left_MK, right_KN)


def addmm(
    added: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute `torch.addmm`, with oneDNN if that is faster."""
    # oneDNN is used only for usual factors: not for 0, for which torch does not multiply at all,
    # and not for values that torch rejects or treats specially.
    usual = 0 < abs(beta) < 1e38 and 0 < abs(alpha) < 1e38 and not isinstance(beta + alpha, complex)
    if not usual or added.dtype is not torch.float32 or not _pays(left_MK, right_KN):
        out = left_MK.new_empty(0)
        return torch.addmm(added, left_MK, right_KN, beta=beta, alpha=alpha, out=out)
    product = _onednn(left_MK, right_KN)
    if alpha != 1:
        product.mul_(float(alpha))
    return product.add_(added.expand(product.shape), alpha=float(beta))


def _onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Return the product of two matrices, computed by oneDNN, which copies the left matrix if that
    is not contiguous."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_KN.t(), None, "none", [], "")
    return out


def _pays(left_MK: Tensor, right_KN: Tensor) -> bool:
    return (
        left_MK.dim() == right_KN.dim() == 2
        and left_MK.dtype is right_KN.dtype is torch.float32
        and left_MK.shape[1] == right_KN.shape[0]
        and left_MK.shape[0] * right_KN.numel() >= _SMALL
        and _is_plain(left_MK)
        and _is_plain(right_KN)
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(matrix: Tensor) -> bool:
    """Return whether the matrix is stored by rows or by columns without overlapping elements."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)
