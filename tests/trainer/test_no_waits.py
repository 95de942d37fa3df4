"""Tests that the host does not wait for device results between two microbatches.

On a GPU, each such wait leaves the device without work. The test runs on a CPU, where the same
calls are made, and counts every operation that must know a value, or the size of a result, before
it returns.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_async_kernels import token_logprob as head_module
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.algorithms.algorithm import build_sft_algorithm
from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.trainer.forward import PolicyRunner
from megatron_async.trainer.step import PolicyTrainer
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session

aten: Any = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
}


class Waits(TorchDispatchMode):
    """Counts the operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unknown_size = func is aten.repeat_interleave.Tensor and not kwargs.get("output_size")
        by_mask = func in (aten.index.Tensor, aten.index_put_.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in _WAITS or unknown_size or by_mask:
            self.found[str(func)] += 1
        return func(*args, **kwargs)


def waits(
    monkeypatch: pytest.MonkeyPatch, trainer: PolicyTrainer, work: Callable[[PolicyRunner], object]
) -> Counter[str]:
    """Count the waits of `work` while the schedule runs; the microbatches are built before the
    schedule and not counted."""
    from megatron_async.trainer.attention_kernels import packed_attention as per_sequence

    mode, run, tolist = Waits(), PolicyRunner._run, torch.Tensor.tolist
    # On other devices, targets are asserted on the device, without a wait.
    monkeypatch.setattr(head_module_of_call(), "_check_targets", lambda *_: None)

    def counted_tolist(tensor: torch.Tensor) -> Any:
        """Count a `tolist`, which is not dispatched on a CPU, unless attention calls it.

        Attention on a CPU runs sequence by sequence and reads the borders.
        """
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] != per_sequence.__module__:
            frame = frame.f_back
        if frame is None:
            mode.found["tolist"] += 1
        return tolist(tensor)

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        with mode, monkeypatch.context() as during:
            during.setattr(torch.Tensor, "tolist", counted_tolist)
            return run(*args, **kwargs)

    monkeypatch.setattr(PolicyRunner, "_run", counted)
    work(trainer._runner)
    return mode.found


def head_module_of_call() -> Any:
    """Return the module of `token_logprob`, which the function of the same name hides in the
    package."""
    return sys.modules[head_module.__module__]


LOSSES = {
    "token loss": {"recipe": "copris"},
    "sequence loss": {"recipe": "pipeline_rl", "loss": {"aggregation": "seq_mean_token_mean"}},
    "rapid": {"recipe": "rapid"},
}
HALVES = {"groups_per_batch": 6, "group_size": 4, "updates_per_batch": 2}


@pytest.mark.parametrize("algorithm", LOSSES.values(), ids=LOSSES)
def test_rl_gradients_have_no_device_waits_between_microbatches(
    algorithm: dict[str, Any], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_settings = {"microbatch_tokens": 16}
    changes = {"algorithm": algorithm, "trainer": trainer_settings, "schedule": HALVES}
    with single_process(), trainer_session(settings(model_dir, changes)) as trainer:
        batch, _ = trainer._prepare(DeviceBatch.of(ragged_batch()))
        current_T = trainer._runner.logprobs(batch)
        needed = current_T if trainer.algorithm.needs_minibatch_pass else None
        batch, denominators = trainer.algorithm.prepare_minibatch(batch, needed)
        counts = []

        def gradients(runner: PolicyRunner) -> None:
            found = runner.gradients(batch, trainer.algorithm, denominators, entropy=True)
            counts.append(found.num_microbatches)

        assert not waits(monkeypatch, trainer, gradients)
        assert counts[0] > 3


def test_sft_and_logprobs_have_no_device_waits_between_microbatches(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with single_process(), trainer_session(settings(model_dir, {})) as trainer:
        sft = build_sft_algorithm()
        batch, _ = sft.prepare(DeviceBatch.of(ragged_batch()))
        _, denominators = sft.prepare_minibatch(batch)

        def both(runner: PolicyRunner) -> None:
            runner.logprobs(batch)
            runner.gradients(batch, sft, denominators, entropy=False)

        assert not waits(monkeypatch, trainer, both)
