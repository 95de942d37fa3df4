"""CUDA IPC to another process: one handle per tensor against one per flattened bucket.

    python -m benchmarks.weights_ipc

It needs one GPU with 60 GiB of free memory. The receiving process copies every tensor, as an engine
does. Each line has the seconds of three updates, which alternate, after one that is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu_check.ipc_child import unpickle
from megatron_async.weight_sync.transports.tensor import separate, serialise

_BUCKET_BYTES = 1 << 30
_UPDATES = 3
_QWEN_7B_LAYER = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (1, 3584), (1, 3584)]
_QWEN_7B_LAYER += [(18944, 3584), (18944, 3584), (3584, 18944)]
_QWEN_30B_A3B_LAYER = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)]
_QWEN_30B_A3B_LAYER += [(768, 2048), (768, 2048), (2048, 768)] * 128
MODELS = {
    "Qwen2.5-7B": _QWEN_7B_LAYER * 28 + [(152_064, 3584)] * 2,
    "Qwen3-30B-A3B, 24 of 48 layers": _QWEN_30B_A3B_LAYER * 24,
}


def receive() -> None:
    """The receiving process: copy what each line of stdin refers to, answer with a line."""
    targets: dict[int, Tensor] = {}
    for line in sys.stdin:
        named, _ = unpickle(line)
        for _, tensor in named:
            size = tensor.nbytes
            if size not in targets:
                targets[size] = torch.empty(size, dtype=torch.uint8, device="cuda")
            targets[size].copy_(tensor.view(torch.uint8).flatten())
        torch.cuda.synchronize()
        del named, tensor
        print(json.dumps("copied"), flush=True)


def flattened(bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The bucket's bytes as one tensor."""
    return [("bucket", torch.cat([x.reshape(-1).view(torch.uint8) for _, x in bucket]))]


def buckets_of(shapes: Sequence[tuple[int, int]]) -> list[list[tuple[str, Tensor]]]:
    """Views of one storage, as a trainer's parameters are, in buckets."""
    from megatron_async.models.export import buckets

    sizes = [rows * columns for rows, columns in shapes]
    storage = torch.randn(sum(sizes), device="cuda", dtype=torch.bfloat16)
    parts = storage.split(sizes)
    views = [(f"{n}", x.view(s)) for n, (x, s) in enumerate(zip(parts, shapes, strict=True))]
    return list(buckets(views, _BUCKET_BYTES))


def measure(name: str, child: subprocess.Popen[str]) -> None:
    """Print a line for each of the two ways."""
    assert child.stdin is not None and child.stdout is not None
    whole = buckets_of(MODELS[name])
    seconds: dict[str, list[float]] = {"per tensor": [], "flattened": []}
    for update in range(_UPDATES + 1):
        for way, found in seconds.items():
            torch.cuda.synchronize()
            began = time.monotonic()
            for bucket in whole:
                sent = flattened(bucket) if way == "flattened" else separate(bucket, False)
                child.stdin.write(serialise(sent) + "\n")
                child.stdin.flush()
                child.stdout.readline()
            if update:
                found.append(round(time.monotonic() - began, 3))
    for way, found in seconds.items():
        print(f"{name}, {len(MODELS[name])} tensors, {way}: {found} s", flush=True)


def main() -> None:
    command = [sys.executable, "-m", "benchmarks.weights_ipc", "--receive"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for name in MODELS:
            measure(name, child)
            torch.cuda.empty_cache()
    finally:
        child.kill()
        child.wait(10)


if __name__ == "__main__":
    if "--receive" in sys.argv:
        receive()
    else:
        main()
