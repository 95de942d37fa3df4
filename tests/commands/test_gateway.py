"""`megatron-async gateway` before its engine runs; what it serves is in tests/environments."""

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


def test_an_engine_that_is_gone_is_one_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    gone = nullcontext(SimpleNamespace(url=url))
    monkeypatch.setattr(gateway, "engine_here", lambda *_: gone)
    with pytest.raises(ComponentFailure, match=r"^the gateway's engine failed: "):
        gateway.gateway_command(file, [], None, 0)


def test_a_port_that_is_taken_is_refused_before_an_engine_starts(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(gateway, "engine_here", started)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"^--port is {port}, on which this process cannot listen"
        ):
            gateway.gateway_command(file, [], None, port)
