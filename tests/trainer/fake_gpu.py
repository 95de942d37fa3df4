"""A CUDA device that holds shapes and no values: the trainer's GPU code runs, nothing is computed.

    with fake_gpu(), fake_world(rank, parallel): ...

torch's fake tensors keep track of devices, types and shapes, and refuse operands on two devices and
shapes that do not go together. Kernels do not run: values that code asks for on the host are
stand-ins.
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


def _made(*args: Any, **kwargs: Any) -> Tensor:
    """A fake tensor that autograd takes for one on `meta`: a torch for CPUs has no CUDA streams."""
    return _make_subclass(*args, **{**kwargs, "dispatch_device": False})


def _numbered(device: Any) -> Any:
    """The device with its number: a torch for CPUs does not know the current one."""
    return GPU if str(device) == "cuda" else device


class _Mode(FakeTensorMode):
    """What autograd makes of such a tensor's options, on `meta`, is on the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == torch.device("meta"):
            named["device"] = GPU
        return super().__torch_dispatch__(func, types, args, named)


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        return None


def _require_nccl(collective: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """NCCL takes contiguous tensors on the GPU only."""
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            assert tensor.device == GPU, f"{collective.__name__} of a tensor on {tensor.device}"
            assert tensor.is_contiguous(), f"{collective.__name__} of a tensor with holes"


class _OnFakeGpu(TorchFunctionMode):
    """Answers what a fake device cannot: the current device, and values on the host."""

    def __init__(self, routed: int) -> None:
        super().__init__()
        self._routed = routed

    def shares(self, counts: Tensor) -> Any:
        """Tokens for each expert or rank: all get as many."""
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
            return _Done()
        if func is torch.tensor:
            scalars = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            if scalars:  # copied to the host one by one
                return torch.empty(len(scalars), dtype=scalars[0].dtype)
        if func is torch.tensor and named.get("device") == GPU:
            del named["device"]
            made = func(*args, **named)
            return torch.empty(made.shape, dtype=made.dtype, device=GPU)
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
                # A norm is positive; a flag, [1], is not raised.
                return 0.0 if args[0].dim() else 1.0
            if func is Tensor.__bool__:
                return True
            if func is Tensor.numpy:
                return self.shares(args[0])
            if func is Tensor.masked_select:  # a part: its gradient goes on
                return args[0].flatten()[: self._routed]
            if func is Tensor.nonzero:  # all rows
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
    """`has_cuda()` is true inside, and what is made on it has no values.

    `routed_tokens`: tokens that a rank's experts get, each as many as the others.
    """
    mode = _Mode(allow_non_fake_inputs=True)  # before CUDA is reported as there
    with ExitStack() as stack:
        for name, replacement in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            stack.enter_context(
                mock.patch.object(
                    megatron_random, name, getattr(adapter, name.replace("cuda_", ""))
                )
            )
        stack.enter_context(mock.patch.object(torch.Tensor, "_make_subclass", staticmethod(_made)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A torch built for CUDA asks the driver whether a graph is being captured.
        check = "_accelerator_graph_capture_health_check"
        stack.enter_context(
            mock.patch.object(torch.optim.Optimizer, check, lambda _: None, create=True)
        )
        stack.enter_context(mode)
        calls = _OnFakeGpu(routed_tokens)
        run_backward = torch.autograd._engine_run_backward

        def with_calls(*args: Any, **kwargs: Any) -> Any:  # recomputation needs them too
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
    """`rank` of the layout, alone: the collectives of all groups do nothing."""
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
