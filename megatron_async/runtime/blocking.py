"""Runs coroutines from blocking code.

All coroutines run on one separate event loop, in a thread that the first call starts. So the caller
may itself be in a thread that runs an event loop, as code in a notebook is.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from megatron_async.runtime.time_limits import STEP_SECONDS

R = TypeVar("R")
_END_SECONDS = 5.0


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all coroutines run on; the first call starts its thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking", daemon=True).start()
    return loop


def blocking(work: Coroutine[Any, Any, R], while_waiting: Callable[[], None] = lambda: None) -> R:
    """Run the coroutine `work` on the event loop's thread, wait for it, and return its result.

    If `while_waiting` raises, or the user presses Ctrl-C, `work` is canceled, and this function
    waits up to `_END_SECONDS` until the canceled coroutine has cleaned up.

    Args:
        work: The coroutine.
        while_waiting: Called twice per second during the wait.
    """
    ended = threading.Event()

    async def noting_the_end() -> R:
        try:
            # This wait needs no time limit, because either `work` has one, or the caller's
            # `while_waiting` raises an error when a limit is exceeded.
            return await work
        finally:
            ended.set()

    call = asyncio.run_coroutine_threadsafe(noting_the_end(), _loop())
    try:
        while not call.done():
            concurrent.futures.wait([call], STEP_SECONDS)
            if not call.done():
                while_waiting()
        return call.result()
    finally:
        if call.cancel():
            ended.wait(_END_SECONDS)
