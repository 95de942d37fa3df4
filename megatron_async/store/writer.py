"""The one thread that writes the store: it turns what the event loop hands over into transactions.

Invariants
- What is handed over between two swaps becomes one transaction, all of it or nothing, in order.
- The event loop never waits for the disk: it appends to a list in memory. Only when
  `_MOST_PENDING_BYTES` are waiting does it block, for `stall_seconds` at most.
- The first error ends the thread; it is raised at the next call and by every barrier and job that
  still waits, and nothing is written after it.
- A barrier is done when everything handed over before it is committed (and, if `durable`, on disk).
- The store's lock is released by the thread, after its last write: while it lives, and be it in an
  fsync that hangs, nobody else writes.
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

_LINGER_SECONDS = 0.005  # gathers small writes into one transaction when nobody waits for it
_MOST_PENDING_BYTES = 64 * 1024 * 1024
_STALL_SECONDS = 60.0
Job = Callable[[sqlite3.Connection], Any]
T = TypeVar("T")


@dataclass
class _Pending:
    """A future transaction."""

    chunks: list[Row] = field(default_factory=list)
    rows: dict[tuple[Kind, int], Row] = field(default_factory=dict)
    statements: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    jobs: list[tuple[Job, Future[Any]]] = field(default_factory=list)
    size: int = 0
    durable: bool = False

    @property
    def writes(self) -> bool:
        return bool(self.chunks or self.rows or self.statements or self.durable)


class StoreWriter:
    """Owns the only connection that writes. All methods are called from one other thread."""

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
        self._submitted = 1  # number of the transaction being gathered
        self._committed = 0
        self._waiters: list[asyncio.Future[int]] = []
        self._acknowledging: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="trajectory-store", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called by the event loop

    @property
    def lost(self) -> bool:
        """Somebody has removed or replaced the database: what is written ends with the process."""
        return not leads_to(self._path, self._file)

    def share_lock(self) -> FileLock:
        """The store stays locked until this is closed too. For who writes beside it."""
        with self._changed:
            self._check()
            return self._lock.share()

    @contextmanager
    def _gathering(self) -> Iterator[_Pending]:
        """Gather what is handed over inside for one transaction, number `_submitted`."""
        with self._changed:
            self._check()
            yield self._pending
            self._changed.notify()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all that is handed over inside one transaction; a chunk goes first."""
        with self._gathering():
            yield

    def add_chunk(self, chunk: ChunkRow, trajectory: TrajectoryRow | None = None) -> int:
        """Append a chunk; returns the number of the transaction that it will be in.

        The same one holds `trajectory`, its row of that table, if it is given.
        """
        row = schema.sealed(chunk)
        with self._gathering():
            self._wait_for_room()  # which lets go of what is gathered: nothing may be before it
            self._pending.chunks.append(row)
            self._pending.size += len(chunk.data)
            if trajectory is not None:
                self.put(trajectory)
            return self._submitted

    def put(self, row: NamedTuple) -> None:
        """Write a row whole; the last one of a key wins."""
        values = schema.sealed(row)
        with self._gathering() as pending:
            pending.rows[type(row), row[0]] = values
            pending.size += 64

    def execute(self, statement: str, parameters: tuple[Any, ...]) -> None:
        """A deletion, after all rows of the transaction."""
        with self._gathering() as pending:
            pending.statements.append((statement, parameters))

    def is_committed(self, transaction: int) -> bool:
        """Return whether it is in the file. Raises ComponentFailure after an error."""
        self._check()
        return transaction <= self._committed

    def barrier(self, *, durable: bool = False) -> Future[int]:
        """Done, with the position, when all before is committed; `durable`: survives power loss."""
        with self._gathering() as pending:
            pending.durable |= durable
            return self.run(lambda _: self.position)

    async def committed(self) -> int:
        """The position, once all handed over so far is committed. Raises ComponentFailure.

        Whoever asks while a barrier is under way shares the next one: thousands of streams cost one
        acknowledgement for each transaction.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[int] = loop.create_future()
        self._waiters.append(waiter)
        if self._acknowledging is None:
            self._acknowledging = loop.create_task(self._acknowledge())
        return await waiter

    async def _acknowledge(self) -> None:
        """Await one barrier after the other while somebody waits."""
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
        """Run `job(connection)` on the writer's thread, after all before is committed."""
        future: Future[Any] = Future()
        with self._gathering() as pending:
            pending.jobs.append((job, future))
            self._urgent.set()
        return future

    async def wait(self, future: Future[T]) -> T:
        """The result of a barrier or a job. Raises ComponentFailure after `stall_seconds`."""
        try:
            # Not `wait_for`: until Python 3.12 it may give a result although it is canceled.
            async with asyncio.timeout(self.stall_seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise ComponentFailure(
                f"trajectory store {self._path} committed nothing for {self.stall_seconds:g} s"
            ) from error

    def close(self) -> None:
        """Commit what waits, end the thread. Raises ComponentFailure if it had failed."""
        with self._changed:
            self._closing = True
            self._urgent.set()
            self._changed.notify()
        self._thread.join(self.stall_seconds)
        if self._thread.is_alive():
            raise ComponentFailure(
                f"the writer of {self._path} did not end within {self.stall_seconds:.0f} s"
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

    def _wait_for_room(self) -> None:
        roomy = self._changed.wait_for(
            lambda: self._pending.size < _MOST_PENDING_BYTES or self._error is not None,
            self.stall_seconds,
        )
        self._check()
        if not roomy:
            raise ComponentFailure(
                f"trajectory store {self._path} took nothing for {self.stall_seconds:.0f} s "
                f"with {self._pending.size >> 20} MiB waiting"
            )

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        pending = _Pending()
        try:
            with closing(schema.connect(self._path)) as connection:
                while (taken := self._take()) is not None:
                    pending = taken
                    self._commit(connection, pending)
                    for job, future in pending.jobs:
                        self._run_job(connection, job, future)
        except BaseException as error:  # noqa: BLE001 - kept, and raised at the next call
            self._fail(error, pending)
        finally:
            self._lock.close()

    def _take(self) -> _Pending | None:
        """Take what has gathered; None when closing and empty."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._pending.writes or self._pending.jobs
            )
        self._urgent.wait(_LINGER_SECONDS)
        with self._changed:
            self._urgent.clear()
            taken, self._pending = self._pending, _Pending()
            self._submitted += 1
            self._changed.notify_all()
            ended = self._closing and not (taken.writes or taken.jobs)
            return None if ended else taken

    def _commit(self, connection: sqlite3.Connection, pending: _Pending) -> None:
        number = self._submitted - 1
        if pending.writes:
            if pending.durable:
                connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            rows: dict[Kind, list[Row]] = {ChunkRow: pending.chunks}
            for (kind, _), row in pending.rows.items():
                rows.setdefault(kind, []).append(row)
            rows[ProgressRow] = [schema.sealed(ProgressRow(1, self.position + 1))]
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
        except (OSError, schema.DamagedStore) as error:  # its caller's business, not the store's
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
            # What is not done was never begun, and its waiter may give it up at any moment.
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(self._failure())
