"""Work beside the event loop's main course: tasks, and the first failure that ends a run.

Invariants
- A defect in a task ends the run; it never vanishes.
- The first failure that cannot be mended is kept in `failure`, and every waiter gets it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import disk_failure

_logger = logging.getLogger(__name__)


class BackgroundTasks:
    """The tasks of one driver."""

    def __init__(self, describe: Callable[[], str]) -> None:
        """`describe` returns what is going on, for error messages."""
        self._describe = describe
        self.failure: ComponentFailure | None = None
        self.failed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have `work` done beside; `cancel` ends it, and a defect in it ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._report_crash)
        return task

    def fail(self, failure: ComponentFailure) -> None:
        """Keep the first failure; release every waiter."""
        if self.failure is None:
            self.failure = failure
            self.failed.set()

    def close(self) -> None:
        """No run is left to end: failures are logged from now on."""
        self._closed = True

    async def cancel(self) -> None:
        """Returns when every task has ended."""
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
        """Result of `wanted`, or None when `other` came first.

        Raises ComponentFailure: the kept one, or when nothing came within `timeout` seconds.
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
            raise ComponentFailure(f"waited {timeout:.0f} s for {what}; {self._describe()}")
        return None

    def _report_crash(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._closed:
            _logger.error("the rollout driver failed while it closed", exc_info=error)
        elif isinstance(error, ComponentFailure):
            self.fail(error)
        elif error is not None:
            failure = disk_failure(error) or ComponentFailure(
                f"the rollout driver failed: {error!r}"
            )
            failure.__cause__ = error
            self.fail(failure)
