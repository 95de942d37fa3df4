"""Provides the JSON documents of a store: the counters of used ids, and the totals of the export.

Each document is a dataclass that is stored as one row of the table `document`.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

from pydantic import TypeAdapter

from megatron_async.store import schema as schema
from megatron_async.store.schema import DocumentRow, R
from megatron_async.trajectory.types import PolicyVersion


def read_rows(
    connection: sqlite3.Connection, kind: type[R], where: str = "true", *parameters: int
) -> Iterator[R]:
    """Yield the rows of the table of row class `kind` in ascending order of their keys.

    Args:
        connection: The database.
        kind: Row class, which determines the table.
        where: SQL condition that selects the rows; all rows by default.
        parameters: Values of the `?` in `where`.

    Raises:
        DamagedStore: The checksum of a row is wrong.
        sqlite3.DatabaseError: SQLite cannot read the file.
    """
    query = f"SELECT * FROM {schema.TABLES[kind]} WHERE {where} ORDER BY {kind._fields[0]}"
    for values in connection.execute(query, parameters):
        yield schema.opened(kind, values)


class Document:
    """Base of dataclasses that are stored as JSON in one row of the store's table `document`.

    `ID` is the key of the row.
    """

    ID: ClassVar[int]

    def to_row(self) -> DocumentRow:
        """Return the row of table `document` that holds this document's fields as JSON."""
        return DocumentRow(self.ID, json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Self | None:
        """Read this class's document from the database; return None if the database has none.

        Raises:
            DamagedStore: The checksum of the document's row is wrong.
            sqlite3.DatabaseError: SQLite cannot read the file.
        """
        for row in read_rows(connection, DocumentRow, "id = ?", cls.ID):
            return TypeAdapter(cls).validate_json(row.content)
        return None


@dataclass
class Counters(Document):
    """The store's counters of used ids and read prompts, which survive the removal of rows.

    They change when groups are added, on the thread of the event loop. If a replica or an empty
    store replaces the database, they also advance past the ids of the lost groups.

    Attributes:
        next_group: The id that the next new group gets.
        next_trajectory: The id that the next new trajectory gets.
        prompts: Number of prompts read from the prompt source. It is smaller than `next_group`
            after groups were lost, since their prompts are read again for new groups.
    """

    ID = 1
    next_group: int = 0
    next_trajectory: int = 0
    prompts: int = 0


@dataclass
class Exported(Document):
    """Totals of everything that compaction has removed from the database of a store.

    They are written in the same transaction as each removal.

    Attributes:
        bytes: Committed length of the export file; 0 if nothing was exported.
        batched: Number of removed trajectories that were consumed, which means that weights were
            trained on their batches. When they were removed, this was true for the weights of every
            checkpoint that could be restored.
        dropped: Number of removed trajectories that were dropped, by reason.
        groups: Ids of the removed groups, as closed intervals in ascending order.
        at: The checkpoints that could be restored when consumed trajectories were last removed.
    """

    ID = 2
    bytes: int = 0
    batched: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    groups: list[tuple[int, int]] = field(default_factory=list)
    at: list[PolicyVersion] = field(default_factory=list)

    def with_groups(self, group_ids: Iterable[int]) -> list[tuple[int, int]]:
        """Return `groups`, the intervals of removed group ids, with `group_ids` added.

        Adjacent intervals are merged. This object is not changed.
        """
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.groups, *((g, g) for g in group_ids)]):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged
