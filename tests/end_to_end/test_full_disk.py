"""Tests a complete run whose disk becomes full: it ends with one message and no process left, and
resumes when there is free space."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_async.run_directory import RunDirectory
from megatron_async.store.reader import StoreReader
from tests.crash.checks import DONE
from tests.crash.evidence import look
from tests.crash.run import configuration, prepare
from tests.end_to_end.runs import assert_trained_once, steps_done, train
from tests.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHANGES = {
    "steps": 200,
    "trainer": {"max_restarts": 0},
    "engines": {"count": 1, "max_restarts": 0},
    "store": {"compact_after_checkpoints": 1000},
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64 << 20) as found:
        yield found


def settings(folder: Path, disk: SmallDisk) -> Path:
    """Write the config of a run on `disk`; the model, the problems and the launcher's output are
    outside of the disk."""
    prepare(folder)
    config = configuration("async", "simulated", folder, "filled", CHANGES)
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump({**config, "root": str(disk.path)}))
    return file


def test_run_on_a_full_disk_ends_with_a_message_and_resumes_with_free_space(
    tmp_path: Path, disk: SmallDisk
) -> None:
    directory = RunDirectory(disk.path / "filled")
    first = train("--config", str(settings(tmp_path, disk)), log=tmp_path / "first.log")
    try:
        first.until(lambda: steps_done(directory) >= 3, 240)
        family = first.family()
        before = look(directory)
        disk.fill()
        assert first.process.wait(120) == 1
    finally:
        first.kill_everything()
    output = first.log.read_text()
    message = output.strip().splitlines()[-1]
    assert re.match(rf"error: .*{disk.path}\S* c(annot|ould not) be \w+.*; (free|look at)", message)
    assert "Traceback" not in output
    _, remaining = psutil.wait_procs(family, timeout=30)
    assert remaining == []

    full = train("--resume", str(directory.path), log=tmp_path / "full.log")
    assert full.process.wait(120) == 2
    assert re.fullmatch(
        r"error: .* cannot be written: No space left on device; free space on .*\n",
        full.log.read_text(),
    )

    disk.make_room()
    steps = steps_done(directory) + 2
    again = train("--resume", str(directory.path), f"steps={steps}", log=tmp_path / "again.log")
    try:
        assert again.process.wait(240) == 0, again.log.read_text()[-3000:]
    finally:
        again.kill_everything()
    assert steps_done(directory) == steps
    after = look(directory)
    done = {i: seen for i, seen in before.items() if seen.state in DONE}
    assert done
    for trajectory_id, seen in done.items():
        now = after[trajectory_id]
        assert (now.state in DONE, now.tokens) == (True, seen.tokens), trajectory_id
    with closing(StoreReader(directory.store_file)) as reader:
        assert_trained_once(directory, reader.content())
