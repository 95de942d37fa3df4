"""Chooses the implementation of the kernels by name or by device, and describes the choice for the
command `doctor`."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from megatron_async_kernels.chunked import ChunkedKernels
from megatron_async_kernels.head_types import HeadKernels
from megatron_async_kernels.triton_loss_spec import MAX_RULES

Backend = Literal["auto", "chunked", "triton"]
BACKENDS: tuple[str, ...] = ("auto", "chunked", "triton")


def triton_installed() -> bool:
    """Return whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation to use: for `auto`, `triton` on CUDA (except in
    float64) if triton is installed, otherwise `chunked`; any other name is returned unchanged.

    Raises:
        ValueError: The name is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend
    if device.type == "cuda" and dtype != torch.float64 and triton_installed():
        return "triton"
    return "chunked"


def head_kernels(name: str) -> HeadKernels:
    """Return the implementation of `token_logprob`'s forward and backward pass with the name
    `chunked` or `triton`."""
    if name == "chunked":
        return ChunkedKernels()
    if name == "triton":
        # Imported only here, because machines without triton run the chunked version.
        from megatron_async_kernels.triton_head import TritonKernels

        return TritonKernels()
    raise ValueError(f"no head kernels named {name!r}")


def describe_loss(*, cuda: bool, triton: str | None) -> str:
    """Return the line that the command `doctor` prints about the loss: which implementation
    `is_loss` uses on a machine, and when it uses another one.

    Args:
        cuda: Whether the machine has a CUDA device.
        triton: Version of triton; None if it is not installed.
    """
    if not cuda:
        return "plain torch (no CUDA device)"
    if triton is None:
        return "plain torch (triton is not installed)"
    return f"triton {triton}; plain torch with more than {MAX_RULES} rejection rules"


def describe_backend() -> str:
    """Return the line that the command `doctor` prints about `token_logprob`: which implementation
    `backend="auto"` selects on this machine, and why."""
    if not torch.cuda.is_available():
        return "chunked torch (no CUDA device)"
    if not triton_installed():
        return "chunked torch (triton is not installed)"
    import triton

    major, minor = torch.cuda.get_device_capability()
    return f"triton {triton.__version__} on {torch.cuda.get_device_name()} (sm_{major}{minor})"
