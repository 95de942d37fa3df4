"""Documents that a store keeps as JSON beside its rows: counters, and what has been exported."""

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
    """Rows of a table by key, checked. Raises DamagedStore or sqlite3.DatabaseError."""
    query = f"SELECT * FROM {schema.TABLES[kind]} WHERE {where} ORDER BY {kind._fields[0]}"
    for values in connection.execute(query, parameters):
        yield schema.opened(kind, values)


class Document:
    """A row of table `document`: a dataclass as JSON."""

    ID: ClassVar[int]

    def to_row(self) -> DocumentRow:
        """Return the row to store."""
        return DocumentRow(self.ID, json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Self | None:
        """Inverse of `to_row`. Raises DamagedStore or sqlite3.DatabaseError."""
        for row in read_rows(connection, DocumentRow, "id = ?", cls.ID):
            return TypeAdapter(cls).validate_json(row.content)
        return None


@dataclass
class Counters(Document):
    """Counts that outlive rows; written by the event loop's side.

    `prompts` is the number of prompts that have been read from the prompt source. It is smaller
    than `next_group` after a loss of groups, whose prompts are read again.
    """

    ID = 1
    next_group: int = 0
    next_trajectory: int = 0
    prompts: int = 0


@dataclass
class Exported(Document):
    """Tallies of what compaction removed; written together with the removal.

    `bytes` is the length of the export file then, `groups` are closed intervals of group ids, `at`
    are the checkpoints that could be restored then.
    """

    ID = 2
    bytes: int = 0
    batched: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    groups: list[tuple[int, int]] = field(default_factory=list)
    at: list[PolicyVersion] = field(default_factory=list)

    def with_groups(self, group_ids: Iterable[int]) -> list[tuple[int, int]]:
        """The intervals with these groups added."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.groups, *((g, g) for g in group_ids)]):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged
