"""Tests where a run's store keeps its database, and what other nodes do with the replica."""

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
from tests.store.disk import environment_without, needs_compiler
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
    """Simulates nodes on one machine; each node has a disk, and they share a run directory."""

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
        """Move this process to `node`, on which the disks of other nodes cannot be seen."""
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


def unconsumed_ids(store: TrajectoryStore) -> list[int]:
    return [group.group_id for group in store.unconsumed_groups()]


async def replicate(store: TrajectoryStore) -> int:
    """Write the replica of a checkpoint, wait for it, and return the checkpoint's position."""
    position = await store.sync(durable=True)
    store.replicate()
    await store._replicator.finish()
    return position


async def kill(store: TrajectoryStore) -> None:
    """Make the store write nothing more and release its lock, as if its process were killed."""
    store._writer.close()


async def train_two_steps(store: TrajectoryStore) -> int:
    """Train groups 0 and 1 in steps 0 and 1, with a checkpoint and its replica between them.

    Group 2 is scored before the checkpoint and not trained; group 3 is partial and added after it.
    Returns the checkpoint's position.
    """
    groups = [await scored_group(store) for _ in range(3)]
    store.mark_batched([groups[0].group_id], 0)
    position = await replicate(store)
    store.mark_batched([groups[1].group_id], 1)
    partial: Group = store.add_group(prompt(), 1)
    store.begin_request(partial.trajectories[0].trajectory_id)
    append(store, partial.trajectories[0].trajectory_id, 0, 70)
    await store.sync(durable=True)
    return position


