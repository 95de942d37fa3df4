"""Calls a user's function and returns an `Outcome`: a tuple of its result and its exception.

Threads and coroutines return an `Outcome` instead of raising the exception, because neither a
future nor a coroutine can carry a StopIteration: asyncio raises a TypeError instead, and the
waiting coroutine is never resumed.
"""

from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""Result and exception of a call, one of which is None."""


def outcome_of(action: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call `action`; return its result and None, or None and the exception that it raised."""
    try:
        return action(*arguments), None
    except BaseException as error:  # noqa: BLE001 - a user's code may raise any exception
        return None, error
