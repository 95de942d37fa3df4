"""Files of the format before priorities: read as they are, brought up to date by a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.store import schema as schema
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, Group
from tests.trajectory.builders import REPLICA, STORE, expected, prompt, response, scored_group

FORMAT_1_GROUPS = (
    "group_id INTEGER PRIMARY KEY, first_trajectory INTEGER, size INTEGER, task TEXT, "
    "payload TEXT, token_ids BLOB, crc INTEGER"
)


@contextmanager
def opened(path: Path, lineage: int = 0) -> Iterator[TrajectoryStore]:
    store = TrajectoryStore.open(path, lineage=lineage)
    try:
        yield store
    finally:
        asyncio.run(store.close())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Three scored groups of two, as the former program left them."""
    path = tmp_path / STORE

    async def scenario() -> None:
        store = TrajectoryStore.open(path)
        for _ in range(3):
            await scored_group(store)
        await store.close()

    asyncio.run(scenario())
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM groups").fetchall()
        connection.execute("DROP TABLE groups")
        connection.execute(f"CREATE TABLE groups ({FORMAT_1_GROUPS})")
        for group_id, first, size, task, payload, _, token_ids, _ in rows:
            row = schema.sealed("groups", (group_id, first, size, task, payload, token_ids))
            connection.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    return path


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check(groups: list[Group]) -> None:
    assert [group.group_id for group in groups] == [0, 1, 2]
    for group in groups:
        assert group.prompt.priority == 0
        assert group.prompt.payload == prompt().payload
        assert group.prompt.token_ids.tolist() == prompt().token_ids.tolist()
        for trajectory in group.trajectories:
            assert response(trajectory) == expected(trajectory.trajectory_id, 100)


def test_a_priority_is_kept_with_its_group(tmp_path: Path) -> None:
    with opened(tmp_path / STORE) as store:
        for priority in (0, -3, 7):
            group = store.add_group(replace(prompt(), priority=priority), 1)
            assert group.prompt.priority == priority
    with opened(tmp_path / STORE, lineage=1) as store:
        assert [g.prompt.priority for g in store.unconsumed_groups()] == [0, -3, 7]
    with closing(StoreReader(tmp_path / STORE)) as reader:
        assert reader.trajectory(2).prompt.priority == 7


def test_an_old_file_is_listed_without_being_changed(old: Path) -> None:
    with closing(StoreReader(old)) as reader:
        assert len(reader.summaries()) == 6
        assert response(reader.trajectory(5)) == expected(5, 100)
    assert version_of(old) == 1


def test_a_run_goes_on_with_an_old_file_and_loses_nothing(old: Path) -> None:
    with opened(old, lineage=1) as store:
        assert store.recovery is None
        check(store.unconsumed_groups())
        store.add_group(replace(prompt(), priority=4), 1)
    assert version_of(old) == schema.FORMAT
    with opened(old, lineage=2) as store:
        *others, newest = store.unconsumed_groups()
        check(others)
        assert newest.prompt.priority == 4


def test_a_damaged_prompt_in_an_old_file_is_found_before_it_is_rewritten(old: Path) -> None:
    shutil.copy(old, old.with_name(REPLICA))
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("UPDATE groups SET payload = '{}' WHERE group_id = 1")
        connection.commit()
    with opened(old, lineage=1) as store:
        assert store.recovery is not None
        assert "a row of table groups does not have its checksum" in store.recovery.sentence
        check(store.unconsumed_groups())
    assert version_of(old) == schema.FORMAT
    assert version_of(old.with_name(REPLICA)) == 1, "a replica never changes"


def test_a_file_whose_counters_do_not_count_prompts_goes_on_with_its_groups(tmp_path: Path) -> None:
    path = tmp_path / STORE
    with opened(path) as store:
        for _ in range(3):
            store.add_group(prompt(), 2)
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT content FROM document WHERE id = 1").fetchone()[0]
        counters = json.loads(found)
        del counters["prompts"]
        row = schema.sealed("document", (1, json.dumps(counters)))
        connection.execute("REPLACE INTO document VALUES (?, ?, ?)", row)
        connection.execute("PRAGMA user_version = 3")
        connection.commit()
    with opened(path, lineage=1) as store:
        assert store.prompts_read == 3
    assert version_of(path) == schema.FORMAT


def test_a_file_from_before_refused_prompts_is_marked_when_it_may_hold_them(tmp_path: Path) -> None:
    """The program that wrote it does not know the drop reason, and refuses the file by number."""
    with opened(tmp_path / STORE):
        pass
    with closing(sqlite3.connect(tmp_path / STORE)) as connection:
        connection.execute("PRAGMA user_version = 2")
    with opened(tmp_path / STORE, lineage=1) as store:
        assert store.recovery is None
        (trajectory,) = store.add_group(prompt(), 1).trajectories
        store.drop(trajectory.trajectory_id, DropReason.REFUSED)
    assert version_of(tmp_path / STORE) == schema.FORMAT
    with opened(tmp_path / STORE, lineage=2) as store:
        assert store.load_trajectory(0).drop_reason is DropReason.REFUSED


def test_a_format_of_the_future_is_refused_by_number(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA user_version = 5")
    with pytest.raises(UserError, match=r"has format 5, this version reads formats 1 to 4"):
        TrajectoryStore.open(old, lineage=1)
