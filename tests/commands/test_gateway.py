"""`megatron-async gateway` before its engine runs; what it serves is in tests/environments."""

import socket
from pathlib import Path

import pytest

from megatron_async.commands import gateway
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import build_tiny_model


def test_a_port_that_is_taken_is_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(gateway, "engine_here", started)
    build_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^--port {port} cannot be listened on"):
            gateway.gateway_command(tmp_path / "run.yaml", [], None, port)
