"""Tests failures of `megatron-async gateway` before its engine runs; tests/environments tests the
service of the gateway."""

import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.commands import gateway
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gateway")
    build_tiny_model(folder / "model", seed=1)
    (folder / "run.yaml").write_text(f"model: {{path: {folder / 'model'}}}\n")
    return folder / "run.yaml"


def test_gateway_fails_with_one_message_when_its_engine_is_unreachable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_server:
        url = f"http://127.0.0.1:{closed_server.getsockname()[1]}"
    unreachable = nullcontext(SimpleNamespace(url=url))
    monkeypatch.setattr(gateway, "engine_here", lambda *_: unreachable)
    with pytest.raises(ComponentFailure, match=r"^the gateway's engine failed: "):
        gateway.gateway_command(file, [], None, 0)


def test_gateway_starts_no_engine_when_its_port_is_in_use(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("no engine may start")

    monkeypatch.setattr(gateway, "engine_here", started)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UserError, match=f"^--port is {port}, on which this process cannot listen"
        ):
            gateway.gateway_command(file, [], None, port)
