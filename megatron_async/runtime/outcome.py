"""The outcome of a call of a user's code: what it returned, or the exception that it raised.

A thread or a coroutine hands an outcome on as a value, because neither a future nor a coroutine can
carry a StopIteration: asyncio raises a TypeError in its place, and whoever waits is never resumed.
"""

from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]


def outcome_of(action: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call `action` and return what it returned and None, or None and what it raised."""
    try:
        return action(*arguments), None
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        return None, error
