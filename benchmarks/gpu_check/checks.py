"""The list of checks, in the order in which they run; a part's limits add up to nine minutes."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu_check import kernels, state, trainer
from benchmarks.gpu_check.check import Check, Findings, Stage

PART_SECONDS: Final = 540
_TESTS = ("triton", "pytest", "hypothesis", "pydantic", "yaml")
_TRAINER = ("megatron.core", "pydantic", "yaml", "safetensors", "zstandard")


def doctor(_stage: Stage) -> Findings:
    """What `megatron-async doctor` prints here."""
    from megatron_async.commands.doctor import report_lines

    return Findings({"lines": report_lines()})


CHECKS: Final = (
    Check("doctor", 1, 60, doctor, ("megatron.core", "pydantic", "yaml"), cpu_too=True),
    Check("kernel_tests", 1, 220, kernels.device_tests, _TESTS, cuda=True),
    Check("rates", 1, 40, kernels.rates, cuda=True),
    Check("loss_rates", 1, 80, kernels.loss, ("triton",), cuda=True),
    Check("head_rates", 1, 140, kernels.head, ("triton",), cuda=True),
    Check("trainer_parity", 2, 120, trainer.grouped_heads, _TRAINER),
    Check("trainer_window", 2, 120, trainer.window, _TRAINER),
    Check("checkpoint", 2, 90, state.checkpoint, _TRAINER),
    Check("weights_ipc", 2, 90, state.ipc, _TRAINER),
    Check("host_copies", 2, 120, state.host_copies, _TRAINER),
    Check("trainer_updates", 3, 300, trainer.updates, _TRAINER),
    Check("head_peers", 3, 240, kernels.peers, ("triton",), cuda=True),
)
