"""A session's name is for one launch; later ones are refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.errors import ComponentFailure
from megatron_async.launcher.session import Session
from megatron_async.run_directory import RunDirectory


def test_a_node_does_not_take_up_a_session_that_is_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    session = Session.join(directory, "monday")
    session.begin()
    assert Session.begun(directory, "monday", 1.0).path == session.path
    session.close()
    with pytest.raises(ComponentFailure, match=r"'monday' is over: an earlier launch"):
        Session.begun(directory, "monday", 60.0)
