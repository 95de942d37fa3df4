"""GPU memory of one rank of a shipped file, by the storages that the trainer's own code makes.

The rank is alone, its GPU has shapes only (`tests/trainer/fake_gpu.py`): model, gradient buffers
and optimizer are built, microbatches go through Megatron's schedule as many at once as its stage
has, with the head and with the recomputation of the file, and the optimizer makes its step. Every
storage on the GPU is counted from its first use until nothing refers to it.

Invariants
- Nothing here is computed from the planner's constants, nor they from what is found here.
- The layers of a stage are alike: two depths give a stage of any depth, for each phase alone.

What differs from a GPU: fused pieces (the activation, RMSNorm) run one operation after the other,
which holds more at once; NCCL's buffers, cuBLAS's workspaces and fragmentation are not there; the
head is the chunked one; experts get as many tokens as each other.
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
    """Bytes on a GPU: before an update, the most in each part of it, and between the two parts."""

    state: float
    gradients: float
    between: float
    optimizer_step: float

    @property
    def most(self) -> float:
        return max(self.gradients, self.optimizer_step)

    def at(self, layers: float, shallow: Peaks, step: float) -> Peaks:
        """Those of `layers` more layers; `shallow` is of `step` layers fewer than this."""
        return self.grown(self, shallow, layers / step)

    def grown(self, more: Peaks, less: Peaks, times: float) -> Peaks:
        """Add the difference of two others so many times."""
        return Peaks(
            *(
                mine + (high - low) * times
                for mine, high, low in zip(
                    vars(self).values(), vars(more).values(), vars(less).values(), strict=True
                )
            )
        )


class StorageCount(TorchDispatchMode):
    """Bytes of the storages on the GPU that something refers to."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.bytes = 0
        self._device = device
        self._peak = 0
        self._held: dict[int, int] = {}

    def take_peak(self) -> int:
        """The most since the last call."""
        peak, self._peak = self._peak, self.bytes
        return peak

    def _forget(self, storage: int) -> None:
        self.bytes -= self._held.pop(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._held:
                    self._held[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
        self._peak = max(self._peak, self.bytes)
        return result


def peaks_of_stages(config: RunConfig, raw: dict[str, Any], folder: Path) -> list[Peaks]:
    """Of the first rank of each stage, in a process that has no process group yet (`run_ranks`).

    `raw` is the model's config.json.
    """
    deep = raw["num_hidden_layers"] // config.parallel.pipeline
    # The optimizer steps experts by themselves: they are the most it holds from two layers on.
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
    """Peaks of a stage of `deep` layers of which `trainer.recompute` are recomputed."""
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
    """One update of the first rank of a pipeline stage of so many layers."""
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
        count.take_peak()
        # One more than are held at once, so that what is held meets the next one's.
        runner._run([micro] * (at_once + 1), micro.rows, _loss, forward_only=False, entropy=True)
        gradients, between = count.take_peak(), count.bytes
        applied, _ = guarded_step(optimizer, rate=1e-6, loss_is_finite=True)
        assert applied
        return Peaks(state, gradients, between, count.take_peak())


def _loss(output: TokenLogprobs, _micro: Microbatch) -> Tensor:
    assert output.entropy_R is not None
    return output.logprobs_R.sum() + output.entropy_R.sum()


def _microbatch(tokens: int, device: torch.device) -> Microbatch:
    """Two sequences that fill it."""

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
    """That rank of the layout, with its storages counted."""
    kernel = importlib.import_module("megatron_async_kernels.token_logprob")
    adam = importlib.import_module("torch.optim.adam")
    sent = [config.trainer.microbatch_tokens // config.parallel.tensor, 1, hidden]

    def shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return sent, sent

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    with ExitStack() as stack:
        for where, name, replacement in (
            (capabilities, "detect", lambda: NO_ENGINE),
            # Triton's kernels need memory to work on; the torch version has the same interface.
            (kernel, "resolve_backend", lambda *_: "chunked"),
            (torch, "_assert_async", lambda *_: None),
            # What torch chooses for tensors on a GPU; a fake one is not of the type it looks for.
            (adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True)),
            (p2p_communication.P2PCommunicator, "_communicate_shapes", shapes),
            (p2p_communication, "_p2p_ops", nothing),
        ):
            stack.enter_context(mock.patch.object(where, name, replacement))
        stack.enter_context(fake_gpu(routed))
        stack.enter_context(fake_world(config.parallel, rank))
        yield stack.enter_context(StorageCount())
