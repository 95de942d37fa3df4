"""Sessions: roles find each other by files, within a time limit, and only the newest one runs."""

from __future__ import annotations

import stat
import threading
import time
from pathlib import Path

import pytest

from megatron_async.errors import ComponentFailure, UserError
from megatron_async.launcher.session import Session
from megatron_async.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_note_reaches_who_waits_for_it(directory: RunDirectory) -> None:
    reader, writer = Session.join(directory, "7.0"), Session.join(directory, "7.0")
    timer = threading.Timer(0.3, lambda: writer.publish("ray", {"address": "a:1"}))
    timer.start()
    assert reader.wait_for("ray", 10) == {"address": "a:1"}


def test_waiting_ends_with_what_was_waited_for(directory: RunDirectory) -> None:
    session = Session.join(directory, "7.0")
    with pytest.raises(ComponentFailure, match=r"waited 0 s for ray of session 7\.0"):
        session.wait_for("ray", 0.1)
    session.close()
    began = time.monotonic()
    with pytest.raises(ComponentFailure, match="was closed before ray was up"):
        session.wait_for("ray", 60)
    assert time.monotonic() - began < 5


def test_a_newer_session_takes_the_run_over(directory: RunDirectory) -> None:
    old, new = Session.join(directory, "7.0"), Session.join(directory, "7.1")
    old.begin()
    old.check()
    new.begin()
    new.check()
    with pytest.raises(ComponentFailure, match="superseded"):
        old.check()


def test_the_token_is_the_users_own_and_new_each_time(directory: RunDirectory) -> None:
    first, second = Session.join(directory, "a"), Session.join(directory, "b")
    first.begin()
    second.begin()
    assert stat.S_IMODE(first.token_file.stat().st_mode) == 0o600
    assert first.token_file.read_text() != second.token_file.read_text()


def test_names_that_are_refused(directory: RunDirectory) -> None:
    for name in ("", "../x", ".hidden"):
        with pytest.raises(UserError, match="--session"):
            Session.join(directory, name)
    used = Session.join(directory, "a")
    used.close()
    with pytest.raises(UserError, match="'a' was used by an earlier launch"):
        used.begin()


def test_a_node_does_not_take_up_a_session_that_is_over(directory: RunDirectory) -> None:
    session = Session.join(directory, "monday")
    session.begin()
    assert Session.begun(directory, "monday", 1.0).path == session.path
    session.close()
    with pytest.raises(ComponentFailure, match=r"'monday' is over: an earlier launch"):
        Session.begun(directory, "monday", 60.0)
