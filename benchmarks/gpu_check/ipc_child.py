"""Receiving process of the check `weights_ipc`: unpickles weights from stdin as an engine would.

If SGLang is installed, its unpickler is used. Otherwise, a stand-in does the part that matters: it
rebuilds a CUDA tensor as torch does, but finds the device by its UUID (SGLang 0.5.23,
`utils/patch_torch.py`).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import pickle
import sys
import time
from typing import Any

import torch
from torch import Tensor

# Position of the device in the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


def digest(tensor: Tensor) -> str:
    """Return a digest of the values of a tensor in host memory."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def rebuild_by_uuid(*arguments: Any) -> Tensor:
    """Call torch's `rebuild_cuda_tensor` for a handle that names its device by UUID."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = uuids.index(changed[_DEVICE_ARGUMENT])
    tensor: Tensor = rebuild_cuda_tensor(*changed)
    return tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return rebuild_by_uuid
        return super().find_class(module, name)


def unpickle(payload: str) -> tuple[list[tuple[str, Tensor]], str]:
    """Unpickle `payload`; return the named tensors and the unpickler: `sglang` or `stand-in`."""
    if importlib.util.find_spec("sglang") is not None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        return named_tensors(MultiprocessingSerializer.deserialize(payload)), "sglang"
    return named_tensors(load(payload)), "stand-in"


def load(payload: str) -> dict[str, Any]:
    """Unpickle `payload` without SGLang."""
    loaded: dict[str, Any] = _Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    return loaded


def named_tensors(loaded: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Split a bucket into named tensors, as SGLang does for the load format `flattened_bucket`."""
    flat_N = loaded["flattened_tensor"]
    return [
        (m.name, flat_N[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
        for m in loaded["metadata"]
    ]


def main() -> None:
    payload = sys.stdin.read()
    began = time.monotonic()
    named, unpickler = unpickle(payload)
    digests = {name: digest(tensor.cpu()) for name, tensor in named}
    seconds = time.monotonic() - began
    print(json.dumps({"unpickler": unpickler, "digests": digests, "open_seconds": seconds}))


if __name__ == "__main__":
    main()
