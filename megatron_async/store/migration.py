"""A store of format 4 to 6 becomes one of today's when it is opened to be written.

Format 7 has other names of the parts of a reward that count a failure; older rows and exports keep
theirs, and `parts_of_today` reads them. Format 6 has the turns of episodes, which nothing older
has. Format 5 has the further columns of a chunk, and calls the drop reason `verifier` `scorer`.

Invariants
- One transaction: a process that dies in it leaves the store as it was. (A table that is only
  missing is made at each opening.)
- No row of tokens is written: chunks without further columns are as they were.
"""

import sqlite3

from megatron_async.store import schema as schema
from megatron_async.store.reader import read_rows
from megatron_async.store.schema import DocumentRow, TrajectoryRow, sealed, write_rows


def migrate(connection: sqlite3.Connection, found: int) -> None:
    """Bring a store of format `found` to today's. Raises DamagedStore."""
    with connection:  # commits, or rolls back what an error has stopped
        connection.execute("BEGIN IMMEDIATE")
        if found == 4:
            connection.execute("ALTER TABLE chunks ADD COLUMN columns TEXT")
            for row in list(read_rows(connection, TrajectoryRow, "drop_reason = 'verifier'")):
                write_rows(connection, TrajectoryRow, [sealed(row._replace(drop_reason="scorer"))])
            for document in list(read_rows(connection, DocumentRow)):  # one has tallies by reason
                content = document.content.replace('"verifier"', '"scorer"')
                write_rows(connection, DocumentRow, [sealed(document._replace(content=content))])
        connection.execute(f"PRAGMA user_version={schema.FORMAT}")
