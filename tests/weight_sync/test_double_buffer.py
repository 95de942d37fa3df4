"""Double buffering: the next item is made while one is in work, and never more than that."""

from __future__ import annotations

import threading

import pytest

from megatron_async.weight_sync.double_buffer import OneAhead


def test_the_next_item_is_made_while_one_is_in_work() -> None:
    """Without overlap this would not end: the work of 0 waits until item 1 is made."""
    made = threading.Event()
    seen: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            assert made.wait(10)
        seen.append(item)

    with OneAhead[int](work) as ahead:
        ahead.put(0)
        made.set()  # item 1 exists now
        ahead.put(1)
        ahead.put(2)
    assert seen == [0, 1, 2]


def test_an_error_of_the_last_item_is_raised_at_the_end() -> None:
    def work(item: int) -> None:
        if item == 2:
            raise ArithmeticError("no room")

    with pytest.raises(ArithmeticError, match="no room"), OneAhead[int](work) as ahead:
        for item in range(3):
            ahead.put(item)


def test_the_callers_own_error_is_not_hidden() -> None:
    with pytest.raises(KeyError), OneAhead[int](lambda item: 1 // item and None) as ahead:
        ahead.put(0)
        raise KeyError("gathering failed")
