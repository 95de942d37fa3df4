"""Counts the GPU memory of one rank of a shipped config, by the storages that the trainer's code
allocates.

The rank runs without other ranks, on a GPU that has only shapes (`tests/trainer/fake_gpu.py`).
Model, gradient buffers and optimizer are built. Microbatches run through Megatron's schedule, as
many at once as the stage has, with the output head and with the recomputation of the config. Then
the optimizer makes its step. Every storage on the GPU is counted from its first use until it is no
longer referenced.

Invariants
- This module does not use the planner's constants, and the planner's constants are not fitted to
  its results.
- The layers of a stage are alike. Therefore two depths determine a stage of any depth, separately
  for each phase.

Differences from a real GPU: fused operations (the activation, RMSNorm) run unfused, which needs
more memory at once; NCCL's buffers, cuBLAS's workspaces and fragmentation are missing; the head is
the chunked version; all experts get equally many tokens.
"""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_async.config import RunConfig
from megatron_async.trainer import capabilities
from megatron_async.trainer.forward import Microbatch, PolicyRunner
from megatron_async.trainer.optimizer import (
    build_optimizer,
    guarded_step,
    wrap_data_parallel,
    zero_gradients,
)
from megatron_async.trainer.packed import PackedInputs, TokenLogprobs
from megatron_async.trainer.parallel import init_parallel
from megatron_async.trainer.policy_model import build_policy
from tests.trainer.fake_gpu import fake_gpu, fake_world
from tests.trainer.test_fake_gpu import NO_ENGINE

PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Peaks:
    """Bytes on a GPU: before an update, the peaks during gradients and optimizer step, and between
    these two phases."""

    state: float
    gradients: float
    between: float
    optimizer_step: float

    @property
    def largest(self) -> float:
        return max(self.gradients, self.optimizer_step)

    def at(self, layers: float, shallow: Peaks, step: float) -> Peaks:
        """Return the peaks for `layers` more layers; `shallow` has `step` layers fewer than this
        object."""
        return self.grown(self, shallow, layers / step)

    def grown(self, more: Peaks, less: Peaks, times: float) -> Peaks:
        """Return these peaks plus `times` the difference of `more` and `less`."""
        return Peaks(
            *(
                own + (high - low) * times
                for own, high, low in zip(
                    vars(self).values(), vars(more).values(), vars(less).values(), strict=True
                )
            )
        )


