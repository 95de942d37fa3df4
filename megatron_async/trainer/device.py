"""The device adapter, which contains everything that running Megatron-core on a CPU requires.

Megatron-core names CUDA in calls that create tensors, in streams, random states and type checks. On
a machine without CUDA, the context `device_adapter()` redirects those names to the CPU and restores
everything at its end. With CUDA, it does nothing.

Invariants
- Calls of torch are redirected in the thread that entered the context, and in the backward passes
  that the thread starts. Another thread that calls Megatron must enter the context too, and leave
  it before the first thread does: the first thread replaces functions of `torch.cuda` and Megatron
  for all threads, and restores them when it leaves.
- This is the only module that replaces functions of torch or Megatron: inside the context, and in
  `import_megatron` at the start of a process. With CUDA it replaces nothing.
- Results change by rounding at most. Redirected are the device of tensors, the random generator
  and, by `import_megatron`, the library that multiplies matrices.

Redirected names
- `torch.cuda.current_device/set_device/synchronize/empty_cache` and streams refer to the CPU or do
  nothing.
- `torch.cuda.manual_seed/get_rng_state/set_rng_state` and the generator calls of Megatron's RNG
  tracker use the CPU generator.
- `device="cuda"` in any torch call, and `Tensor.cuda()`, mean the CPU.
- `Tensor.type()` returns the name that the type would have on CUDA, because the optimizer and
  gradient clipping compare that name.
- The expert dispatcher's copies to the host return the tensors unchanged.
- `torch.compile` has no effect: Megatron's small fused helpers run eagerly, so that no C++ compiler
  is needed.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch
from megatron_async_kernels.cpu_matmul import use_onednn
from torch.overrides import TorchFunctionMode


def has_cuda() -> bool:
    """Return whether the trainer runs on CUDA; otherwise it runs on the CPU."""
    return torch.cuda.is_available()


def local_device(local_rank: int = 0) -> torch.device:
    """Return the device of the rank whose number on its node is `local_rank`: the GPU of this
    number, or the CPU if the trainer does not run on CUDA."""
    return torch.device("cuda", local_rank) if has_cuda() else torch.device("cpu")


def current_device() -> torch.device:
    """Return the device that this process has been set to."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def import_megatron() -> None:
    """Import Megatron-core at the start of a process, on a CPU without torch's compiler.

    On a CPU, `torch.compile` does nothing during the import, because nothing is compiled there and
    loading torch's compiler takes over a second. This has no effect if Megatron is already
    imported. On a CPU from AMD, the process computes float32 matrix products by oneDNN from then
    on.
    """
    if has_cuda():
        importlib.import_module("megatron.core")
        return
    with mock.patch.object(torch, "compile", _not_compiled):
        importlib.import_module("megatron.core")
    use_onednn()


def _not_compiled(function: Any = None, **_options: Any) -> Any:
    """Replacement for `torch.compile` that returns the function unchanged."""
    return (lambda decorated: decorated) if function is None else function


@contextmanager
def device_adapter() -> Iterator[None]:
    """Make Megatron-core run on the CPU inside this context. With CUDA, or inside another such
    context, do nothing."""
    if has_cuda() or _CpuDeviceMode.threads.entered:
        yield
        return
    if _CpuDeviceMode.patched:
        with _CpuDeviceMode():
            yield
        return
    # Imported here, so that importing this module does not import Megatron.
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        for module, name, replacement in (
            *((torch.cuda, name, replacement) for name, replacement in _CUDA_ON_CPU.items()),
            (megatron_random, "_get_cuda_rng_state", _get_rng_state),
            (megatron_random, "_set_cuda_rng_state", _set_rng_state),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mock.patch.object(_CpuDeviceMode, "patched", True))
        stack.enter_context(_CpuDeviceMode())
        yield


class _ThreadState(threading.local):
    """Thread-local flag `entered`, which is true while the thread is inside `_CpuDeviceMode`."""

    entered = False


class _CpuDeviceMode(TorchFunctionMode):
    """Torch function mode that redirects calls which name CUDA to the CPU.

    Attributes:
        threads: Thread-local flag, true while the thread is inside this mode.
        patched: Whether `device_adapter` has replaced the functions of `torch.cuda`, which affects
            all threads.
    """

    threads: ClassVar[_ThreadState] = _ThreadState()
    patched: ClassVar[bool] = False

    def __enter__(self) -> Any:
        self.threads.entered = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.threads.entered = False
        super().__exit__(*exception)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _names_cuda(device):
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            return func(args[0], "cpu", *args[2:])
        return func(*args)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _NoStream:
    """Replacement for `torch.cuda.Stream`. A CPU has no streams: every call has ended when it
    returns, so waiting for a stream does nothing."""

    _instance: "ClassVar[_NoStream | None]" = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "_NoStream":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def wait_stream(self, _other: "_NoStream") -> None:
        return None

    def record_event(self, _event: Any = None) -> "_NoStream":
        """Return this object as the event; on a CPU an event is complete as soon as it is
        recorded."""
        return self

    def synchronize(self) -> None:
        return None


def _get_rng_state(*_device: Any, **_options: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_device: Any, **_options: Any) -> None:
    torch.set_rng_state(new_state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor that is already on the CPU; with `as_numpy`, return it as a NumPy array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


# Each name has its own function, because torch.compile identifies these names by their function.
_CUDA_ON_CPU: Mapping[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "set_device": lambda _device: None,
    "synchronize": lambda _device=None: None,
    "empty_cache": lambda: None,
    "Stream": _NoStream,
    "stream": lambda _stream: nullcontext(),
    "current_stream": lambda _device=None: _NoStream(),
    "default_stream": lambda _device=None: _NoStream(),
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}
