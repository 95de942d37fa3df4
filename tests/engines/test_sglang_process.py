"""Tests how server processes are started and ended: time limits, quoted logs and no remaining
processes. Most tests use a stand-in server; the tests marked `engine` use the real server."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from megatron_async.config import build_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.host import EngineHost
from megatron_async.engines.nodes import reserve_port
from megatron_async.engines.sglang import process as sglang_process
from megatron_async.engines.sglang.process import (
    SGLangProcess,
    rendezvous_of_ranks,
    server_command,
    server_environment,
    simulated_command,
)
from megatron_async.engines.sglang.server import KEY_VARIABLE, take_key
from megatron_async.errors import ComponentFailure
from megatron_async.process_backends.child_process import LIFELINE_VARIABLE, ChildProcess
from tests.engine import EngineUnderTest
from tests.listening import documented, listening

RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
# A server that answers /health, has a child process, and ends when its lifeline closes.
_SERVER = """
import http.server, subprocess, sys
from megatron_async.process_backends.child_process import hold_lifeline
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
hold_lifeline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_SILENT = "echo thinking; exec sleep 600"  # Run by a shell, because a shell starts quickly.
_BROKEN = "import sys; print('no such model: elephant', flush=True); sys.exit(3)"
_PORT_TAKEN = "print('[Errno 98] Address already in use', flush=True); raise SystemExit(1)"
_STAYS_ALIVE = "echo '[Errno 98] error while binding: address already in use'; exec sleep 600"


def _replace_server(
    monkeypatch: pytest.MonkeyPatch, script: str, by: Sequence[str] = (sys.executable, "-c")
) -> list[int]:
    """Make `SGLangProcess` start `script` instead of SGLang; return the list of ports with which
    the script is started."""
    ports: list[int] = []

    def command(settings: EngineConfig, model: Path, port: int, *_others: Any) -> list[str]:
        ports.append(port)
        return [*by, script, str(port)]

    monkeypatch.setattr(sglang_process, "server_command", command)
    return ports


def _process(folder: Path, **changes: Any) -> SGLangProcess:
    settings = EngineConfig(device="cpu", **{"start_timeout_seconds": 20.0, **changes})
    return SGLangProcess(folder / "model", settings, folder / "logs" / "engine.log")


