"""Waits for coroutines in code that blocks, also in a thread with a running event loop (notebooks).

The coroutines run on one event loop, which a thread of this process has from the first one on.
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
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking", daemon=True).start()
    return loop


def blocking(work: Coroutine[Any, Any, R], while_waiting: Callable[[], None] = lambda: None) -> R:
    """Return the result of `work`. What `while_waiting` raises, twice a second, ends it.

    It is ended in order, within a limit, also by an interrupt.
    """
    ended = threading.Event()

    async def noting_the_end() -> R:
        try:
            return await work  # bounded: by itself, or `while_waiting`
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