async def test_database_is_on_the_managers_node_when_run_directory_is_shared(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    await scored_group(store)
    await replicate(store)
    assert cluster.database().is_relative_to(cluster.folder / "disk")
    assert cluster.database().exists()
    assert sorted(path.name for path in cluster.run.iterdir()) == [
        "store.json",
        REPLICA,
    ]
    await store.close(leave=True)


async def test_store_directory_sets_the_folder_of_the_database(cluster: Cluster) -> None:
    scratch = cluster.folder / "scratch"
    settings = StoreConfig(directory=str(scratch))
    store = TrajectoryStore.open(cluster.store, settings)
    await scored_group(store)
    (database,) = scratch.glob(f"*/{STORE}")
    assert database.parent.name.startswith("run-"), "runs may share store.directory"
    with closing(StoreReader(cluster.store)) as reader:
        assert len(reader.summaries()) == 2
        assert reader.note == ""
    await store.close(leave=True)


def test_error_names_both_file_systems_when_no_disk_is_local(cluster: Cluster) -> None:
    cluster.kinds[str(cluster.folder)] = "nfs4"
    with pytest.raises(UserError, match=r"is on lustre .* is on nfs4 .* Set store.directory to a"):
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
def test_unknown_file_system_is_used_with_warning_when_no_disk_is_local(
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
    assert ("is on a file system that may be shared" in caplog.text) == warned


async def test_database_on_unknown_file_system_is_found_when_host_name_changes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has another host name at each start."""
    cluster.kinds = {str(cluster.folder): "9p"}

    store = TrajectoryStore.open(cluster.store)
    await scored_group(store)
    await store.close(leave=True)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    again = TrajectoryStore.open(cluster.store)
    assert len(unconsumed_ids(again)) == 1
    await again.close()


def test_error_names_the_directory_that_cannot_be_made(cluster: Cluster) -> None:
    (cluster.folder / "file").touch()
    location = location_of_writer(cluster.store, str(cluster.folder / "file" / "below"))
    with pytest.raises(UserError, match=r"cannot be made in /.*/file: Not a directory"):
        check_location(location)
    with pytest.raises(UserError, match=r"failed to make /.*/file/below/.*, the folder of the"):
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


def open_in_process(run: Path, directory: str, environment: dict[str, str]) -> str:
    """Open the store in a process with this environment; return the output of the process."""
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
def test_error_names_the_file_system_without_locks_or_shared_memory(
    tmp_path: Path, ability: str, sentence: str
) -> None:
    """Such as Lustre without -o flock, or a network file system without shared mappings."""
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    (shared / "run").mkdir(parents=True)
    environment = environment_without(shared, ability)
    output = open_in_process(shared / "run", "", environment)
    assert re.search(sentence, output), output
    assert "Set store.directory to a local disk" in output
    assert open_in_process(shared / "run", str(scratch), environment) == ""
    assert (shared / "run" / REPLICA).exists(), "the replica needs no ability of the file system"


def test_store_is_refused_when_sqlite_silently_uses_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def without_shared_memory(name: str, **settings: Any) -> sqlite3.Connection:
        return connect(f"{name}&vfs=unix-dotfile", **settings)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    with pytest.raises(UserError, match=r"shared memory of SQLite's log \(delete\)"):
        check_location(location_of_writer(tmp_path / STORE, ""))


async def test_killed_manager_loses_nothing_when_it_restarts_on_its_node(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    await train_two_steps(store)
    await kill(store)
    again = TrajectoryStore.open(cluster.store, step=2)
    assert again.recovery is None
    assert unconsumed_ids(again) == [2, 3]
    assert response(again.load_group(3).trajectories[0]) == expected(6, 70)
    await again.close(leave=True)


async def test_stopped_run_loses_nothing_when_it_resumes_on_another_node(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await train_two_steps(store)
    await store.close(leave=True)
    assert not cluster.database().exists(), "the database was not removed from the node"
    cluster.enter("b")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is None
    assert unconsumed_ids(again) == [1, 2, 3]
    assert response(again.load_group(3).trajectories[0]) == expected(6, 70)
    await again.close(leave=True)


async def test_lost_node_costs_only_what_followed_the_checkpoint(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await train_two_steps(store)
    await kill(store)
    cluster.enter("b")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is not None
    assert not again.recovery.behind
    assert "on host a, which this node cannot reach; it is replaced" in again.recovery.message
    assert "trajectories from 6 on are lost" in again.recovery.message
    assert unconsumed_ids(again) == [1, 2]  # Group 0 is consumed at the checkpoint.
    assert again.prompts_read == 3, "the prompt of the lost group is read again"
    assert again.add_group(prompt(), 1).trajectories[0].trajectory_id > 6
    await again.close(leave=True)


async def test_outdated_database_is_not_used_when_a_run_returns_to_its_node(
    cluster: Cluster,
) -> None:
    store = TrajectoryStore.open(cluster.store)
    position = await train_two_steps(store)
    await kill(store)
    cluster.enter("b")
    other = TrajectoryStore.open(cluster.store, lineage=1, step=1, parent=0, position=position)
    other.mark_batched([2], 1)
    later = await replicate(other)
    await kill(other)
    cluster.enter("a")
    assert cluster.database().exists()
    again = TrajectoryStore.open(cluster.store, lineage=2, step=2, parent=1, position=later)
    assert unconsumed_ids(again) == [1]
    await again.close(leave=True)


async def test_database_is_found_when_its_node_has_a_new_name(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await train_two_steps(store)
    await kill(store)
    cluster._patch.setattr(socket, "gethostname", lambda: "a-new-name")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is None
    assert unconsumed_ids(again) == [2, 3]
    await again.close(leave=True)


async def test_database_moves_when_store_directory_changes(tmp_path: Path) -> None:
    directories = ("", str(tmp_path / "scratch"), str(tmp_path / "other"), "")
    for lineage, directory in enumerate(directories):
        settings = StoreConfig(directory=directory)
        path = tmp_path / "run" / STORE
        store = TrajectoryStore.open(path, settings, lineage=lineage)
        assert store.recovery is None
        assert unconsumed_ids(store) == list(range(lineage))
        await scored_group(store, version=PolicyVersion(lineage, 0))
        await (kill(store) if lineage % 2 else store.close(leave=True))


async def test_store_files_have_the_mode_that_the_umask_gives(
    tmp_path: Path, new_file_mode: int
) -> None:
    store = TrajectoryStore.open(tmp_path / "run" / STORE)
    await train_two_steps(store)
    files = list((tmp_path / "run").glob("*sqlite*"))
    assert {file.name for file in files} >= {
        STORE,
        f"{STORE}-wal",
        "trajectories.replica.sqlite",
    }
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {new_file_mode}
    await store.close(leave=True)


async def test_store_is_found_when_the_run_directory_was_moved(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / "run" / STORE)
    await scored_group(store)
    await store.close(leave=True)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = TrajectoryStore.open(tmp_path / "moved" / STORE, lineage=1)
    assert unconsumed_ids(again) == [0]
    await again.close(leave=True)


async def test_reader_on_another_node_reads_the_replica_and_notes_it(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    with closing(StoreReader(cluster.store)) as here:
        assert here.summaries() == []
    # After this the writer thread has opened the file, which is then moved away with the disk.
    await store.sync()
    cluster.enter("b")
    with pytest.raises(UserError, match=r"is /.*sqlite on a, which .*; it has no replica yet"):
        StoreReader(cluster.store)
    cluster.enter("a")
    await train_two_steps(store)
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


async def test_group_of_a_stopped_run_is_dropped_from_another_node(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await train_two_steps(store)
    await store.close(leave=True)
    cluster.enter("b")
    assert drop_group_of(cluster.store, 4, PolicyVersion(0, 1)) == [4, 5]
    assert not cluster.database().exists()
    cluster.enter("c")
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is None
    assert unconsumed_ids(again) == [3]
    await again.close(leave=True)


async def test_drop_is_refused_when_the_database_is_on_another_node(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await train_two_steps(store)
    await kill(store)
    cluster.enter("b")
    with pytest.raises(UserError, match=r"its database is /.* on host a, which this node cannot"):
        drop_group_of(cluster.store, 4, PolicyVersion(0, 1))


async def test_dropped_group_stays_dropped_when_the_replica_is_restored(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    position = await train_two_steps(store)
    await store.close()
    drop_group_of(tmp_path / STORE, 4, PolicyVersion(0, 1))
    (tmp_path / STORE).write_bytes(b"damage")
    again = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=1, parent=0, position=position)
    assert again.recovery is not None
    assert unconsumed_ids(again) == [1, 3]
    await again.close()


async def test_run_continues_when_the_replica_cannot_be_written(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = TrajectoryStore.open(cluster.store)
    (cluster.run / REPLICA).mkdir()
    await train_two_steps(store)
    assert "replica" in caplog.text
    assert "keeping the previous replica" in caplog.text
    assert cluster.database().exists()
    await store.close(leave=True)
    assert cluster.database().exists(), "the only copy of the data was removed"
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert unconsumed_ids(again) == [2, 3]
    (cluster.run / REPLICA).rmdir()
    await again.close(leave=True)
    assert not cluster.database().exists()


async def test_replica_is_restored_when_store_json_is_invalid(cluster: Cluster) -> None:
    store = TrajectoryStore.open(cluster.store)
    await train_two_steps(store)
    await store.close(leave=True)
    (cluster.run / "store.json").write_text(json.dumps(["nothing"]))
    again = TrajectoryStore.open(cluster.store, lineage=1, step=2, parent=0)
    assert again.recovery is not None
    assert unconsumed_ids(again) == []  # The replica may be incomplete.
    await again.close(leave=True)
