"""Where the trajectory store's database can lie when the run directory is on a shared file system.

    python -m benchmarks.store_places --shared DIR [--other DIR] [--server PID] [--local DIR]
        [--out benchmarks/results/store_places.md]

`--shared` is a directory of a network file system, `--other` the same one as another node sees it
(a second mount), `--server` the process that serves it, which is stopped for five seconds to see
who waits. Bare SQLite with the store's rows and settings, in three forms:
- shared, WAL: the log's memory is shared through the network file system.
- shared, exclusive WAL: one process has the file, the log's memory is its own.
- local + replica: WAL on a local disk, and a copy of the file to the shared one at a checkpoint.

Columns: tokens per second in chunks of 64, 64 chunks a transaction; the commit of one transaction
that is forced to disk (the emission of a batch), median and longest of 50; the longest of ordinary
commits while the server stands still; what a reader on the other node sees; for the replica, the
seconds that it takes and the longest commit meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.command import command_line
from benchmarks.papers.report import table
from megatron_async.files.mounts import file_system_of
from megatron_async.store import schema as schema
from megatron_async.store.recovery import copy_database

_CHUNK, _AT_ONCE = 64, 64
_STALL_SECONDS = 5.0


def open_database(path: Path, *, exclusive: bool) -> sqlite3.Connection:
    """With the store's tables."""
    if not exclusive:
        connection = schema.connect(path)
    else:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute(f"PRAGMA page_size={schema.PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
    schema.create_tables(connection)
    return connection


@dataclass
class Writer:
    """Commits transactions of 64 chunks."""

    connection: sqlite3.Connection
    committed: int = 0
    longest: float = 0.0
    _data: bytes = field(default_factory=lambda: os.urandom(8 * _CHUNK))

    def commit(self, *, durable: bool = False) -> float:
        """Seconds that it took."""
        rows = [
            schema.sealed(
                schema.ChunkRow(i, 0, self.committed, 0, 0, 0, "engine-0", 0, None, self._data)
            )
            for i in range(_AT_ONCE)
        ]
        before = time.perf_counter()
        self.connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self.connection.execute("BEGIN IMMEDIATE")
        schema.write_rows(self.connection, schema.ChunkRow, rows)
        self.connection.execute("COMMIT")
        took = time.perf_counter() - before
        self.committed += 1
        self.longest = max(self.longest, took)
        return took

    def until(self, end: threading.Event) -> float:
        """Commit every 10 ms; the longest one, in seconds."""
        self.longest = 0.0
        while not end.is_set():
            self.commit()
            time.sleep(0.01)
        return self.longest


def while_server_stands_still(writer: Writer, server: int) -> float:
    """The longest commit, seconds."""
    end = threading.Event()

    def stop() -> None:
        time.sleep(0.5)
        os.kill(server, signal.SIGSTOP)
        time.sleep(_STALL_SECONDS)
        os.kill(server, signal.SIGCONT)
        time.sleep(0.5)
        end.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    longest = writer.until(end)
    stopping.join()
    return longest


def seen_elsewhere(file: Path, shared: Path, other: Path, *, replica: bool) -> str:
    """What a reader of another node finds in a file of the shared directory."""
    place = other / file.relative_to(shared)
    try:
        with closing(schema.connect(place, read_only=True, immutable=replica)) as connection:
            connection.execute("PRAGMA busy_timeout=2000")
            count = connection.execute("SELECT count(*) FROM chunks").fetchone()[0]
            return f"{count // _AT_ONCE} transactions"
    except sqlite3.Error as error:
        return str(error)


def measure(
    form: str, shared: Path, local: Path, other: Path | None, server: int | None, count: int
) -> list[str]:
    """One line of the table."""
    replica = shared / "replica.sqlite" if form == "local + replica" else None
    file = (shared if replica is None else local) / f"{form.replace(' ', '-')}.sqlite"
    with closing(open_database(file, exclusive="exclusive" in form)) as connection:
        writer = Writer(connection)
        before = time.perf_counter()
        for _ in range(count):
            writer.commit()
        rate = count * _AT_ONCE * _CHUNK / (time.perf_counter() - before) / 1e6
        durable = [writer.commit(durable=True) * 1e3 for _ in range(50)]
        copy = ""
        if replica is not None:
            end, longest = threading.Event(), [0.0]
            writing = threading.Thread(target=lambda: longest.append(writer.until(end)))
            writing.start()
            before = time.perf_counter()
            copy_database(file, replica)
            took = time.perf_counter() - before
            end.set()
            writing.join()
            size = replica.stat().st_size / 2**20
            copy = f"{took:.1f} s for {size:.0f} MiB, longest commit {longest[-1] * 1e3:.0f} ms"
        seen = ""
        if other is not None:
            at = f"of {writer.committed}"
            seen = f"{seen_elsewhere(replica or file, shared, other, replica=bool(replica))} {at}"
        stall = "" if server is None else f"{while_server_stands_still(writer, server):.1f} s"
    forced = f"{np.median(durable):.1f} ms, longest {max(durable):.0f} ms"
    return [form, f"{rate:.2f} M/s", forced, stall, seen, copy]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--server", type=int)
    parser.add_argument("--local", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--transactions", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(dir=given.local) as local,
        tempfile.TemporaryDirectory(dir=given.shared) as shared,
    ):
        other = None if given.other is None else given.other / Path(shared).name
        for form in ("shared, WAL", "shared, exclusive WAL", "local + replica"):
            places = Path(shared), Path(local), other
            rows.append(measure(form, *places, given.server, given.transactions))
    head = ("form", "append", "forced commit", "server stops 5 s", "other node sees", "replica")
    text = table(head, rows)
    print(text)
    if given.out is not None:
        made = f"`{command_line('benchmarks.store_places')}`, {datetime.date.today()}"
        where = f"shared: {file_system_of(given.shared).kind}, local: "
        where += file_system_of(given.local).kind
        given.out.write_text(f"# Places of the store\n\n{made}; {where}\n\n{text}\n")


if __name__ == "__main__":
    main()
