"""A database of another format is refused, by runs and readers alike, and nothing in it changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.store import schema as schema
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from tests.trajectory.builders import REPLICA, STORE, scored_group


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [*connection.iterdump(), *map(str, connection.execute("PRAGMA user_version"))]


@pytest.mark.parametrize("version", [1, schema.FORMAT - 1, schema.FORMAT + 1])
@pytest.mark.parametrize(
    "open_",
    [lambda path: TrajectoryStore.open(path, lineage=1), StoreReader],
    ids=["run", "reader"],
)
async def test_another_format_is_refused_by_a_sentence_that_names_both(
    tmp_path: Path, version: int, open_: Callable[[Path], object]
) -> None:
    path = tmp_path / STORE

    store = TrajectoryStore.open(path)
    await scored_group(store)
    await store.close()
    (tmp_path / REPLICA).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = content(path)
    sentence = rf"has format {version}, and this version of megatron_async reads 7; go on"
    with pytest.raises(UserError, match=sentence):
        open_(path)
    assert content(path) == before
