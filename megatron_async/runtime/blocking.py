"""Waits for coroutines in code that blocks, also in a thread with a running event loop (notebooks).

All coroutines run on one event loop, in a thread that the first call starts.
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
    """Run `work` on the event loop of the thread, and return its result.

    `while_waiting` is called twice a second. If it raises, or Ctrl-C comes, `work` is canceled,
    and this function waits up to `_END_SECONDS` for it to clean up.
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
