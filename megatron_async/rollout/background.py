"""Provides the driver's background tasks and keeps the first failure, which ends the run.

Invariants
- An exception in a background task ends the run; it is never lost.
- The first failure that cannot be recovered from is kept in `failure`, and every caller that waits
  gets it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import disk_failure

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class BackgroundTasks:
    """The background asyncio tasks of one driver, and the first failure of the run.

    Attributes:
        failure: First failure reported; None if there was none so far.
        failed: Event that is set once `failure` is set.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        """Create an empty set of tasks.

        Args:
            describe: Function that returns the driver's current state as text, for error messages.
        """
        self._describe = describe
        self.failure: ComponentFailure | None = None
        self.failed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` as a background task of the event loop and return the task.

        `cancel` cancels the task. An exception in it ends the run.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._report_crash)
        return task

    def fail(self, failure: ComponentFailure) -> None:
        """Record `failure` if it is the first failure of the run, and raise it in every waiting
        call of `wait_for`."""
        if self.failure is None:
            self.failure = failure
            self.failed.set()

    def close(self) -> None:
        """Stop reporting exceptions of background tasks as failures of the run, because the driver
        is closing; they are only logged from now on."""
        self._closed = True

    async def cancel(self) -> None:
        """Cancel every background task and wait until all of them have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_for(
        self,
        wanted: Coroutine[Any, Any, Any],
        timeout: float,
        what: str,
        other: Coroutine[Any, Any, Any] | None = None,
    ) -> Any:
        """Wait for the coroutine `wanted` and return its result, or None if the coroutine `other`
        ends first.

        Args:
            timeout: Longest wait in seconds.
            what: Name of the awaited event, for the error message.
            other: Coroutine that ends the wait early; None if there is none.

        Raises:
            ComponentFailure: The run has failed, or neither coroutine ended in time.
        """
        first = asyncio.ensure_future(wanted)
        waiters = {first, asyncio.ensure_future(self.failed.wait())}
        if other is not None:
            waiters.add(asyncio.ensure_future(other))
        done, pending = await asyncio.wait(
            waiters, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for waiter in pending:
            waiter.cancel()
        if first in done:
            return first.result()
        if self.failure is not None:
            raise self.failure
        if not done:
            raise ComponentFailure(
                f"timed out after {timeout:.0f} s waiting for {what}; {self._describe()}"
            )
        return None

    def _report_crash(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._closed:
            _logger.error("the rollout driver failed while closing", exc_info=error)
        elif isinstance(error, ComponentFailure):
            self.fail(error)
        elif error is not None:
            failure = disk_failure(error) or ComponentFailure(
                f"the rollout driver failed: {error!r}"
            )
            failure.__cause__ = error
            self.fail(failure)
