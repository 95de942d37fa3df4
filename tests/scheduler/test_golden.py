"""Tests that the scheduler repeats the actions of golden records, one record per preset.

The docstring of `golden.py` has the command that writes the records.
"""

from __future__ import annotations

import io
import typing
from collections.abc import Callable

import pytest

from megatron_async.errors import UserError
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import (
    Divergence,
    Header,
    Recorder,
    read_record,
    replay,
)
from tests.scheduler.golden import COMMAND, EPISODES, path_of
from tests.scheduler.policies import PRESETS

REGENERATE = f"If that is meant, run `{COMMAND}` and commit the records with the change."


def difference(name: str, make: Callable[[Header], Scheduler] | None = None) -> Divergence | None:
    """Replay a record as `replay` does; fail the test if the current code cannot read it."""
    try:
        return replay(path_of(name), make)
    except UserError as error:
        pytest.fail(f"{error}. {REGENERATE}")


@pytest.mark.parametrize("name", [*PRESETS, EPISODES])
def test_scheduler_repeats_the_actions_of_golden_records(name: str) -> None:
    found = difference(name)
    assert found is None, f"{path_of(name)}: {found}. {REGENERATE}"


@pytest.mark.parametrize("name", [*PRESETS, EPISODES])
def test_golden_records_are_written_again_byte_for_byte(name: str) -> None:
    header, exchanges = read_record(path_of(name))
    again = io.StringIO()
    recorder = Recorder(again, header.config, first_step=header.first_step, version=header.version)
    for exchange in exchanges:
        recorder.write(exchange.event, exchange.actions)
    assert again.getvalue().splitlines()[1:] == path_of(name).read_text().splitlines()[1:]


def test_golden_records_contain_every_event_and_action_of_live_runs() -> None:
    seen: set[type] = set()
    for name in (*PRESETS, EPISODES):
        header, exchanges = read_record(path_of(name))
        assert header.version.lineage == 1  # The record starts after a resume.
        for exchange in exchanges:
            seen |= {type(exchange.event), *map(type, exchange.actions)}
    everything = {*typing.get_args(ev.Event), *typing.get_args(ev.Action)}
    # ManyAborted: `test_many_aborted.py` compares it with one by one. Engines
    # refuse nothing there (`test_properties.py`), and do not report how long they queued one.
    assert everything - seen == {ev.ManyAborted, ev.Refused, ev.LeftQueue}
