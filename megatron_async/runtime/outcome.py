"""Calls a user's function and returns an `Outcome`: a tuple of its result and its exception.

Functions that run a user's code in a thread or a coroutine return an `Outcome` instead of raising
the user's exception. The reason is StopIteration, which user code may raise: a future or coroutine
cannot carry it. asyncio would raise a TypeError, and the coroutine that waits for the result would
never continue.
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
