"""Provides `StoreWriter`, the thread that writes to a store's database.

Callers queue rows in memory. The thread repeatedly takes the whole queue, leaves an empty one, and
commits what it took as one transaction.

Invariants
- Everything that the thread takes at once is written, or nothing of it. Deletions are executed
  after all rows are written.
- The event loop never waits for the disk, since it only appends to a list in memory. It blocks only
  while `_MAX_PENDING_BYTES` are queued, and for `stall_seconds` at most.
- The first error ends the thread. The next call raises it, and so does every barrier and job that
  has not been completed. Nothing is written after it.
- A barrier (`StoreWriter.barrier`) is done when everything queued before it is committed and, if it
  is `durable`, on disk.
- The thread itself releases the store's lock, after its last write. So no other process writes
  while the thread is alive, even while it is in an fsync that hangs.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import leads_to, reason
from megatron_async.files.lock import FileLock
from megatron_async.store import schema as schema
from megatron_async.store.schema import ChunkRow, Kind, ProgressRow, Row, TrajectoryRow

# Time in seconds for which the thread lets small writes accumulate before it commits them. It does
# not wait if a caller is waiting for the commit.
_LINGER_SECONDS = 0.005
_MAX_PENDING_BYTES = 64 * 1024 * 1024
_STALL_SECONDS = 60.0
Job = Callable[[sqlite3.Connection], Any]
T = TypeVar("T")


@dataclass
class _Pending:
    """The rows, statements and jobs that are queued for the writer's next transaction.

    Attributes:
        chunks: Chunks to insert, in order.
        rows: Other rows to write, by table and key, so that a later row replaces an earlier one
            with the same key.
        statements: SQL deletions with their parameters, executed after all rows are written.
        jobs: Functions to run after the commit, with the futures of their results.
        size: Approximate number of queued bytes.
        durable: Whether the commit must survive a power loss.
    """

    chunks: list[Row] = field(default_factory=list)
    rows: dict[tuple[Kind, int], Row] = field(default_factory=dict)
    statements: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    jobs: list[tuple[Job, Future[Any]]] = field(default_factory=list)
    size: int = 0
    durable: bool = False

    @property
    def writes(self) -> bool:
        """Whether the transaction has anything to commit."""
        return bool(self.chunks or self.rows or self.statements or self.durable)


class StoreWriter:
    """The writer thread of one store, which has the only connection that writes to its database.

    All methods are called from one other thread, that of the event loop, and return before the data
    is written.

    Attributes:
        position: Number of transactions ever committed to the store.
        stall_seconds: Longest time in seconds that a caller waits for the disk.
    """

    def __init__(self, path: Path, position: int, lock: FileLock) -> None:
        self._path, self._lock = path, lock
        self._file = path.stat()
        self.position = position
        self.stall_seconds = _STALL_SECONDS
        self._pending = _Pending()
        self._changed = threading.Condition()
        self._urgent = threading.Event()
        self._error: BaseException | None = None
        self._closing = False
        self._submitted = 1  # Number of the transaction that is being queued.
        self._committed = 0
        self._waiters: list[asyncio.Future[int]] = []
        self._acknowledging: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="trajectory-store", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called by the event loop

    @property
    def database_replaced(self) -> bool:
        """Whether the database file was removed or replaced while it is open.

        Later writes go to a file without a name, which is deleted when this process ends.
        """
        return not leads_to(self._path, self._file)

    def share_lock(self) -> FileLock:
        """Return another handle of the store's lock, which keeps the store locked until closed.

        It is for threads that write files of the store besides the database.

        Raises:
            ComponentFailure: The writer is closed or has failed.
        """
        with self._changed:
            self._check()
            return self._lock.share()

    @contextmanager
    def _gathering(self) -> Iterator[_Pending]:
        """Give the block exclusive access to the queue of transaction number `_submitted`.

        Raises:
            ComponentFailure: The writer is closed or has failed.
        """
        with self._changed:
            self._check()
            yield self._pending
            self._changed.notify()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything that the block queues part of one transaction.

        If the block queues a chunk, it must do so before anything else. `add_chunk` may wait for
        space in the queue, and while it waits, the thread may commit what is already queued.
        """
        with self._gathering():
            yield

    def add_chunk(self, chunk: ChunkRow, trajectory: TrajectoryRow | None = None) -> int:
        """Queue a chunk of tokens; return the number of the transaction that will write it.

        Blocks while too much is queued.

        Args:
            chunk: The chunk.
            trajectory: The row of its trajectory, to be written in the same transaction; None to
                write no row.

        Raises:
            ComponentFailure: The writer has failed or is closed, or the queue stays full for
                `stall_seconds`.
        """
        row = schema.with_checksum(chunk)
        with self._gathering():
            # While this waits, the thread may take the queue. So wait before queueing anything;
            # otherwise the chunk and its trajectory's row could be in different transactions.
            self._wait_for_space()
            self._pending.chunks.append(row)
            self._pending.size += len(chunk.data)
            if trajectory is not None:
                self.put(trajectory)
            return self._submitted

    def put(self, row: NamedTuple) -> None:
        """Queue `row`, to be inserted or to replace the row with its key.

        If one transaction has several rows with the same key, only the last of them is written.
        """
        values = schema.with_checksum(row)
        with self._gathering() as pending:
            pending.rows[type(row), row[0]] = values
            pending.size += 64

    def execute(self, statement: str, parameters: tuple[Any, ...]) -> None:
        """Queue an SQL deletion, to be executed after all rows of its transaction are written."""
        with self._gathering() as pending:
            pending.statements.append((statement, parameters))

    def is_committed(self, transaction: int) -> bool:
        """Return whether the transaction with this number is committed.

        Raises:
            ComponentFailure: The writer has failed or is closed.
        """
        self._check()
        return transaction <= self._committed

    def barrier(self, *, durable: bool = False) -> Future[int]:
        """Return a future that is done once everything queued so far is committed.

        Args:
            durable: Whether these commits must also survive a power loss.

        Returns:
            A future of the position, which is the number of transactions ever committed.

        Raises:
            ComponentFailure: The writer is closed or has failed.
        """
        with self._gathering() as pending:
            pending.durable |= durable
            return self.run(lambda _: self.position)

    async def committed(self) -> int:
        """Wait until everything queued so far is committed; return the store's transaction count.

        Callers that arrive while a barrier is in progress share the next barrier, so that thousands
        of streams cost one acknowledgment for each transaction.

        Raises:
            ComponentFailure: The writer fails, is closed, or commits nothing for `stall_seconds`.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[int] = loop.create_future()
        self._waiters.append(waiter)
        if self._acknowledging is None:
            self._acknowledging = loop.create_task(self._acknowledge())
        return await waiter

    async def _acknowledge(self) -> None:
        """Let each waiting call of `committed` return when its rows are committed."""
        try:
            while self._waiters:
                waiters, self._waiters = self._waiters, []
                try:
                    position = await self.wait(self.barrier())
                except ComponentFailure as error:
                    for waiter in waiters:
                        if not waiter.done():
                            waiter.set_exception(error)
                else:
                    for waiter in waiters:
                        if not waiter.done():
                            waiter.set_result(position)
        finally:
            self._acknowledging = None

    def run(self, job: Job) -> Future[Any]:
        """Queue `job(connection)`; the writer thread runs it once everything queued is committed.

        Returns:
            A future of the job's result.

        Raises:
            ComponentFailure: The writer is closed or has failed.
        """
        future: Future[Any] = Future()
        with self._gathering() as pending:
            pending.jobs.append((job, future))
            self._urgent.set()
        return future

    async def wait(self, future: Future[T]) -> T:
        """Wait for the result of a barrier or a job, with a time limit; return the result.

        Raises:
            ComponentFailure: There is no result after `stall_seconds`, or the writer has failed.
        """
        try:
            # Before Python 3.12, `wait_for` may return a result although it was canceled.
            async with asyncio.timeout(self.stall_seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise ComponentFailure(
                f"trajectory store {self._path} committed nothing for {self.stall_seconds:g} s"
            ) from error

    def close(self) -> None:
        """Commit everything that is queued, and end the writer thread.

        Raises:
            ComponentFailure: The writer has failed, or the thread does not end within
                `stall_seconds`.
        """
        with self._changed:
            self._closing = True
            self._urgent.set()
            self._changed.notify()
        self._thread.join(self.stall_seconds)
        if self._thread.is_alive():
            raise ComponentFailure(
                f"the writer of trajectory store {self._path} did not end within "
                f"{self.stall_seconds:.0f} s"
            )
        if self._error is not None:
            raise self._failure() from self._error

    def _failure(self) -> ComponentFailure:
        assert self._error is not None
        return ComponentFailure(
            f"trajectory store {self._path} cannot be written: {reason(self._error)}"
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._failure() from self._error
        if self._closing:
            raise ComponentFailure(f"trajectory store {self._path} is closed")

    def _wait_for_space(self) -> None:
        has_space = self._changed.wait_for(
            lambda: self._pending.size < _MAX_PENDING_BYTES or self._error is not None,
            self.stall_seconds,
        )
        self._check()
        if not has_space:
            raise ComponentFailure(
                f"trajectory store {self._path} accepted no writes for "
                f"{self.stall_seconds:.0f} s; {self._pending.size >> 20} MiB are queued"
            )

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        pending = _Pending()
        try:
            with closing(schema.connect(self._path)) as connection:
                while (queued := self._pop_pending()) is not None:
                    pending = queued
                    self._commit(connection, pending)
                    for job, future in pending.jobs:
                        self._run_job(connection, job, future)
        except BaseException as error:  # noqa: BLE001 - The next call raises it.
            self._fail(error, pending)
        finally:
            self._lock.close()

    def _pop_pending(self) -> _Pending | None:
        """Wait until something is queued; return the queue and start a new, empty queue.

        Returns None if the writer is being closed and nothing is queued.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._pending.writes or self._pending.jobs
            )
        self._urgent.wait(_LINGER_SECONDS)
        with self._changed:
            self._urgent.clear()
            popped, self._pending = self._pending, _Pending()
            self._submitted += 1
            self._changed.notify_all()
            ended = self._closing and not (popped.writes or popped.jobs)
            return None if ended else popped

    def _commit(self, connection: sqlite3.Connection, pending: _Pending) -> None:
        number = self._submitted - 1
        if pending.writes:
            if pending.durable:
                connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            rows: dict[Kind, list[Row]] = {ChunkRow: pending.chunks}
            for (kind, _), row in pending.rows.items():
                rows.setdefault(kind, []).append(row)
            rows[ProgressRow] = [schema.with_checksum(ProgressRow(1, self.position + 1))]
            for kind in rows:
                schema.write_rows(connection, kind, rows[kind])
            for statement, parameters in pending.statements:
                connection.execute(statement, parameters)
            connection.execute("COMMIT")
            if pending.durable:
                connection.execute("PRAGMA synchronous=NORMAL")
            self.position += 1
        self._committed = number

    @staticmethod
    def _run_job(connection: sqlite3.Connection, job: Job, future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job(connection)
        except (OSError, schema.DamagedStore) as error:
            # The caller of the job gets every error. These errors concern only the job; any other
            # error also ends the writer.
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(result)

    def _fail(self, error: BaseException, pending: _Pending) -> None:
        with self._changed:
            self._error = error
            waiting = [*pending.jobs, *self._pending.jobs]
            self._changed.notify_all()
        for _, future in waiting:
            # A job that is not done was never started. Marking it as running keeps its caller from
            # canceling it before the exception is set, which would raise an error here.
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(self._failure())