def _has_ended(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def _child_in(log: Path) -> int:
    deadline = time.monotonic() + 5.0
    while "child" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(log.read_text().split("child ")[1].split()[0])


def test_stop_ends_the_server_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _replace_server(monkeypatch, _SERVER)
    server = _process(tmp_path)
    server.start()
    pid, child = server.pid, _child_in(server.log_path)
    assert server.alive() and pid is not None and psutil.pid_exists(child)
    server.stop()
    assert not server.alive() and _has_ended(pid, 0.1) and _has_ended(child, 0.1)
    server.stop()  # Stopping a stopped server is not an error.
    with pytest.raises(ComponentFailure, match="before it is started"):
        _ = server.url


def test_start_raises_with_the_end_of_the_log_when_the_server_exits_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _replace_server(monkeypatch, _BROKEN)
    started = time.monotonic()
    with pytest.raises(ComponentFailure, match=r"exit code 3 .*(?s:.*)no such model: elephant"):
        _process(tmp_path).start()
    assert time.monotonic() - started < 10


def test_start_stops_the_server_when_it_does_not_reply_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _replace_server(monkeypatch, _SILENT, ("sh", "-c"))
    server = _process(tmp_path, start_timeout_seconds=1.5)
    with pytest.raises(ComponentFailure, match=r"start_timeout_seconds = 1\.5;(?s:.*)thinking"):
        server.start()
    assert not server.alive() and server.pid is None


@pytest.mark.parametrize(
    ("script", "by"), [(_PORT_TAKEN, (sys.executable, "-c")), (_STAYS_ALIVE, ("sh", "-c"))]
)
def test_start_retries_with_another_port_when_the_port_is_in_use(
    script: str, by: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that stays alive without listening is also restarted; SGLang's server has done
    so."""
    ports = _replace_server(monkeypatch, script, by)
    with pytest.raises(ComponentFailure, match="already in use"):
        _process(tmp_path, start_timeout_seconds=60.0).start()
    assert len(ports) == len(set(ports)) == 3


def test_port_of_a_starting_server_cannot_be_bound_by_another_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports = _replace_server(monkeypatch, _SERVER)
    spawn, stolen = ChildProcess, []

    def spawned(*arguments: Any, **options: Any) -> Any:
        with socket.socket() as other:
            stolen.append(other.bind(("127.0.0.1", ports[0])) if ports else None)
        return spawn(*arguments, **options)

    monkeypatch.setattr(sglang_process, "ChildProcess", spawned)
    with pytest.raises(OSError, match="in use"):
        _process(tmp_path).start()
    assert stolen == []


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_server_can_listen_on_its_reserved_port(new_loop: Any) -> None:
    async def body(port: int) -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
        (await asyncio.open_connection("127.0.0.1", port))[1].close()
        server.close()

    with reserve_port("127.0.0.1") as reserved, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body(int(reserved.getsockname()[1])))


def test_each_start_uses_a_new_private_rendezvous_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rendezvous_files = []

    def spawned(command: list[str], env: dict[str, str], **options: Any) -> Any:
        rendezvous_files.append(Path(env[RENDEZVOUS].removeprefix("file://")))
        assert (
            stat.S_IMODE(rendezvous_files[-1].parent.stat().st_mode) == 0o700
            and not rendezvous_files[-1].exists()
        )
        rendezvous_files[-1].touch()  # A killed server leaves its file behind.
        assert env["MASTER_PORT"] == command[-1], (
            "this port must be unique: SGLang names memory by it"
        )
        return started(command, env=env, **options)

    _replace_server(monkeypatch, _SERVER)
    started = ChildProcess
    monkeypatch.setattr(sglang_process, "ChildProcess", spawned)
    server = _process(tmp_path)
    for _ in range(2):
        server.start()
        server.stop()
    assert len(set(rendezvous_files)) == 2 and not any(
        file.parent.exists() for file in rendezvous_files
    )


def test_rendezvous_file_is_used_only_when_the_host_is_loopback(tmp_path: Path) -> None:
    assert rendezvous_of_ranks(EngineConfig(host="10.0.0.1"), tmp_path, 7) == {}
    for loopback in (EngineConfig(tensor=2), EngineConfig(host="127.0.0.2")):
        assert RENDEZVOUS in rendezvous_of_ranks(loopback, tmp_path, 7)


@pytest.mark.engine
def test_sglang_server_listens_only_on_the_loopback(sglang_engine: EngineUnderTest) -> None:
    server = psutil.Process(sglang_engine.process.pid)
    found = listening([server, *server.children(recursive=True)])
    assert found == {("engine", "loopback")} <= documented()


def test_server_and_its_children_end_when_its_starter_is_killed(tmp_path: Path) -> None:
    """A starter killed with SIGKILL cannot clean up; its lifeline closes."""
    script = tmp_path / "starter.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from megatron_async.config.rollout import EngineConfig\n"
        "from megatron_async.engines.sglang import process as sp\n"
        "sp.server_command = lambda settings, model, port, *rest: "
        f"[sys.executable, '-c', {_SERVER!r}, str(port)]\n"
        "server = sp.SGLangProcess(Path('m'), EngineConfig(device='cpu'), Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "engine.log"
    starter = subprocess.Popen(
        [sys.executable, str(script), str(log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        pid, child = int(starter.stdout.readline()), _child_in(log)
        assert psutil.pid_exists(pid)
    finally:
        starter.kill()
        starter.wait()
    assert _has_ended(pid) and _has_ended(child)


def test_server_command_contains_the_engine_settings(tmp_path: Path) -> None:
    settings = EngineConfig(
        tensor=2,
        max_running_requests=9,
        context_length=512,
        stream_interval=5,
        extra_args=["--mem-fraction-static", "0.5"],
    )
    command = " ".join(server_command(settings, tmp_path, 1234, "cuda"))
    for part in (
        f"--model-path={tmp_path}",
        "--port=1234",
        "--device=cuda",
        "--dtype=bfloat16",
        "--tp-size=2",
        "--max-running-requests 9",
        "--context-length 512",
        "--stream-interval=5",
        "--weight-version=-1.0",
        "--mem-fraction-static 0.5",
    ):
        assert part in command
    assert "attention-backend" not in command
    assert "--disable-overlap-schedule" not in command
    on_cpu = " ".join(server_command(settings, tmp_path, 1234, "cpu"))
    assert "--attention-backend torch_batched" in on_cpu and "--dtype=float32" in on_cpu


def test_server_command_loads_no_weights_when_engine_awaits_an_update(tmp_path: Path) -> None:
    """The engines of a training run serve no request before the first update; the engines of the
    command `eval` serve the model's own weights."""

    def command(device: str, awaits_weights: bool) -> list[str]:
        settings = EngineConfig()
        return server_command(settings, tmp_path, 1, device, awaits_weights=awaits_weights)

    awaiting = command("cuda", True)
    assert awaiting[awaiting.index("--load-format") + 1] == "dummy"
    assert "--load-format" not in command("cuda", False) + command("cpu", True)


def test_engine_host_starts_engines_that_await_their_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def command(*arguments: Any) -> list[str]:
        commands.append(server_command(*arguments))
        return [sys.executable, "-c", _BROKEN]

    monkeypatch.setattr(sglang_process, "server_command", command)
    engines = {"device": "cuda", "start_timeout_seconds": 20.0}
    config = build_config({"engines": engines, "model": {"path": str(tmp_path)}})
    host = EngineHost("engine0", config, tmp_path / "log")
    with pytest.raises(ComponentFailure, match="no such model: elephant"):
        asyncio.run(host.start())
    [started] = commands
    assert started[started.index("--load-format") + 1] == "dummy"


def test_api_key_reaches_the_server_without_being_readable_by_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineConfig(api_key="secret")
    for command in (
        server_command(settings, tmp_path, 1234, "cpu"),
        simulated_command(settings, tmp_path, 1234),
    ):
        assert "secret" not in " ".join(command)
    environment = server_environment(settings, "cpu", None, {})
    monkeypatch.setenv(KEY_VARIABLE, environment[KEY_VARIABLE])
    assert take_key() == "secret"
    assert take_key() == "", "child processes must not inherit the key"
    _replace_server(monkeypatch, _BROKEN)
    for key, private in (("", False), ("secret", True), ("", True)):
        process = _process(tmp_path, api_key=key)
        with pytest.raises(ComponentFailure):
            process.start()
        mode = stat.S_IMODE(process.log_path.stat().st_mode)
        assert (mode == 0o600) == private, "SGLang logs its settings, including the key"


def test_server_environment_is_single_threaded_and_offline_on_a_cpu() -> None:
    base = {"OMP_NUM_THREADS": "8", "KEEP": "me", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    on_cpu = server_environment(EngineConfig(tensor=2), "cpu", None, base)
    assert on_cpu["OMP_NUM_THREADS"] == "1" and on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on_cpu["HF_HUB_OFFLINE"] == "1" and on_cpu["KEEP"] == "me"
    assert len(on_cpu["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    on_gpu = server_environment(EngineConfig(), "cuda", ["3", "1"], base)
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "3,1" and on_gpu["OMP_NUM_THREADS"] == "8"
    assert LIFELINE_VARIABLE not in on_gpu
    reserve = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
    assert on_cpu[reserve] == "256" and reserve not in on_gpu
    assert server_environment(EngineConfig(), "cpu", None, {reserve: "64"})[reserve] == "64"
    assert not {"SGLANG_RETURN_ORIGINAL_LOGPROB"} & (set(on_cpu) | set(on_gpu))
