"""Tests the search for the cause of a process's end in logs that torchrun, torch, SGLang and Ray
have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.errors import cause_in_log, one_line

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("torchrun_raised.txt", "RuntimeError: shape [3] does not fit"),
        ("torchrun_killed.txt", "rank 1 was killed by SIGKILL: the kernel does that when memory"),
    ],
)
def test_cause_in_log_omits_what_torchrun_writes_around_it(file: str, cause: str) -> None:
    """The logs come from two ranks of torch 2.11, of which the second failed."""
    found = cause_in_log((DATA / file).read_text())
    assert found is not None and found.startswith(cause)
    assert "error_file" not in found and "\n" not in found


def test_cause_in_log_is_of_the_first_rank_that_failed() -> None:
    log = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "rank.py", line 3, in train
[rank1]:     step()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank0]: Traceback (most recent call last):
[rank0]:   File "rank.py", line 3, in train
[rank0]: RuntimeError: Connection closed by peer
"""
    assert cause_in_log(log) == (
        "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


def test_cause_in_log_is_the_last_exception_of_a_chain() -> None:
    log = """
Traceback (most recent call last):
  File "a.py", line 1
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2
megatron_async.errors.ComponentFailure: no layer x
"""
    assert cause_in_log(log) == "megatron_async.errors.ComponentFailure: no layer x"


def test_cause_in_log_is_found_when_a_time_stamp_precedes_the_traceback() -> None:
    log = """
[2026-11-22 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 9, in run
    self.load()
    ^^^^^^^^^^^
ValueError: unsupported head size 7

[2026-11-22 10:00:01] Received sigquit from a child process.
"""
    assert cause_in_log(log) == "ValueError: unsupported head size 7"


@pytest.mark.parametrize("log", ["", "all is well\n", "Traceback (most recent call last):\n  cut"])
def test_cause_in_log_is_none_when_the_log_has_no_error(log: str) -> None:
    assert cause_in_log(log) is None


def test_one_line_shortens_an_error_to_one_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("x" * 5000))) <= 400
