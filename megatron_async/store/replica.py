"""Copies of a store's database: the replica in the run directory, and what is made of it.

Invariants
- A copy is one moment of its source, whatever is written meanwhile; it has its name only when it is
  complete and on disk.
- A replica never changes: it is opened as immutable, which takes neither locks nor shared memory,
  so that it can be read on any file system from any node.
- One copy at a time, on a thread and a connection of its own: commits do not wait for it. A copy
  that is still being written keeps the store locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from megatron_async.disk import force_to_disk, replace_durably
from megatron_async.errors import ComponentFailure
from megatron_async.file_lock import FileLock
from megatron_async.store import schema as schema
from megatron_async.store.place import StorePlace, write_record
from megatron_async.store.writer import StoreWriter

logger = logging.getLogger(__name__)
_PAGES_AT_ONCE = 1024  # 8 MiB
_PART = ".part-"


class Copying:
    """A copy under way; `progress` grows while it comes on."""

    def __init__(self, source: Path, target: Path, *, from_replica: bool = False) -> None:
        self._source, self._target, self._immutable = source, target, from_replica
        self._part = target.with_name(f"{target.name}{_PART}{secrets.token_hex(4)}")
        self.progress = 0

    def run(self) -> None:
        """Raises OSError, sqlite3.Error."""
        try:
            self._copy()
            replace_durably(self._part, self._target)
        finally:
            self._part.unlink(missing_ok=True)

    def _copy(self) -> None:
        # No locks: nobody else opens the file yet, and its file system may have none.
        writing = f"{self._part.absolute().as_uri()}?vfs=unix-none"
        with (
            closing(
                schema.connect(self._source, read_only=True, immutable=self._immutable)
            ) as connection,
            closing(sqlite3.connect(writing, uri=True, isolation_level=None)) as sink,
        ):
            sink.execute("PRAGMA journal_mode=OFF")
            sink.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the moment
            connection.backup(sink, pages=_PAGES_AT_ONCE, progress=self._come_on)

    def _come_on(self, status: int, remaining: int, total: int) -> None:
        """Disk pace: else the last step would force all of it to disk at once."""
        force_to_disk(self._part)
        self.progress += 1


def copy_database(source: Path, target: Path, *, from_replica: bool = False) -> None:
    """Raises OSError, sqlite3.Error."""
    if not source.exists():
        raise FileNotFoundError(source)
    _remove_parts(target)
    Copying(source, target, from_replica=from_replica).run()


def _remove_parts(target: Path) -> None:
    """Remove what a killed process had copied. The store is locked: no copy is under way."""
    for part in target.parent.glob(f"{target.name}{_PART}*"):
        with contextlib.suppress(OSError):
            part.unlink()


class Replicator:
    """Keeps the replica of an open store. One that fails is reported, and costs no run."""

    def __init__(self, place: StorePlace, writer: StoreWriter, lineage: int) -> None:
        self._place, self._writer, self._lineage = place, writer, lineage
        self._task: asyncio.Task[bool] | None = None
        self._again = False
        self._complete_at: int | None = None
        self._lock: FileLock | None = None
        _remove_parts(place.replica)

    def start(self) -> None:
        """Begin a copy of what is committed, or another one after the one that runs."""
        if self._task is not None and not self._task.done():
            self._again = True
        else:
            self._task = asyncio.create_task(self._replicate())

    async def last(self) -> None:
        """Before the writer ends: the replica gets all that the database has."""
        await self.finish()
        try:
            self._lock = self._writer.share_lock()  # until `leave` has removed the database
            position = await self._writer.wait(self._writer.barrier())
        except ComponentFailure:  # it is raised where the writer is closed
            return
        self.start()
        if await self.finish():
            self._complete_at = position

    def leave(self) -> None:
        """After the writer has ended: remove what the replica holds all of. Raises OSError."""
        if self._lock is None:
            return
        with closing(self._lock):
            if self._complete_at is not None:
                write_record(self._place, self._lineage, self._complete_at)
                for file in schema.files_of(self._place.file):
                    file.unlink(missing_ok=True)

    async def finish(self) -> bool:
        """Wait for the copy that runs, if any; False when it has failed."""
        task, self._task = self._task, None
        return True if task is None else await task

    async def _replicate(self) -> bool:
        good = self._again = True
        while self._again:
            self._again = False
            try:
                await self._copy()
                good = True
            except (OSError, sqlite3.Error, ComponentFailure) as error:
                good = False
                logger.warning(
                    "replica %s of the trajectory store cannot be written, the one before it "
                    "stays: %s",
                    self._place.replica,
                    error,
                )
        return good

    async def _copy(self) -> None:
        copying, lock = Copying(self._place.file, self._place.replica), self._writer.share_lock()

        def work() -> None:
            with closing(lock):
                copying.run()

        done = asyncio.ensure_future(asyncio.to_thread(work))
        limit, before = self._writer.stall_seconds, -1
        while not done.done():
            if copying.progress == before:
                raise ComponentFailure(f"nothing was written for {limit:g} s")
            before = copying.progress
            await asyncio.wait({done}, timeout=limit)
        await done
