"""The launcher of rank functions: results in order, failures with their traceback, no leftovers."""

from __future__ import annotations

import os
import time

import pytest

from tests.distributed import RankFailure, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, float(total), os.getpid()


def _one_fails() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def _sleeps() -> None:
    time.sleep(60)


def test_every_rank_returns_its_result_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 2, 10, timeout_seconds=60)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert [total for _, total, _ in results] == [21.0, 21.0]


def test_the_first_failure_is_the_error_and_ends_the_others() -> None:
    with pytest.raises(RankFailure, match="rank one is broken"):
        run_ranks(_one_fails, 2, timeout_seconds=60)


def test_a_hanging_rank_is_ended_at_the_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="still ran after 3"):
        run_ranks(_sleeps, 1, timeout_seconds=3)
    assert time.monotonic() - started < 40