class StorageCount(TorchDispatchMode):
    """Counts the bytes of all referenced storages on the GPU."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.bytes = 0
        self._device = device
        self._peak = 0
        self._sizes: dict[int, int] = {}

    def pop_peak(self) -> int:
        """Return the peak since the last call, and start a new peak."""
        peak, self._peak = self._peak, self.bytes
        return peak

    def _forget(self, storage: int) -> None:
        self.bytes -= self._sizes.pop(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
        self._peak = max(self._peak, self.bytes)
        return result


def peaks_of_stages(config: RunConfig, raw: dict[str, Any], folder: Path) -> list[Peaks]:
    """Return the peaks of the first rank of each stage; runs in a process without a process group
    (`run_ranks`).

    Args:
        raw: Content of the model's config.json.
    """
    deep = raw["num_hidden_layers"] // config.parallel.pipeline
    # The optimizer steps experts separately; from two layers on, they determine its peak.
    fewest = 2 if "num_experts" in raw else 1
    found = []
    for stage in range(config.parallel.pipeline):
        if isinstance(config.trainer.recompute, int):
            found.append(_partly_recomputed(config, raw, folder, stage, deep))
            continue
        less, more = (stage_peaks(config, raw, folder, stage, few) for few in (fewest, fewest + 1))
        found.append(more.at(deep - fewest - 1, less, 1))
    return found


def _partly_recomputed(
    config: RunConfig, raw: dict[str, Any], folder: Path, stage: int, deep: int
) -> Peaks:
    """Return the peaks of a stage of `deep` layers, of which `trainer.recompute` layers are
    recomputed."""
    recomputed = config.trainer.recompute
    assert isinstance(recomputed, int)

    def peaks(number: int, kept: int) -> Peaks:
        trainer = config.trainer.model_copy(update={"recompute": number})
        changed = config.model_copy(update={"trainer": trainer})
        return stage_peaks(changed, raw, folder, stage, number + kept)

    both = peaks(1, 1)
    deeper = both.grown(peaks(2, 1), both, recomputed - 1)
    return deeper.grown(peaks(1, 2), both, deep - recomputed - 1)


def stage_peaks(
    config: RunConfig, raw: dict[str, Any], folder: Path, stage: int, layers: int
) -> Peaks:
    """Return the peaks of one update of the first rank of a pipeline stage that has `layers`
    layers."""
    shape = {**raw, "num_hidden_layers": layers * config.parallel.pipeline}
    shape.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(shape))
    parallel, trainer = config.parallel, config.trainer
    model_config = config.model.model_copy(update={"path": str(folder)})
    tokens = trainer.microbatch_tokens
    at_once = parallel.pipeline - stage
    rank = stage * parallel.ranks // parallel.pipeline
    routed = tokens // parallel.tensor * raw.get("num_experts_per_tok", 0)
    with _rank(config, rank, routed, raw["hidden_size"]) as count:
        layout = init_parallel(parallel, trainer, seed=1)
        [model] = build_policy(model_config, parallel, trainer=trainer, seed=0)
        wrapped = wrap_data_parallel(model, config.optimizer, bf16=True)
        optimizer = build_optimizer(wrapped, config.optimizer, bf16=True)
        state = count.bytes
        zero_gradients(wrapped, optimizer)
        runner = PolicyRunner(wrapped, layout, token_budget=tokens, hidden_size=raw["hidden_size"])
        micro = _microbatch(tokens, layout.device)
        count.pop_peak()
        # One microbatch more than are in flight at once, so that the peak includes the next one.
        runner._run([micro] * (at_once + 1), micro.rows, _loss, forward_only=False, entropy=True)
        gradients, between = count.pop_peak(), count.bytes
        applied, _ = guarded_step(optimizer, rate=1e-6, loss_is_finite=True)
        assert applied
        return Peaks(state, gradients, between, count.pop_peak())


def _loss(output: TokenLogprobs, _micro: Microbatch) -> Tensor:
    assert output.entropy_R is not None
    return output.logprobs_R.sum() + output.entropy_R.sum()


def _microbatch(tokens: int, device: torch.device) -> Microbatch:
    """Return a microbatch that two sequences of equal length fill."""

    def integers(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    trained = tokens - 2 * PROMPT_TOKENS
    packed = PackedInputs(
        integers(tokens),
        integers(tokens),
        integers(3, torch.int32),
        tokens // 2,
        integers(trained),
    )
    rows: Any = SimpleNamespace(num_tokens=tokens, temperature=1.0)
    return Microbatch(packed, rows, integers(trained))


@contextmanager
def _rank(config: RunConfig, rank: int, routed: int, hidden: int) -> Iterator[StorageCount]:
    """Act as one rank of the layout, and count its storages."""
    kernel = importlib.import_module("megatron_async_kernels.token_logprob")
    adam = importlib.import_module("torch.optim.adam")
    sent = [config.trainer.microbatch_tokens // config.parallel.tensor, 1, hidden]

    def shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return sent, sent

    def no_operations(*_: Any, **__: Any) -> list[Any]:
        return []

    with ExitStack() as stack:
        for owner, name, replacement in (
            (capabilities, "detect", lambda: NO_ENGINE),
            # Triton's kernels need real memory; the torch version has the same interface.
            (kernel, "resolve_backend", lambda *_: "chunked"),
            (torch, "_assert_async", lambda *_: None),
            # torch's choice for GPU tensors, which it does not make for fake tensors.
            (adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True)),
            (p2p_communication.P2PCommunicator, "_communicate_shapes", shapes),
            (p2p_communication, "_p2p_ops", no_operations),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(fake_gpu(routed))
        stack.enter_context(fake_world(config.parallel, rank))
        yield stack.enter_context(StorageCount())
