"""Ranks that wait for rank 0: longer than a collective may take, and never longer than it does."""

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


def answers_of_rank_zero() -> list[str]:
    """Three times in a row: a slow answer, an error, and a quick answer."""
    import torch.distributed as dist

    from megatron_async.train_loop.rank_zero import RankZero

    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    rank_zero = RankZero.with_timeout(10 * WORK_SECONDS)
    heard = []

    def slow() -> str:
        time.sleep(WORK_SECONDS)
        return f"rank {dist.get_rank()}"

    def fails() -> str:
        raise ComponentFailure("waited 1800 s for a batch")

    for work in (slow, fails, lambda: "done"):
        try:
            heard.append(rank_zero.run(work))
        except ComponentFailure as error:
            heard.append(str(error))
    return heard


@pytest.mark.slow
def test_all_ranks_hear_what_rank_zero_heard_however_long_it_took() -> None:
    heard = run_ranks(answers_of_rank_zero, 2, timeout_seconds=60)
    assert heard == [["rank 0", "waited 1800 s for a batch", "done"]] * 2


def test_the_patience_is_longer_than_each_limit_of_rank_zero() -> None:
    for section, name in (
        ("trainer", "wait_for_batch_seconds"),
        ("engines", "start_timeout_seconds"),
        ("weights", "timeout_seconds"),
        ("checkpoint", "timeout_seconds"),
        ("eval", "timeout_seconds"),
    ):
        assert patience_seconds(build_config({section: {name: 5000}})) > 5000 + 60


@pytest.mark.parametrize(("max_stall_seconds", "limit_seconds"), [(0.0, 120.0), (600.0, 660.0)])
def test_collectives_outlast_an_engine_that_holds_a_rank_up(
    max_stall_seconds: float, limit_seconds: float
) -> None:
    """In the trainer's groups and in the default one: the sending rank is the first to give up."""
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
