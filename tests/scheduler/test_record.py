"""Tests that a record replays to the same actions, and that a replay shows the first difference.

The names of record files are unique and in the order of the run. The files contain a bounded part
of the run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import pytest

from megatron_async.errors import UserError
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import (
    FORMAT_VERSION,
    Divergence,
    Exchange,
    Header,
    Raised,
    RecordedAction,
    Recorder,
    RecordFiles,
    RecordKey,
    read_record,
    record_files,
    record_key,
    replay,
)
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState
from tests.scheduler.policies import PRESETS, preset
from tests.scheduler.world import Weather, World

SPEC = ev.GroupSpec(3, (30, 31), 17, 1)
# The other events and actions are in the golden records (test_golden.py).
EVENTS: list[ev.Event] = [
    ev.ManyAborted(((1,), (2, 5, 3), (3, 1, 2, 4, 3))),
    ev.Refused(1),
    ev.LeftQueue(1, 0.25),
]


def recorded(name: str, target: TextIO | RecordFiles, weather: Weather, seed: int) -> World:
    """Return a world whose scheduler is recorded and that has no engines yet."""
    world = World(preset(name), Weather(engines=0), seed)
    world.recorder = Recorder(target, world.config, first_step=0, version=PolicyVersion(0, 0))
    world.weather = weather
    return world


def go_on(world: World, events: int) -> None:
    for _ in range(events):
        world.random_event()
    assert world.recorder is not None
    world.recorder.close()


def record(path: Path, name: str, events: int = 250) -> None:
    """Record a random run of a preset, with failures."""
    weather = Weather(engine_failures=0.02, scorer_failures=0.05)
    world = recorded(name, path.open("w"), weather, seed=3)
    for _ in range(2):
        world.engine_up()
    go_on(world, events)


def written(event: ev.Event, actions: Sequence[RecordedAction] = ()) -> str:
    """Record one event."""
    stream = io.StringIO()
    recorder = Recorder(stream, preset("sync"), first_step=0, version=PolicyVersion(0, 0))
    recorder.write(event, actions)
    return stream.getvalue()


def read(path: Path, text: str | bytes) -> Exchange:
    """Return the only exchange of a record."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (exchange,) = read_record(path)[1]
    return exchange


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_record_reads_events_as_written(tmp_path: Path, event: ev.Event) -> None:
    assert read(tmp_path / "0.jsonl", written(event)).event == event


def test_record_reads_an_exception_as_written(tmp_path: Path) -> None:
    raised = Raised("KeyError(17)")
    assert read(tmp_path / "0.jsonl", written(ev.Finished(1), [raised])).actions == (raised,)


def test_record_reads_fields_in_their_declared_types(tmp_path: Path) -> None:
    """These are enums, versions and integers of 64 bits."""
    member = ev.RecoveredTrajectory(
        2**63 - 1, TrajectoryState.DROPPED, 0, None, 1e300, None, DropReason.STALE
    )
    group = ev.RecoveredGroup(ev.GroupSpec(2**62, (2**63 - 1,), 0, -(2**63)), (member,))
    back = read(tmp_path / "0.jsonl", written(ev.Recovered((group,)))).event
    assert isinstance(back, ev.Recovered) and back.groups == (group,)
    (found,) = back.groups[0].trajectories
    assert type(found.state) is TrajectoryState and type(found.drop_reason) is DropReason
    up = read(
        tmp_path / "0.jsonl", written(ev.EngineUp("\u00e9\u2028", PolicyVersion(3, 4), 9))
    ).event
    assert isinstance(up, ev.EngineUp)
    assert type(up.version) is PolicyVersion and up.engine_id == "\u00e9\u2028"


def test_record_has_times_only_with_a_clock(tmp_path: Path) -> None:
    stream = io.StringIO()
    timed = Recorder(
        stream,
        preset("sync"),
        first_step=0,
        version=PolicyVersion(0, 0),
        clock=lambda: 1_700_000_000.123456,
    )
    timed.write(ev.Finished(1), [ev.Score(1)])
    assert stream.getvalue().endswith(
        '{"e":["Finished",1],"a":[["Score",1]],"t":1700000000.1235}\n'
    )
    assert read(tmp_path / "0.jsonl", stream.getvalue()).at == 1_700_000_000.1235
    without = written(ev.Finished(1), [ev.Score(1)])
    assert without.endswith('{"e":["Finished",1],"a":[["Score",1]]}\n')
    assert read(tmp_path / "0.jsonl", without).at is None


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        SPEC.priority = 2  # type: ignore[misc]


