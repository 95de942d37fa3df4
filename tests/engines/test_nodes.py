"""Ray that does not start, or cannot be joined, is one sentence."""

from __future__ import annotations

import socket

import pytest
import ray

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
