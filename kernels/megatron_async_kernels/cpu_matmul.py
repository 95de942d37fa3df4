"""float32 matrix products on AMD processors by oneDNN instead of MKL.

torch hands them to MKL, which leaves a processor that is not Intel's at half of its speed (measured
on an EPYC with AVX-512: 57 to 114 GFLOP/s a core, oneDNN 140 to 260). Each product passes through
Python on the way, which takes 3 us. `torch.backends.mkldnn.flags(enabled=False)` turns it off.

Invariants
- Where MKL is right (another processor, dtype or memory layout, a small product), it multiplies;
  what torch refuses is refused with torch's words.
- Only the order of sums changes; gradients are products again, so they are covered.
- The change is for the life of the process: for a process that trains or generates, at its start.
- Memory is bounded. By default torch and oneDNN each cache 1,024 compiled products, one per shape,
  of 0.65 MB on average (tests/kernels/test_cpu_matmul.py), and packed batches have new shapes in
  every step. The limit here is 64, enough for the shapes that recur within one microbatch.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor

_CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
_SMALL = 1 << 20  # multiplications of a product below which oneDNN's start costs more than it saves


def mkl_is_slow() -> bool:
    """Return whether torch multiplies with MKL on an AMD processor, and has oneDNN, too."""
    names = torch.cpu.get_capabilities().get("cpu_name", "")
    return "AMD" in str(names) and torch.backends.mkl.is_available() and has_onednn()


def has_onednn() -> bool:
    """Return whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


@cache
def use_onednn() -> torch.library.Library | None:
    """Multiply float32 on the CPU with oneDNN from here on, where MKL is slow; else None.

    What is returned is the registration, which holds as long as the process.
    """
    if not mkl_is_slow():
        return None
    for variable in _CAPACITIES:  # torch and oneDNN read them at the first product
        os.environ.setdefault(variable, "64")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
        library.impl("mm", mm, "CPU")
        library.impl("addmm", addmm, "CPU")
    return library


def mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """`torch.mm`, by oneDNN where that pays."""
    if not _pays(left_MK, right_KN):
        return torch.mm(left_MK, right_KN, out=left_MK.new_empty(0))
    return _onednn(left_MK, right_KN)


def addmm(
    added: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`torch.addmm`, by oneDNN where that pays."""
    # Not 0, which multiplies nothing, and no number that torch refuses or takes in another way.
    usual = 0 < abs(beta) < 1e38 and 0 < abs(alpha) < 1e38 and not isinstance(beta + alpha, complex)
    if not usual or added.dtype is not torch.float32 or not _pays(left_MK, right_KN):
        out = left_MK.new_empty(0)
        return torch.addmm(added, left_MK, right_KN, beta=beta, alpha=alpha, out=out)
    product = _onednn(left_MK, right_KN)
    if alpha != 1:
        product.mul_(float(alpha))
    return product.add_(added.expand(product.shape), alpha=float(beta))


def _onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """The product; oneDNN's operation copies a left factor that is not contiguous."""
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
    """Return whether it lies by rows or by columns, and no two elements in one place."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)