def test_replay_returns_the_first_differing_action(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    record(path, "copris")
    seen: list[Exchange] = []

    def newest_first(header: Header) -> Scheduler:
        config = header.config.model_copy(update={"buffer_order": "newest_first"})
        return Scheduler(config, first_step=header.first_step, version=header.version)

    found = replay(path, newest_first, seen.append)
    assert found is not None
    assert isinstance(found.recorded, ev.Submit) and isinstance(found.replayed, ev.Submit)
    assert found.recorded.resume and found.recorded != found.replayed
    assert found.index == seen[-1].index and seen[-1].actions[found.position] == found.recorded
    assert f"event {found.index}" in str(found)


def test_replay_reports_missing_and_additional_actions(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    with path.open("w") as stream:
        recorder = Recorder(stream, preset("sync"), first_step=0, version=PolicyVersion(0, 0))
        recorder.write(ev.EngineUp("a", PolicyVersion(0, 0), 100), [])
        recorder.flush()
    found = replay(path)
    assert found is not None
    assert (found.recorded, found.replayed) == (None, ev.RequestPrompts(2))


class Defective(Scheduler):
    """Scheduler that raises an exception at every score."""

    def step(self, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, ev.RewardReady):
            raise KeyError(event.trajectory_id)
        return super().step(event)


def defective(header: Header) -> Scheduler:
    return Defective(header.config, first_step=header.first_step, version=header.version)


def failed_record(path: Path) -> None:
    """Record a run whose scheduler raised at event 5 and got one more event before the run
    ended."""
    config, version = preset("copris"), PolicyVersion(0, 0)
    scheduler = defective(Header(config, 0, version))
    with path.open("w") as stream:
        recorder = Recorder(stream, config, first_step=0, version=version)
        groups = (ev.GroupSpec(0, (0, 1), 10), ev.GroupSpec(1, (2, 3), 10))
        for event in (
            ev.EngineUp("a", version, 10_000),
            ev.PromptsAvailable(groups),
            ev.TokensArrived(0, 5, 0),
            ev.TokensArrived(1, 5, 0),
            ev.Finished(0),
        ):
            recorder.step(scheduler, event)
        with pytest.raises(KeyError):
            recorder.step(scheduler, ev.RewardReady(0, 1.0))
        # The line was flushed.
        assert path.read_text().endswith('"a":[["Raised","KeyError(0)"]]}\n')
        recorder.step(scheduler, ev.Finished(1))


def replayed(
    path: Path, make: Callable[[Header], Scheduler]
) -> tuple[Divergence | None, list[str]]:
    raised: list[str] = []

    def saw(exchange: Exchange, error: Exception) -> None:
        raised.append(f"{exchange.index}: {error!r}")

    return replay(path, make, raised=saw), raised


def test_replay_raises_a_recorded_exception_at_its_event(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    failed_record(path)
    assert replayed(path, defective) == (None, ["5: KeyError(0)"])


def test_replay_differs_when_the_scheduler_no_longer_raises(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    failed_record(path)
    found = replay(path)
    assert found is not None
    assert (found.index, found.recorded, found.replayed) == (5, Raised("KeyError(0)"), None)
    assert "is the exception KeyError(0), the replayed one is missing" in str(found)


def test_replay_differs_when_the_scheduler_raises_now(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    record(path, "copris")
    found, raised = replayed(path, defective)
    assert found is not None and isinstance(found.event, ev.RewardReady)
    assert found.replayed == Raised(f"KeyError({found.event.trajectory_id})")
    assert raised == [f"{found.index}: KeyError({found.event.trajectory_id})"]


def test_replay_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    record(path, "async", events=60)
    whole = path.read_text()
    path.write_text(whole[: len(whole) - 7])
    assert replay(path) is None
    lines = whole.splitlines(keepends=True)
    assert len(list(read_record(path)[1])) == len(lines) - 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a schedule record"),
        (
            '{"format": "megatron_async.schedule", "format_version": 2}\n',
            f"has format_version 2; this program reads {FORMAT_VERSION}",
        ),
        (
            f'{{"format": "megatron_async.schedule", "format_version": {FORMAT_VERSION}, '
            '"schedule": {"x": 1}}\n',
            "its header is invalid",
        ),
    ],
)
def test_read_record_refuses_other_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        replay(path)


NOT_AN_EVENT = "line 4 is not an event with its actions"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b'{"e":["Finished",17],"a":[]', "is damaged in line 4"),
        (b'{"e":["EngineDown","\xff"],"a":[]}', "is damaged in line 4"),
        (b"{}", NOT_AN_EVENT),
        (b'{"e":["Finished",17]}', NOT_AN_EVENT),
        (b'{"e":["Vanished",17],"a":[]}', NOT_AN_EVENT),
        (b'{"e":["Finished",17],"a":[["Finished",17]]}', NOT_AN_EVENT),
        (b'{"e":["Finished"],"a":[]}', NOT_AN_EVENT),
        (b'{"e":["RewardReady",17,1.0],"a":[]}', NOT_AN_EVENT),  # `regenerate` has a default
        (b'{"e":["Finished",1.5],"a":[]}', NOT_AN_EVENT),
        (b'{"e":["WeightsPublished",[0]],"a":[]}', NOT_AN_EVENT),
        (b'{"e":["Finished",17],"a":[["Drop",17,"boredom"]]}', NOT_AN_EVENT),
    ],
)
def test_read_record_names_the_number_of_a_damaged_line(
    tmp_path: Path, damage: bytes, message: str
) -> None:
    path = tmp_path / "schedule.jsonl"
    record(path, "sync", events=5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], damage + b"\n", *lines[3:]]))
    with pytest.raises(UserError, match=message):
        replay(path)


