"""Tests that the trace has the spans of every request, in JSON that Perfetto can read."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from megatron_async.commands.trace import make_trace
from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.report.trace import Trace
from megatron_async.rollout.manager import ResumePoint
from megatron_async.run_directory import RunDirectory
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Exchange
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import run, settings
from tests.rollout.test_manager import Trainer

SCHEMA = json.loads((Path(__file__).parent / "trace_event.schema.json").read_text())
UP = ev.EngineUp("a", PolicyVersion(0, 0), 1000)


def trace_of(*exchanges: tuple[float, Any, tuple[Any, ...]]) -> list[dict[str, Any]]:
    trace = Trace()
    for index, (at, event, actions) in enumerate(exchanges):
        trace.take(Exchange(index, event, actions, at), at)
    written = trace.finish()
    jsonschema.validate(written, SCHEMA)
    return list(written["traceEvents"])


def spans(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return begin and end, in seconds, of each span by its name."""
    return {
        e["name"]: (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"
    }


def test_trace_has_spans_of_a_request_that_is_resumed_after_an_update() -> None:
    submit = ev.Submit(7, "a", False)
    events = trace_of(
        (10.0, UP, ()),
        (11.0, ev.PromptsAvailable(()), (submit,)),
        (11.5, ev.LeftQueue(7, 0.125), ()),
        (11.5, ev.TokensArrived(7, 4, 0), ()),
        (12.0, ev.UpdateRequested(1), ()),
        (13.0, ev.Aborted(7), ()),
        (14.0, ev.WeightsPublished(PolicyVersion(0, 1)), (submit,)),
        (14.5, ev.TokensArrived(7, 2, 1), ()),
        (15.0, ev.Finished(7), (ev.Score(7),)),
        (15.25, ev.RewardReady(7, 1.0), (ev.EmitBatch(0, (0,)),)),
    )
    found = spans(events)
    assert found["response 7"] == (1.0, 3.0)
    assert (found["queued"], found["prefill"]) == ((1.0, 1.125), (1.125, 1.5))
    assert found["resumed 7"] == (4.0, 5.0)
    assert found["queued and prefill"] == (4.0, 4.5), (
        "the engine does not report the time in its queue"
    )
    assert found["weight update to version 1"] == (2.0, 4.0)
    assert found["score 7"] == (5.0, 5.25)
    assert found["idle"] == (3.0, 4.0), "between the abort and the resumed request"
    facts = {e["name"]: e.get("args") for e in events if e["ph"] == "X"}
    assert facts["response 7"] == {"tokens": 4, "policy versions": [0], "end": "aborted"}
    assert facts["resumed 7"] == {"tokens": 2, "policy versions": [1], "end": "finished"}
    assert "batch 0 complete" in [e["name"] for e in events if e["ph"] == "i"]


def test_trace_gives_calls_of_environments_separate_lanes() -> None:
    events = trace_of(
        (10.0, UP, (ev.StartEpisode(7), ev.StartEpisode(8))),
        (11.0, ev.EnvironmentReady(7, 30), (ev.Submit(7, "a", False),)),
        (12.0, ev.TurnEnded(7), (ev.StepEnvironment(7),)),
        (13.0, ev.EnvironmentFailed(8, True), (ev.Restart(8),)),
        (14.0, ev.EpisodeEnded(7), (ev.Score(7),)),
    )
    found = spans(events)
    assert (found["start 7"], found["start 8"]) == ((0.0, 1.0), (0.0, 3.0))
    assert (found["response 7"], found["step 7"]) == ((1.0, 2.0), (2.0, 4.0))
    facts = {e["name"]: e.get("args") for e in events if e["ph"] == "X"}
    assert facts["start 8"] == {"reply": "failed"}
    assert facts["response 7"]["end"] == "turn ended"
    assert "environments" in [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert_lanes_nest(events)


def test_trace_ends_requests_when_their_engine_is_lost() -> None:
    events = trace_of(
        (1.0, UP, (ev.Submit(1, "a", False), ev.Submit(2, "a", False))),
        (2.0, ev.EngineDown("a"), ()),
    )
    assert {e["args"]["end"] for e in events if e["name"].startswith("response")} == {"engine lost"}


def test_trace_shows_the_trainers_phases_one_after_another() -> None:
    trace = Trace()
    line = {"time": 100.0, "step": 3.0, "time/wait_for_batch": 2.0, "time/train": 3.0}
    line["rollout/lag_in_queue_mean"] = 0.5
    trace.add_trainer([{**line, "time": 50.0}, line], since=80.0)
    written = trace.finish()
    jsonschema.validate(written, SCHEMA)
    assert spans(written["traceEvents"]) == {
        "step 3": (0.0, 5.0),
        "waiting for a batch": (0.0, 2.0),
        "training": (2.0, 5.0),
    }
    [facts] = [e["args"] for e in written["traceEvents"] if e["name"] == "step 3"]
    assert facts == {"lag in the queue": 0.5}


def assert_lanes_nest(events: list[dict[str, Any]]) -> None:
    by_lane = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_lane[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in by_lane.values():
        for (begin, end), (later, latest) in itertools.combinations(sorted(lane), 2):
            apart = later >= end - 1
            assert apart or latest <= end + 1 or (later <= begin + 1 and latest >= end - 1)


def test_trace_of_a_simulated_run_is_valid(tmp_path: Path) -> None:
    config = build_config(settings("copris").model_dump() | {"root": str(tmp_path)})
    directory = RunDirectory.create(config)

    async def body() -> None:
        trainer = Trainer(directory.path, config)
        trainer.manager._events_directory = directory.events
        await trainer.manager.start()
        await trainer.begin(ResumePoint(0))
        for step in range(4):
            await trainer.batch()
            await trainer.publish(0, step + 1)
        await trainer.manager.stop()

    run(body())
    written = make_trace(directory)
    jsonschema.validate(written, SCHEMA)
    events = written["traceEvents"]
    assert isinstance(events, list)
    assert_lanes_nest(events)
    names = [event["name"] for event in events]
    assert sum(name.startswith("response ") for name in names) >= 8
    assert {"decode", "weight update to version 2", "batch 3 complete"} <= set(names)


def test_make_trace_names_the_setting_when_events_were_not_recorded(tmp_path: Path) -> None:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    with pytest.raises(UserError, match=r"requires telemetry\.record_events true"):
        make_trace(directory)
