"""Provides a CUDA device that has shapes but no values, so that the trainer's GPU code runs without
computing.

    with fake_gpu(), fake_world(parallel, rank): ...

torch's fake tensors keep track of devices, types and shapes. They refuse operands on two devices,
and shapes that do not match. Kernels do not run. If code reads values on the host, it gets stand-in
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from megatron_async.config.model import ParallelConfig
from megatron_async.trainer import device as adapter
from megatron_async.trainer.parallel import destroy_parallel

GPU = torch.device("cuda", 0)
_make_subclass = torch.Tensor._make_subclass


def _make_fake(*args: Any, **kwargs: Any) -> Tensor:
    """Make a fake tensor that autograd treats as a tensor on `meta`, because a torch for CPUs has
    no CUDA streams."""
    return _make_subclass(*args, **{**kwargs, "dispatch_device": False})


def _numbered(device: Any) -> Any:
    """Return the device with its number, because a torch for CPUs does not know the current CUDA
    device."""
    return GPU if str(device) == "cuda" else device


class _Mode(FakeTensorMode):
    """Fake tensor mode that places on the GPU the tensors that autograd would make on `meta` from a
    fake tensor's options."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == torch.device("meta"):
            named["device"] = GPU
        return super().__torch_dispatch__(func, types, args, named)


class _FinishedWork:
    """Handle of a collective that has already finished."""

    def wait(self) -> None:
        return None


def _require_nccl(collective: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Assert that all tensors of a collective are contiguous and on the GPU, as NCCL requires."""
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            assert tensor.device == GPU, f"{collective.__name__} of a tensor on {tensor.device}"
            assert tensor.is_contiguous(), (
                f"{collective.__name__} of a tensor that is not contiguous"
            )


class _OnFakeGpu(TorchFunctionMode):
    """Replies to calls that a fake device cannot serve: queries of the current device, and reads of
    values on the host."""

    def __init__(self, routed: int) -> None:
        super().__init__()
        self._routed = routed

    def shares(self, counts: Tensor) -> Any:
        """Return equal numbers of tokens for all experts or ranks."""
        return np.full(counts.shape, self._routed // counts.shape[-1])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if isinstance(named.get("device"), int):
            named["device"] = torch.device("cuda", named["device"])
        if "device" in named:
            named["device"] = _numbered(named["device"])
        if getattr(func, "__module__", "") == dist.all_reduce.__module__:
            _require_nccl(func, (*args, *named.values()))
            return _FinishedWork()
        if func is torch.tensor:
            scalars = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            if scalars:  # The scalars are copied to the host one by one.
                return torch.empty(len(scalars), dtype=scalars[0].dtype)
        if func is torch.tensor and named.get("device") == GPU:
            del named["device"]
            tensor = func(*args, **named)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
        if func is Tensor.cuda:
            return args[0].to(GPU)
        if func is Tensor.to:
            args = (args[0], *(_numbered(argument) for argument in args[1:]))
        if getattr(func, "__self__", None) is Tensor.is_cuda:
            return args[0].device.type == "cuda"
        if getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__set__":
            args[0].fake_device = args[1].device
        if func is Tensor.type and len(args) == 1:
            name = func(*args).rpartition(".")[2]
            return f"torch.cuda.{name}" if args[0].device.type == "cuda" else f"torch.{name}"
        if args and isinstance(args[0], FakeTensor):
            if func in (Tensor.item, Tensor.__float__):
                # A norm must be positive; a flag, of shape [1], must be unset.
                return 0.0 if args[0].dim() else 1.0
            if func is Tensor.__bool__:
                return True
            if func is Tensor.numpy:
                return self.shares(args[0])
            if func is Tensor.masked_select:  # A slice keeps the gradient connected.
                return args[0].flatten()[: self._routed]
            if func is Tensor.nonzero:  # Selects all rows.
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if func is Tensor.record_stream:
                return None
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **named)


def _first_device() -> int:
    return 0


def _capability(_device: Any = None) -> tuple[int, int]:
    return (9, 0)


def _as_sorted(tokens: Tensor, _sizes: Any, _order: Any, probs: Any = None, **_: Any) -> Any:
    return tokens, probs


_CUDA: Mapping[str, Any] = {
    **adapter._CUDA_ON_CPU,
    "current_device": _first_device,
    "is_available": lambda: True,
    "get_device_capability": _capability,
    "get_device_name": lambda _device=None: "NVIDIA H100 80GB HBM3",
}


@contextmanager
def fake_gpu(routed_tokens: int = 0) -> Iterator[None]:
    """Make `has_cuda()` true inside the block, and make tensors on the GPU without values.

    Args:
        routed_tokens: Number of tokens that the experts of a rank get, divided equally among the
            experts.
    """
    mode = _Mode(allow_non_fake_inputs=True)  # Before CUDA is reported as available.
    with ExitStack() as stack:
        for name, replacement in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            stack.enter_context(
                mock.patch.object(
                    megatron_random, name, getattr(adapter, name.replace("cuda_", ""))
                )
            )
        stack.enter_context(
            mock.patch.object(torch.Tensor, "_make_subclass", staticmethod(_make_fake))
        )
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A torch built for CUDA asks the driver whether a graph is being captured.
        check = "_accelerator_graph_capture_health_check"
        stack.enter_context(
            mock.patch.object(torch.optim.Optimizer, check, lambda _: None, create=True)
        )
        stack.enter_context(mode)
        calls = _OnFakeGpu(routed_tokens)
        run_backward = torch.autograd._engine_run_backward

        def with_calls(
            *args: Any, **kwargs: Any
        ) -> Any:  # Recomputation runs in the backward pass.
            with calls:
                return run_backward(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", with_calls))
        stack.enter_context(
            mock.patch.object(FakeTensor, "tolist", lambda counts: calls.shares(counts).tolist())
        )
        stack.enter_context(mock.patch.object(token_dispatcher, "sort_chunks_by_idxs", _as_sorted))
        stack.enter_context(calls)
        yield


@contextmanager
def fake_world(parallel: ParallelConfig, rank: int = 0) -> Iterator[None]:
    """Act as one `rank` of the layout without other ranks; the collectives of all groups do
    nothing."""
    make_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "backend": "fake", "pg_options": None})

    def all_gather_object(into: list[Any], mine: Any, group: Any = None) -> None:
        into[:] = [mine] * len(into)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    try:
        with (
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(dist, "all_gather_object", all_gather_object),
            mock.patch.dict("os.environ", {"WORLD_SIZE": str(parallel.ranks)}),
        ):
            yield
    finally:
        destroy_parallel()
