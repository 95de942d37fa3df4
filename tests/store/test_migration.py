"""A store of format 4 to 6 goes on as one of today, and no row of its tokens changes.

`format_4.zip` is a run directory that the last code of format 4 wrote, and whose manager died:
compaction has exported groups 0 (batched at step 0) and 1 (dropped, `verifier`), before checkpoint
1. Groups 2 (batched at step 1), 3 (dropped, `verifier`), 4 (scored), 5, 6 and 7 (dropped, `stale`)
are in its database. Tokens are those of `tokens_of`.

`format_5.zip` is that of the last code of format 5: group 0 is exported, 1 batched at step 1, 2 is
scored, 3 finished and partial, 4 running and pending, 5 dropped (`scorer`). Trajectory 8 has a
further column.

`format_6.zip` is that of the last code of format 6: each of groups 0 (exported), 1, 2 and 3
(scored) has one response whose score failed, each in another way, and a part `form` of 0.5.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.store import migration as migration
from megatron_async.store.drop import drop_group_of
from megatron_async.store.export import find, summaries
from megatron_async.store.reader import StoreReader
from megatron_async.store.schema import FORMAT
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, PolicyVersion, Trajectory
from tests.store.test_formats import content
from tests.trajectory.builders import REPLICA, STORE, V0, append, expected, prompt, response

CHUNKS = (
    "SELECT chunk_id, trajectory_id, attempt, seq, segment, lineage, number, engine_id, "
    "environment, data, crc FROM chunks ORDER BY 1"
)
_BATCHED, _DROPPED, _SCORED = ["batched"] * 2, ["dropped scorer"] * 2, ["scored"] * 2
_REST = ["finished", "partial", "running", "pending", "running", "dropped stale"]
STATES = dict(enumerate([*_BATCHED, *_DROPPED, *_SCORED, *_REST], start=4))
"""As a reader has them; a writer has found what ran interrupted."""
TOKENS = {4: 20, 5: 20, 6: 12, 8: 20, 9: 20, 10: 20, 11: 17, 12: 11, 14: 10}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    shutil.unpack_archive(Path(__file__).with_name("format_4.zip"), tmp_path)
    return tmp_path / STORE


def asked(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def states(reader: StoreReader) -> dict[int, str]:
    return {
        s.trajectory_id: " ".join([s.state, *filter(None, [s.drop_reason])])
        for s in reader.summaries()
    }


def test_a_reader_finds_everything_and_changes_nothing(path: Path) -> None:
    before = content(path)
    with closing(StoreReader(path)) as reader:
        assert states(reader) == STATES
        assert {s.trajectory_id: s.tokens for s in reader.summaries() if s.tokens} == TOKENS
        for i, count in TOKENS.items():
            assert response(reader.trajectory(i)) == expected(i, count)
        exported = {s.trajectory_id: s.drop_reason for s in summaries(reader)}
        assert exported == {0: None, 1: None, 2: DropReason.SCORER, 3: DropReason.SCORER}
        assert response(find(reader, 1)) == expected(1, 20)
    assert content(path) == before


def test_a_resume_makes_it_one_of_today_and_goes_on(path: Path) -> None:
    chunks = asked(path, CHUNKS)

    async def scenario() -> list[Trajectory]:
        store = TrajectoryStore.open(path, lineage=1, step=1, parent=0)
        assert store.recovery is None
        counts = {name: count for name, count in store.counts().items() if count}
        assert counts == {
            "pending": 1, "partial": 3, "finished": 1, "scored": 4, "batched": 2, "dropped": 5
        }  # fmt: skip
        assert asked(path, CHUNKS) == chunks
        assert asked(path, "PRAGMA user_version") == [(FORMAT,)]
        assert not asked(path, "SELECT * FROM trajectories WHERE drop_reason = 'verifier'")
        [(tallies,)] = asked(path, "SELECT content FROM document WHERE id = 2")
        assert '"dropped": {"scorer": 2}' in str(tallies)
        store.begin_request(11)
        append(store, 11, 17, 3, PolicyVersion(1, 1))
        await store.sync()
        found = [store.load_trajectory(i) for i in STATES]
        store.mark_batched([2], 1)
        await store.sync(durable=True)
        await store.close()
        return found

    for trajectory in asyncio.run(scenario()):
        count = 20 if trajectory.trajectory_id == 11 else TOKENS.get(trajectory.trajectory_id, 0)
        assert response(trajectory) == expected(trajectory.trajectory_id, count)
    with closing(StoreReader(path)) as reader:
        assert states(reader)[6] == "dropped scorer"
        assert states(reader)[4] == "batched"


def test_a_second_open_finds_todays_format_and_migrates_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_group_of(path, 8, None)  # another one that opens it to write
    with closing(StoreReader(path)) as reader:
        assert states(reader) == {**STATES, 8: "dropped user", 9: "dropped user"}
    monkeypatch.setattr("megatron_async.store.recovery.migrate", pytest.fail)
    asyncio.run(TrajectoryStore.open(path, lineage=1, step=1, parent=0).close())


def test_a_process_that_dies_in_the_migration_leaves_format_4(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(path)

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(migration, "write_rows", die)
        with pytest.raises(KeyboardInterrupt):
            TrajectoryStore.open(path, lineage=1, step=1, parent=0)
    assert content(path) == before
    asyncio.run(TrajectoryStore.open(path, lineage=1, step=1, parent=0).close())
    assert asked(path, "PRAGMA user_version") == [(FORMAT,)]


def test_a_damaged_row_of_format_4_is_noticed_and_its_replica_migrated(path: Path) -> None:
    shutil.copy(path, path.with_name(REPLICA))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE trajectories SET reward = 7 WHERE trajectory_id = 6")

    async def scenario() -> str:
        store = TrajectoryStore.open(path, lineage=1, step=1, parent=0)
        assert store.counts()["dropped"] == 5
        await store.close()
        assert store.recovery is not None
        return store.recovery.sentence

    sentence = asyncio.run(scenario())
    assert "a row of table trajectories does not have its checksum (key 6)" in sentence
    assert "its replica takes its place" in sentence
    assert asked(path, "PRAGMA user_version") == [(FORMAT,)]


def test_chunks_of_today_are_those_of_format_4(path: Path, tmp_path: Path) -> None:
    """The same calls write the same bytes, checksum included."""

    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / "new" / STORE)
        for _ in range(9):
            store.add_group(prompt(), 1)
        store.begin_request(8)
        append(store, 8, 0, 20, V0)
        store.flush()
        await store.sync()
        await store.close()

    asyncio.run(scenario())
    mine = asked(tmp_path / "new" / STORE, CHUNKS)
    assert [row[1:] for row in mine] == [row[1:] for row in asked(path, CHUNKS) if row[1] == 8]


@pytest.fixture
def path_5(tmp_path: Path) -> Path:
    shutil.unpack_archive(Path(__file__).with_name("format_5.zip"), tmp_path)
    return tmp_path / STORE


_STATES_5 = [*_BATCHED, *_SCORED, "finished", "partial", "running", "pending", *_DROPPED]
STATES_5 = dict(enumerate(_STATES_5, start=2))
TOKENS_5 = {2: 20, 3: 20, 4: 12, 5: 12, 6: 20, 7: 9, 8: 11}


def test_a_reader_of_format_5_finds_no_turns_and_changes_nothing(path_5: Path) -> None:
    before = content(path_5)
    with closing(StoreReader(path_5)) as reader:
        assert states(reader) == STATES_5
        for i, count in TOKENS_5.items():
            found = reader.trajectory(i)
            assert response(found) == expected(i, count)
            assert found.turns == ()
        assert response(find(reader, 0)) == expected(0, 20)
    assert content(path_5) == before


def test_a_resume_makes_format_5_one_of_today_that_holds_episodes(path_5: Path) -> None:
    chunks = asked(path_5, CHUNKS)

    async def scenario() -> Trajectory:
        store = TrajectoryStore.open(path_5, lineage=1, step=1, parent=0)
        assert store.recovery is None
        assert asked(path_5, CHUNKS) == chunks
        assert asked(path_5, "PRAGMA user_version") == [(FORMAT,)]
        assert store.load_trajectory(8).segments[0].columns[0]["routes"][:, 1, 1].tolist() == [
            *range(11)
        ]
        store.episodes.begin_turn(store.episodes.begin_step(9), [1, 2], [], parent=None)
        await store.sync()
        found = store.load_trajectory(9)
        await store.close()
        return found

    assert len(asyncio.run(scenario()).turns) == 1
    with closing(StoreReader(path_5)) as reader:
        assert states(reader)[9] == "waiting"


FAILED = ("scorer_error", "scorer_timeout", "scorer_crash", "scorer_unavailable")
PARTS = {i: {"form": 0.5, name: 1.0} for i, name in enumerate(FAILED)}


def test_failures_of_scores_in_format_6_are_read_by_todays_names(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).with_name("format_6.zip"), tmp_path)
    path = tmp_path / STORE
    before = content(path)
    with closing(StoreReader(path)) as reader:
        assert {i: find(reader, i).reward_detail for i in PARTS} == PARTS
    assert content(path) == before

    async def scenario() -> dict[int, dict[str, float]]:
        store = TrajectoryStore.open(path, lineage=1, step=1, parent=0)
        assert asked(path, "PRAGMA user_version") == [(FORMAT,)], "an earlier version refuses it"
        found = {i: store.load_trajectory(i).reward_detail for i in (1, 2, 3)}
        await store.close()
        return found

    assert asyncio.run(scenario()) == {i: PARTS[i] for i in (1, 2, 3)}
