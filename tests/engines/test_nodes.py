"""Ray that does not start, or cannot be joined, is one sentence; it prints none of its own."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.worker import Worker

from megatron_async.engines.nodes import init_ray
from megatron_async.errors import UserError

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("address", "raised", "sentence"),
    [
        (
            "local",
            Exception("The current node timed out during startup. This could happen because ..."),
            f"Ray did not start on {HOST} (Exception: The current node timed out during startup.",
        ),
        (
            "10.0.0.1:6379",
            ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
            f"the Ray cluster at 10.0.0.1:6379 cannot be joined from {HOST} (ConnectionError: "
            "Failed to connect",
        ),
    ],
    ids=["it does not start in time", "it is not there"],
)
def test_what_ray_raises_at_its_start_is_a_sentence_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, address: str, raised: Exception, sentence: str
) -> None:
    def start(**arguments: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(UserError) as error:
        init_ray(address=address)
    assert str(error.value).startswith(sentence)


def test_ray_prints_no_traceback_of_a_reply_that_nobody_awaits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "")  # put back afterwards
    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    failed: Any = SimpleNamespace(deserialize_objects=lambda *_: [ValueError("a wall")])
    Worker.raise_errors(failed, [], [])
    assert "a wall" in caplog.text
    caplog.clear()
    init_ray()
    Worker.raise_errors(failed, [], [])
    assert caplog.text == ""
