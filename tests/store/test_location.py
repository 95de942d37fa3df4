"""Where a run's store lies: on a disk of the manager's node, with a replica for everybody else."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.files import mounts
from megatron_async.store.drop import drop_group_of
from megatron_async.store.location import check_location, location_of_writer, make_folder
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import Group, PolicyVersion
from tests.store.disk import needs_compiler, without
from tests.trajectory.builders import (
    REPLICA,
    STORE,
    append,
    expected,
    prompt,
    response,
    scored_group,
)


class Cluster:
    """Nodes with a disk each and a run directory that they share, on one machine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch, self.node = folder, monkeypatch, ""
        self.run = folder / "lustre" / "run"
        self.run.mkdir(parents=True)
        self.store = self.run / STORE
        self.kinds = {"/": "ext4", str(folder / "lustre"): "lustre"}
        monkeypatch.setattr(
            mounts.psutil,
            "disk_partitions",
            lambda all: [SimpleNamespace(mountpoint=m, fstype=k) for m, k in self.kinds.items()],
        )
        self.enter("a")

    def enter(self, node: str) -> None:
        """From now on this process is on `node`, which sees no other node's disk."""
        disk = self.folder / "disk"
        if self.node:
            disk.rename(self.folder / f"disk-of-{self.node}")
        if (own := self.folder / f"disk-of-{node}").exists():
            own.rename(disk)
        disk.mkdir(exist_ok=True)
        self.node = node
        self._patch.setattr(socket, "gethostname", lambda: node)
        self._patch.setattr(tempfile, "tempdir", str(disk))

    def database(self) -> Path:
        return location_of_writer(self.store, "").file


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    yield Cluster(tmp_path, monkeypatch)


def offered(store: TrajectoryStore) -> list[int]:
    return [group.group_id for group in store.unconsumed_groups()]


async def replicated(store: TrajectoryStore) -> int:
    """The position of a checkpoint, whose replica is complete."""
    position = await store.sync(durable=True)
    store.replicate()
    await store._replicator.finish()
    return position


async def killed(store: TrajectoryStore) -> None:
    """The process is gone: nothing is written any more, and the kernel releases the lock."""
    store._writer.close()


async def two_steps(store: TrajectoryStore) -> int:
    """Batch 0, a checkpoint with its replica, batch 1 (groups 0 and 1), group 2 scored, 3 partial.

    Returns the checkpoint's position.
    """
    groups = [await scored_group(store) for _ in range(3)]
    store.mark_batched([groups[0].group_id], 0)
    position = await replicated(store)
    store.mark_batched([groups[1].group_id], 1)
    partial: Group = store.add_group(prompt(), 1)
    store.begin_request(partial.trajectories[0].trajectory_id)
    append(store, partial.trajectories[0].trajectory_id, 0, 70)
    await store.sync(durable=True)
    return position