def test_read_record_raises_user_error_when_the_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        replay(tmp_path / "none.jsonl")


MUCH = 1 << 30


def files_of(directory: Path, lineage: int, **limits: int) -> RecordFiles:
    return RecordFiles(directory, lineage, **{"keep_steps": 8, "most_bytes": MUCH, **limits})


def names(directory: Path) -> list[str]:
    return [path.name for path in record_files(directory).values()]


def test_every_record_file_has_a_unique_name(tmp_path: Path) -> None:
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


def test_name_of_a_removed_record_file_is_not_used_again(tmp_path: Path) -> None:
    files = files_of(tmp_path, 2)
    files.open_next().close()
    files.open_next().close()
    (tmp_path / "2.jsonl").unlink()
    files_of(tmp_path, 2).open_next().close()
    assert names(tmp_path) == ["2.0.1.jsonl", "2.1.jsonl"]


@pytest.mark.parametrize(
    "name", ["other.jsonl", "3.old.jsonl", "3.1.2.4.jsonl", ".jsonl", "03.jsonl", "3.0.jsonl"]
)
def test_record_key_is_none_for_other_files(name: str) -> None:
    assert record_key(Path(name)) is None


def recorded_in(directory: Path, name: str, events: int) -> World:
    weather = Weather(engines=2, engine_failures=0.01, slow_scores=0.5)
    world = recorded(name, files_of(directory, 0), weather, seed=4)
    go_on(world, events)
    return world


def steps_in(path: Path) -> list[int]:
    _, exchanges = read_record(path)
    return [a.step for e in exchanges for a in e.actions if isinstance(a, ev.EmitBatch)]


@pytest.mark.parametrize("name", PRESETS)
def test_newest_record_files_replay_without_earlier_ones(tmp_path: Path, name: str) -> None:
    world = recorded_in(tmp_path, name, 3000)
    found = list(record_files(tmp_path).values())
    kept = [step for path in found for step in steps_in(path)]
    newest = world.oracle.next_step - 1
    assert kept == list(range(kept[0], newest + 1))
    assert kept[0] > 0 and 8 <= len(kept) <= 8 + 2 + 2, "eight, and the file that is written"
    indices = [e.index for path in found for e in read_record(path)[1]]
    assert indices == list(range(indices[0], indices[-1] + 1)) and indices[0] > 0
    for path in found:
        assert replay(path) is None


def test_replay_finds_a_changed_action_after_a_snapshot(tmp_path: Path) -> None:
    recorded_in(tmp_path, "copris", 2000)
    path = list(record_files(tmp_path).values())[-2]
    lines = path.read_text().splitlines()
    gone = [json.dumps({**json.loads(line), "a": []}) for line in lines[1:]]
    path.write_text("\n".join([lines[0], *gone]) + "\n")
    found = replay(path)
    assert found is not None and found.recorded is None


def test_record_files_of_all_lineages_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 120_000
    for lineage in range(3):
        files = files_of(tmp_path, lineage, keep_steps=1000, most_bytes=limit)
        world = recorded("async", files, Weather(), seed=lineage)
        assert world.recorder is not None
        most = 0
        for count in range(4000):
            world.random_event()
            if count % 50 == 0:
                world.recorder.flush()
                sizes = [path.stat().st_size for path in record_files(tmp_path).values()]
                most = max(most, sum(sizes))
        world.recorder.close()
        snapshot = max(len(path.open().readline()) for path in record_files(tmp_path).values())
        # The last term allows for the event that ended a file.
        assert limit / 2 < most <= limit + snapshot + 1000
    assert {key.lineage for key in record_files(tmp_path)} == {2}, "the oldest went first"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"classes": {}, "objects": []}, "its snapshot is damaged"),
        ({}, "its snapshot is damaged"),
        (
            {"classes": {"Lifecycle": ["x"]}, "objects": [[]]},
            r"Lifecycle of its snapshot has the fields \['x'\]",
        ),
    ],
)
def test_replay_refuses_a_snapshot_of_other_code(
    tmp_path: Path, damage: dict[str, object], message: str
) -> None:
    recorded_in(tmp_path, "sync", 1500)
    path = list(record_files(tmp_path).values())[-1]
    header, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), "snapshot": damage}), *rest]))
    with pytest.raises(UserError, match=message):
        replay(path)
