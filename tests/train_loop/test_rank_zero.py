"""Tests ranks that wait for rank 0, which may take longer than the timeout of a collective."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from megatron_async.config import build_config
from megatron_async.errors import ComponentFailure
from megatron_async.train_loop.rank_zero import patience_seconds
from tests.distributed import run_ranks

COLLECTIVE_SECONDS = 1.0
WORK_SECONDS = 2.5


def results_of_rank_zero() -> list[str]:
    """Return what this rank got from rank 0 for three calls: a slow result, an error, and a quick
    result."""
    import torch.distributed as dist

    from megatron_async.train_loop.rank_zero import RankZero

    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    rank_zero = RankZero.with_timeout(10 * WORK_SECONDS)
    received = []

    def slow() -> str:
        time.sleep(WORK_SECONDS)
        return f"rank {dist.get_rank()}"

    def fails() -> str:
        raise ComponentFailure("waited 1800 s for a batch")

    for work in (slow, fails, lambda: "done"):
        try:
            received.append(rank_zero.run(work))
        except ComponentFailure as error:
            received.append(str(error))
    return received


@pytest.mark.slow
def test_all_ranks_get_results_and_errors_of_rank_zero_after_long_waits() -> None:
    received = run_ranks(results_of_rank_zero, 2, timeout_seconds=60)
    assert received == [["rank 0", "waited 1800 s for a batch", "done"]] * 2


def test_patience_seconds_exceed_every_time_limit_of_rank_zero() -> None:
    for section, name in (
        ("trainer", "wait_for_batch_seconds"),
        ("engines", "start_timeout_seconds"),
        ("weights", "timeout_seconds"),
        ("checkpoint", "timeout_seconds"),
        ("eval", "timeout_seconds"),
    ):
        assert patience_seconds(build_config({section: {name: 5000}})) > 5000 + 60


@pytest.mark.parametrize(("max_stall_seconds", "limit_seconds"), [(0.0, 120.0), (600.0, 660.0)])
def test_collective_timeout_exceeds_the_longest_stall_of_a_rank(
    max_stall_seconds: float, limit_seconds: float
) -> None:
    """Both the trainer's groups and the default group must wait longer than the sending rank, so
    that this rank fails first."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_async.config.model import ParallelConfig, TrainerConfig
    from megatron_async.trainer.parallel import parallel_session

    trainer = TrainerConfig(collective_timeout_seconds=120)
    with parallel_session(ParallelConfig(), trainer, seed=0, max_stall_seconds=max_stall_seconds):
        for group in (parallel_state.get_tensor_model_parallel_group(), dist.group.WORLD):
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=limit_seconds)