async def test_a_shared_run_directory_has_its_database_on_the_managers_node(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    await scored_group(store)
    await replicated(store)
    assert cluster.database().is_relative_to(cluster.folder / "disk")
    assert cluster.database().exists()
    assert sorted(path.name for path in cluster.run.iterdir()) == [
        "store.json",
        REPLICA,
    ]
    await store.close(leave=True)


async def test_store_directory_sets_where_the_database_lies(cluster: Cluster) -> None:
    scratch = cluster.folder / "scratch"
    settings = StoreConfig(directory=str(scratch))
    store = TrajectoryStore.open(cluster.store, settings)
    await scored_group(store)
    (database,) = scratch.glob(f"*/{STORE}")
    assert database.parent.name.startswith("run-"), "runs may share the directory"
    with closing(StoreReader(cluster.store)) as reader:
        assert len(reader.summaries()) == 2
        assert reader.note == ""
    await store.close(leave=True)


def test_without_any_local_disk_both_file_systems_are_named(cluster: Cluster) -> None:
    cluster.kinds[str(cluster.folder)] = "nfs4"
    with pytest.raises(UserError, match=r"is on lustre .* on nfs4 .*: set store.directory to a"):
        check_location(location_of_writer(cluster.store, ""))
    assert list(cluster.run.iterdir()) == []


@pytest.mark.parametrize(
    ("of_run", "of_temporary", "where", "warned"),
    [
        ("9p", "9p", "run", True),
        ("virtiofs", "ext4", "temporary", False),
        ("unknown", "nfs4", "run", True),
        ("fuse.fuse-overlayfs", "fuse.fuse-overlayfs", "run", False),
        ("lustre", "unknown", "temporary", True),
        ("fuse.anything", "tmpfs", "temporary", False),
    ],
)
def test_a_file_system_of_an_unknown_kind_is_used_with_a_warning_when_no_local_one_exists(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    of_run: str,
    of_temporary: str,
    where: str,
    warned: bool,
) -> None:
    cluster.kinds = {str(cluster.folder): of_temporary, str(cluster.run.parent): of_run}
    location = location_of_writer(cluster.store, "")
    assert location.file.is_relative_to(cluster.run if where == "run" else cluster.folder / "disk")
    check_location(location)
    assert ("if other nodes share that file system" in caplog.text) == warned


async def test_a_database_on_a_file_system_of_an_unknown_kind_is_found_under_another_host_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has another name at each start."""
    cluster.kinds = {str(cluster.folder): "9p"}

    store = TrajectoryStore.open(cluster.store)
    await scored_group(store)
    await store.close(leave=True)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    again = TrajectoryStore.open(cluster.store)
    assert len(offered(again)) == 1
    await again.close()


def test_a_directory_that_cannot_be_made_is_named(cluster: Cluster) -> None:
    (cluster.folder / "file").touch()
    location = location_of_writer(cluster.store, str(cluster.folder / "file" / "below"))
    with pytest.raises(UserError, match=r"cannot be made in /.*/file: Not a directory"):
        check_location(location)
    with pytest.raises(UserError, match=r"/file/below/.*, for the trajectory store, cannot be m"):
        make_folder(location)


OPEN = """
import asyncio, sys
from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.store.store import TrajectoryStore
try:
    store = TrajectoryStore.open(sys.argv[1], StoreConfig(directory=sys.argv[2]))
    asyncio.run(store.close(leave=True))
except UserError as error:
    print(error)
"""


def opened(run: Path, directory: str, environment: dict[str, str]) -> str:
    """The output of a process of this environment that opens the store."""
    command = [sys.executable, "-c", OPEN, str(run / STORE), directory]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@needs_compiler
@pytest.mark.parametrize(
    ("ability", "sentence"),
    [
        ("flock", r"cannot be locked \(Function not implemented\) on \w+ \(mounted at /.*\)"),
        ("shm", r"is on \w+ \(mounted at /.*\), which does not support the shared memory of SQL"),
    ],
)
def test_a_file_system_that_cannot_have_the_database_is_named(
    tmp_path: Path, ability: str, sentence: str
) -> None:
    """Lustre without -o flock; a network file system without shared mappings."""
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    (shared / "run").mkdir(parents=True)
    environment = without(shared, ability)
    output = opened(shared / "run", "", environment)
    assert re.search(sentence, output), output
    assert "set store.directory to a local disk" in output
    assert opened(shared / "run", str(scratch), environment) == ""
    assert (shared / "run" / REPLICA).exists(), "that needs neither"


def test_a_log_that_sqlite_silently_goes_without_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def without_shared_memory(name: str, **settings: Any) -> sqlite3.Connection:
        return connect(f"{name}&vfs=unix-dotfile", **settings)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    with pytest.raises(UserError, match=r"shared memory of SQLite's log \(delete\)"):
        check_location(location_of_writer(tmp_path / STORE, ""))


async def test_a_killed_manager_that_comes_back_on_its_node_has_lost_nothing(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    await two_steps(store)
    await killed(store)
    again = TrajectoryStore.open(cluster.store, step=2)
    assert again.recovery is None
    assert offered(again) == [2, 3]
    assert response(again.load_group(3).trajectories[0]) == expected(6, 70)
    await again.close(leave=True)


async def test_a_stopped_run_goes_on_on_another_node_with_everything(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await two_steps(store)
    await store.close(leave=True)
    assert not cluster.database().exists(), "nothing is left on the node"
    cluster.enter("b")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is None
    assert offered(again) == [1, 2, 3]
    assert response(again.load_group(3).trajectories[0]) == expected(6, 70)
    await again.close(leave=True)


async def test_a_lost_node_costs_what_came_after_the_checkpoint_and_nothing_is_trained_twice(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await two_steps(store)
    await killed(store)
    cluster.enter("b")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is not None
    assert not again.recovery.behind
    assert "on a, which this node does not reach; its replica" in again.recovery.sentence
    assert "trajectories from 6 on are lost" in again.recovery.sentence
    assert offered(again) == [1, 2]  # group 0 is consumed at the checkpoint
    assert again.prompts_read == 3, "the prompt of the lost group is read again"
    assert again.add_group(prompt(), 1).trajectories[0].trajectory_id > 6
    await again.close(leave=True)


async def test_a_database_from_before_the_run_went_on_elsewhere_is_not_used(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await two_steps(store)
    await killed(store)
    cluster.enter("b")
    other = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    other.mark_batched([2], 1)
    later = await replicated(other)
    await killed(other)
    cluster.enter("a")
    assert cluster.database().exists()
    again = TrajectoryStore.open(cluster.store, lineage=2, step=2, parent=1, position=later)
    assert offered(again) == [1]
    await again.close(leave=True)


async def test_a_node_that_has_another_name_now_has_the_same_database(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await two_steps(store)
    await killed(store)
    cluster._patch.setattr(socket, "gethostname", lambda: "a-new-name")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is None
    assert offered(again) == [2, 3]
    await again.close(leave=True)


async def test_the_database_moves_with_the_setting(tmp_path: Path) -> None:
    directories = ("", str(tmp_path / "scratch"), str(tmp_path / "other"), "")
    for lineage, directory in enumerate(directories):
        settings = StoreConfig(directory=directory)
        path = tmp_path / "run" / STORE
        store = TrajectoryStore.open(path, settings, lineage=lineage)
        assert store.recovery is None
        assert offered(store) == list(range(lineage))
        await scored_group(store, version=PolicyVersion(lineage, 0))
        await (killed(store) if lineage % 2 else store.close(leave=True))


async def test_store_files_have_the_umasks_mode(tmp_path: Path, new_file_mode: int) -> None:
    store = TrajectoryStore.open(tmp_path / "run" / STORE)
    await two_steps(store)
    files = list((tmp_path / "run").glob("*sqlite*"))
    assert {file.name for file in files} >= {
        STORE,
        f"{STORE}-wal",
        "trajectories.replica.sqlite",
    }
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {new_file_mode}
    await store.close(leave=True)


async def test_a_run_directory_that_is_moved_takes_its_store_along(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / "run" / STORE)
    await scored_group(store)
    await store.close(leave=True)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = TrajectoryStore.open(tmp_path / "moved" / STORE, lineage=1)
    assert offered(again) == [0]
    await again.close(leave=True)


async def test_a_reader_on_another_node_has_the_replica_and_reports_it(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    with closing(StoreReader(cluster.store)) as here:
        assert here.summaries() == []
    await store.sync()  # its thread has opened the file: the disk goes away with the node
    cluster.enter("b")
    with pytest.raises(UserError, match=r"is /.*sqlite on a, and it has no replica yet"):
        StoreReader(cluster.store)
    cluster.enter("a")
    await two_steps(store)
    with closing(StoreReader(cluster.store)) as here:
        assert len(here.summaries()) == 7
    cluster.enter("b")
    with closing(StoreReader(cluster.store)) as elsewhere:
        assert len(elsewhere.summaries()) == 6
        assert "sqlite on a; this is its replica of the last checkpoint" in elsewhere.note
    cluster.enter("a")
    await store.close(leave=True)
    cluster.enter("b")
    with closing(StoreReader(cluster.store)) as elsewhere:
        assert (len(elsewhere.summaries()), elsewhere.note) == (7, "")


async def test_a_group_of_a_stopped_run_is_dropped_from_any_node(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await two_steps(store)
    await store.close(leave=True)
    cluster.enter("b")
    assert drop_group_of(cluster.store, 4, PolicyVersion(0, 1)) == [4, 5]
    assert not cluster.database().exists()
    cluster.enter("c")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is None
    assert offered(again) == [3]
    await again.close(leave=True)


async def test_a_group_of_a_store_on_another_node_is_not_dropped(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await two_steps(store)
    await killed(store)
    cluster.enter("b")
    with pytest.raises(UserError, match=r"cannot be changed: it is /.* on a, which this node"):
        drop_group_of(cluster.store, 4, PolicyVersion(0, 1))


async def test_a_group_that_was_dropped_does_not_come_back_with_the_replica(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    position = await two_steps(store)
    await store.close()
    drop_group_of(tmp_path / STORE, 4, PolicyVersion(0, 1))
    (tmp_path / STORE).write_bytes(b"damage")
    again = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is not None
    assert offered(again) == [1, 3]
    await again.close()


async def test_a_replica_that_cannot_be_written_costs_no_run(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = TrajectoryStore.open(cluster.store)
    (cluster.run / REPLICA).mkdir()
    await two_steps(store)
    assert "replica" in caplog.text
    assert "the one before it stays" in caplog.text
    assert cluster.database().exists()
    await store.close(leave=True)
    assert cluster.database().exists(), "it is the only one there is"
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert offered(again) == [2, 3]
    (cluster.run / REPLICA).rmdir()
    await again.close(leave=True)
    assert not cluster.database().exists()


async def test_a_record_that_is_no_record_leaves_the_replica(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await two_steps(store)
    await store.close(leave=True)
    (cluster.run / "store.json").write_text(json.dumps(["nothing"]))
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is not None
    assert offered(again) == []  # it may not be all
    await again.close(leave=True)
