"""Record files: names in the order of the run, none twice; a bounded part of it, replayable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import (
    Recorder,
    RecordFiles,
    RecordKey,
    read_record,
    record_files,
    record_key,
    replay,
)
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.policies import PRESETS, preset
from tests.scheduler.world import Weather, World

MUCH = 1 << 30


def files_of(directory: Path, lineage: int, **limits: int) -> RecordFiles:
    return RecordFiles(directory, lineage, **{"keep_steps": 8, "most_bytes": MUCH, **limits})


def names(directory: Path) -> list[str]:
    return [path.name for path in record_files(directory).values()]


def test_every_record_and_every_file_of_it_has_a_name_of_its_own(tmp_path: Path) -> None:
    for lineage in (0, 3, 3):
        files = files_of(tmp_path, lineage)
        for _ in range(2):
            files.open_next().close()
    assert names(tmp_path) == [
        "0.jsonl",
        "0.0.1.jsonl",
        "3.jsonl",
        "3.0.1.jsonl",
        "3.1.jsonl",
        "3.1.1.jsonl",
    ]
    assert list(record_files(tmp_path))[-1] == RecordKey(3, 1, 1)


def test_a_name_is_not_used_again_after_its_file_was_removed(tmp_path: Path) -> None:
    files = files_of(tmp_path, 2)
    files.open_next().close()
    files.open_next().close()
    (tmp_path / "2.jsonl").unlink()
    files_of(tmp_path, 2).open_next().close()
    assert names(tmp_path) == ["2.0.1.jsonl", "2.1.jsonl"]


@pytest.mark.parametrize(
    "name", ["other.jsonl", "3.old.jsonl", "3.1.2.4.jsonl", ".jsonl", "03.jsonl", "3.0.jsonl"]
)
def test_other_files_are_no_records(name: str) -> None:
    assert record_key(Path(name)) is None


class Recorded(World):
    """A world whose scheduler is recorded from the moment that it has a recorder."""

    recorder: Recorder

    def send(self, event: ev.Event) -> list[ev.Action]:
        if not hasattr(self, "recorder"):
            return super().send(event)
        self.oracle.event(event)
        actions = self.recorder.step(self.scheduler, event)
        self.oracle.actions(event, actions)
        return actions


def recorded(name: str, directory: Path, **limits: int) -> Recorded:
    world = Recorded(preset(name), Weather(engines=0), seed=4)
    world.recorder = Recorder(
        files_of(directory, 0, **limits),
        world.config,
        first_step=0,
        version=PolicyVersion(0, 0),
    )
    world.weather = Weather(engines=2, engine_failures=0.01, slow_scores=0.5)
    return world


def steps_in(path: Path) -> list[int]:
    _, exchanges = read_record(path)
    return [a.step for e in exchanges for a in e.actions if isinstance(a, ev.EmitBatch)]


@pytest.mark.parametrize("name", PRESETS)
def test_the_last_steps_stay_and_are_replayed_without_those_before(
    tmp_path: Path, name: str
) -> None:
    world = recorded(name, tmp_path, keep_steps=8)
    for _ in range(3000):
        world.random_event()
    world.recorder.close()
    found = list(record_files(tmp_path).values())
    kept = [step for path in found for step in steps_in(path)]
    newest = world.oracle.next_step - 1
    assert kept == list(range(kept[0], newest + 1))
    assert kept[0] > 0 and 8 <= len(kept) <= 8 + 2 + 2, "eight, and the file that is written"
    indices = [e.index for path in found for e in read_record(path)[1]]
    assert indices == list(range(indices[0], indices[-1] + 1)) and indices[0] > 0
    for path in found:
        assert replay(path) is None


def test_a_changed_action_after_a_snapshot_is_noticed(tmp_path: Path) -> None:
    world = recorded("copris", tmp_path)
    for _ in range(2000):
        world.random_event()
    world.recorder.close()
    path = list(record_files(tmp_path).values())[-2]
    lines = path.read_text().splitlines()
    gone = [json.dumps({**json.loads(line), "a": []}) for line in lines[1:]]
    path.write_text("\n".join([lines[0], *gone]) + "\n")
    found = replay(path)
    assert found is not None and found.recorded is None


def test_what_is_kept_takes_no_more_than_the_limit_over_all_lineages(tmp_path: Path) -> None:
    limit = 120_000
    for lineage in range(3):
        config = preset("async")
        world = Recorded(config, Weather(engines=0), seed=lineage)
        files = files_of(tmp_path, lineage, keep_steps=1000, most_bytes=limit)
        world.recorder = Recorder(files, config, first_step=0, version=PolicyVersion(0, 0))
        world.weather = Weather()
        most = 0
        for count in range(4000):
            world.random_event()
            if count % 50 == 0:
                world.recorder.flush()
                sizes = [path.stat().st_size for path in record_files(tmp_path).values()]
                most = max(most, sum(sizes))
        world.recorder.close()
        snapshot = max(len(path.open().readline()) for path in record_files(tmp_path).values())
        assert limit / 2 < most <= limit + snapshot + 1000  # and the event that ended a file
    assert {key.lineage for key in record_files(tmp_path)} == {2}, "the oldest went first"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"classes": {}, "objects": []}, "its snapshot is damaged"),
        ({}, "its snapshot is damaged"),
        ({"classes": {"Lifecycle": ["x"]}, "objects": [[]]}, r"Lifecycle has the fields \['x'\]"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused(
    tmp_path: Path, damage: dict[str, object], message: str
) -> None:
    world = recorded("sync", tmp_path)
    for _ in range(1500):
        world.random_event()
    world.recorder.close()
    path = list(record_files(tmp_path).values())[-1]
    header, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), "snapshot": damage}), *rest]))
    with pytest.raises(UserError, match=message):
        replay(path)
