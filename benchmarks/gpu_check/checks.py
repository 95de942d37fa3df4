"""Lists all checks in the order in which they run.

The time limits of each part add up to at most nine minutes.
"""

from __future__ import annotations

from typing import Final

from benchmarks.gpu_check import kernels, learning, state, trainer
from benchmarks.gpu_check.check import Check, Figures, Stage

PART_SECONDS: Final = 540
_TESTS = ("triton", "pytest", "hypothesis", "pydantic", "yaml")
_TRAINER = ("megatron.core", "pydantic", "yaml", "safetensors", "zstandard")


def doctor(_stage: Stage) -> Figures:
    """Return the lines that `megatron-async doctor` prints on this machine."""
    from megatron_async.commands.doctor import report_lines

    return {"lines": report_lines()}


# Part 1 has the most informative checks: whether kernels and trainer are correct, and how fast they
# are. Its time limits are two to four times the seconds on an H100
# (benchmarks/results/gpu/h100.md).
CHECKS: Final = (
    Check("kernel_tests", 1, 120, kernels.device_tests, _TESTS, cuda=True),
    Check("head_peers", 1, 90, kernels.peers, ("triton",), cuda=True),
    Check("trainer_parity", 1, 80, trainer.grouped_heads, _TRAINER),
    Check("trainer_updates", 1, 160, trainer.updates, _TRAINER),
    Check("checkpoint", 1, 60, state.checkpoint, _TRAINER),
    Check("weights_ipc", 1, 25, state.ipc, _TRAINER),
    Check("rates", 2, 40, kernels.rates, cuda=True),
    Check("doctor", 2, 60, doctor, ("megatron.core", "pydantic", "yaml"), cpu_too=True),
    Check("head_rates", 2, 140, kernels.head, ("triton",), cuda=True),
    Check("loss_rates", 2, 80, kernels.loss, ("triton",), cuda=True),
    Check("trainer_window", 2, 60, trainer.window, _TRAINER),
    Check("learning", 3, 240, learning.learning, (*_TRAINER, "transformers", "tokenizers")),
    Check("host_copies", 3, 300, state.host_copies, _TRAINER),
)
