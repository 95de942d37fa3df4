"""Checks of the trainer's state: checkpoints, copies in host memory, weight transfer by IPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import ROOT, CheckFailed, Figures, Stage
from benchmarks.gpu_check.ipc_child import digest
from benchmarks.gpu_check.models import GQA, QWEN2_1B, ragged_batch, toy, trainer_on, write_model

if TYPE_CHECKING:
    from megatron_async.trainer.step import PolicyTrainer

_CHILD_SECONDS = 90


def checkpoint(stage: Stage) -> Figures:
    """Check that a restored trainer continues with the same bits as the trainer that was saved."""
    from megatron_async.checkpoint.manager import CheckpointManager
    from megatron_async.config.run import CheckpointConfig

    config = toy(GQA) if stage.trial_run else GQA
    model = write_model(stage.scratch / "model", config, stage.device, std=0.05)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Without `warn_only`, because with it the backward pass of flash attention stays
    # non-deterministic.
    torch.use_deterministic_algorithms(True)
    batches = [
        ragged_batch([300, 20, 77, 150] if stage.trial_run else [900, 20, 377, 1500], 512, step=n)
        for n in range(4)
    ]
    changes: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "steps": 4,
    }
    root = stage.scratch / "checkpoints"
    with trainer_on(model, **changes) as trainer:
        for batch in batches[:2]:
            trainer.train_sft(batch)
        manager = CheckpointManager(root, CheckpointConfig())
        began = time.monotonic()
        manager.save(trainer, {})
        blocked = time.monotonic() - began
        manager.wait()
        saved = _bits(trainer)
        for batch in batches[2:]:
            trainer.train_sft(batch)
        went_on = _bits(trainer)
        manager.close()
    with trainer_on(model, **changes) as trainer:
        manager = CheckpointManager(root, CheckpointConfig())
        newest = manager.newest()
        if newest is None:
            raise CheckFailed("the saved checkpoint was not found")
        manager.load(trainer, newest)
        _require_equal("after loading", _bits(trainer), saved)
        for batch in batches[2:]:
            trainer.train_sft(batch)
        _require_equal("two updates after loading", _bits(trainer), went_on)
        manager.close()
    return {"tensors": len(saved), "blocked_seconds": blocked}


def _bits(trainer: PolicyTrainer) -> list[Tensor]:
    """Return copies of the weights and the optimizer's tensors in host memory."""
    from megatron_async.trainer.offload import optimizer_tensors, weight_tensors

    held = (*weight_tensors(trainer), *optimizer_tensors(trainer))
    return [tensor.detach().to("cpu", copy=True) for tensor in held]


def _digests(tensors: list[Tensor]) -> list[str]:
    """Return the digest of every tensor.

    hashlib releases the interpreter lock, so the threads use all cores.
    """
    with ThreadPoolExecutor() as threads:
        return list(threads.map(digest, tensors))


def _require_equal(when: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Raise CheckFailed if any two tensors differ; `when` names the moment of the comparison."""
    differing = [
        index
        for index, (a, b) in enumerate(zip(_digests(ours), _digests(theirs), strict=True))
        if a != b
    ]
    if differing:
        first = differing[0]
        gap = float((ours[first].double() - theirs[first].double()).abs().max())
        raise CheckFailed(
            f"{when}, {len(differing)} of {len(ours)} tensors differ; number {first} differs by "
            f"{gap:.3g}"
        )


def host_copies(stage: Stage) -> Figures:
    """Move a trainer of 1.5B parameters to host memory and back; check all bits, measure times."""
    from megatron_async.trainer.offload import DeviceContents, TrainerOffloader, _on_gpu

    config = toy(QWEN2_1B) if stage.trial_run else QWEN2_1B
    model = write_model(stage.scratch / "model", config, stage.device, std=0.02)
    on_gpu = stage.device == "cuda"
    figures: dict[str, Any] = {}
    with trainer_on(model, model={"dtype": "bfloat16"}) as trainer:
        memory = TrainerOffloader(trainer, _on_gpu if on_gpu else lambda _tensor: True)
        before = _digests(_bits(trainer))
        held = torch.cuda.memory_allocated() if on_gpu else 0
        for turn in ("first", "second"):
            for name, residence in (("away", DeviceContents.NOTHING), ("back", DeviceContents.ALL)):
                began = time.monotonic()
                memory.keep_on_device(residence)
                if on_gpu:
                    torch.cuda.synchronize()
                figures[f"{turn}_{name}_seconds"] = time.monotonic() - began
                if on_gpu and residence is DeviceContents.NOTHING:
                    left = torch.cuda.memory_allocated()
                    figures["moved_gib"] = (held - left) / 2**30
                    if left > 0.05 * held:
                        raise CheckFailed(f"{left} of {held} bytes stayed on the device")
        if _digests(_bits(trainer)) != before:
            raise CheckFailed("values changed when they moved to the host and back")
    return figures


def ipc(stage: Stage) -> Figures:
    """Send weights by CUDA IPC handles to another process, which uses SGLang's unpickler."""
    from megatron_async.weight_sync.transports.tensor import flat_copy, serialize

    rows = 8 if stage.trial_run else 4096
    generator = torch.Generator(stage.device).manual_seed(5)
    bucket = [
        (
            f"tensor.{index}",
            torch.randn(rows, width, generator=generator, device=stage.device).to(dtype),
        )
        for index, (width, dtype) in enumerate(
            [(128, torch.bfloat16), (33, torch.float32), (1024, torch.bfloat16)]
        )
    ]
    began = time.monotonic()
    # `flat` must exist until the child has ended.
    flat = flat_copy(bucket, by_value=False)
    payload = serialize(flat)
    if stage.device == "cuda":
        torch.cuda.synchronize()
    serialized = time.monotonic() - began
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check.ipc_child"],
        cwd=ROOT,
        input=payload,
        capture_output=True,
        text=True,
        timeout=_CHILD_SECONDS,
    )
    if done.returncode != 0:
        raise CheckFailed(f"the receiving process failed: {done.stderr[-1500:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    expected = {name: digest(tensor.cpu()) for name, tensor in bucket}
    if answer["digests"] != expected:
        raise CheckFailed(f"the receiving process has different values: {answer}")
    bytes_moved = sum(tensor.nbytes for _, tensor in bucket)
    return {
        "unpickler": answer["unpickler"],
        "bytes": bytes_moved,
        "payload_bytes": len(payload),
        "serialize_seconds": serialized,
        "open_seconds": answer["open_seconds"],
    }
