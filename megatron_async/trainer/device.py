"""The device adapter: the whole of what running Megatron-core on a CPU means.

Megatron-core names CUDA in its factory calls, streams, random states and type checks. On a
machine without CUDA, `device_adapter()` answers those names with the CPU for as long as it is
entered, and restores everything on the way out. With CUDA it does nothing at all.

Invariants
- The redirection of torch calls holds in the thread that entered the context (and in the backward
  passes that it starts); another thread that calls Megatron enters it too, within the first.
- This is the only module that patches anything: inside the context, and in `import_megatron` at the
  start of a process. With CUDA nothing is patched.
- Numbers change by rounding at most: what is redirected is where tensors live, which generator is
  used, and in `import_megatron` which library multiplies matrices.

What is redirected
- `torch.cuda.current_device/set_device/synchronize/empty_cache`, streams: the CPU, and nothing.
- `torch.cuda.manual_seed/get_rng_state/set_rng_state` and the generator calls of Megatron's RNG
  tracker: the CPU generator.
- `device="cuda"` in any torch call and `Tensor.cuda()`: the CPU.
- `Tensor.type()`: the name it would have on CUDA, which the optimizer and the clipping compare.
- The expert dispatcher's copies to the host: the tensors that are there already.
- `torch.compile`: Megatron's small fused helpers run eagerly, so that no C++ compiler is needed.
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
    """Return whether the trainer runs on CUDA; everything else is CPU."""
    return torch.cuda.is_available()


def local_device(local_rank: int = 0) -> torch.device:
    """The device of this process: CUDA device `local_rank`, or the CPU."""
    return torch.device("cuda", local_rank) if has_cuda() else torch.device("cpu")


def current_device() -> torch.device:
    """The device that this process was set to."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def import_megatron() -> None:
    """Import Megatron-core in a process that starts, so that it is quick on a CPU.

    Megatron asks for torch's compiler while it is imported, which takes over a second, and nothing
    would be compiled (see above); where Megatron is imported already, this changes nothing. On AMD
    processors matrix products go to oneDNN.
    """
    if has_cuda():
        importlib.import_module("megatron.core")
        return
    with mock.patch.object(torch, "compile", _not_compiled):
        importlib.import_module("megatron.core")
    use_onednn()


def _not_compiled(function: Any = None, **_options: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


@contextmanager
def device_adapter() -> Iterator[None]:
    """Run Megatron-core on the CPU inside this context; nothing where CUDA is there, or nested."""
    if has_cuda() or _CpuDeviceMode.threads.entered:
        yield
        return
    if _CpuDeviceMode.patched:
        with _CpuDeviceMode():
            yield
        return
    # Imported here: reading what a module patches must not cost an import of Megatron.
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
    """Flag of a thread that has entered the mode."""

    entered = False


class _CpuDeviceMode(TorchFunctionMode):
    """Sends torch calls that name CUDA to the CPU."""

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
    """The one stream of a CPU: everything on it is already done."""

    _instance: "ClassVar[_NoStream | None]" = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "_NoStream":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def wait_stream(self, _other: "_NoStream") -> None:
        return None

    def record_event(self, _event: Any = None) -> "_NoStream":
        """An event on a CPU is as done as the stream itself."""
        return self

    def synchronize(self) -> None:
        return None


def _get_rng_state(*_device: Any, **_options: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_device: Any, **_options: Any) -> None:
    torch.set_rng_state(new_state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """A tensor that is on the CPU already, as the NumPy array that was asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


# One function for each name: torch.compile keeps a table of these names by the object behind them.
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
