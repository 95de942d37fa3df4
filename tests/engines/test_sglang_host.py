"""Tests `HostedEngines` with a real SGLang server: an engine that is killed fails its requests at
once, and no process remains."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_async.config import RunConfig
from megatron_async.engines.host import HostedEngines
from megatron_async.engines.interface import EngineError, TokenChunk
from megatron_async.process_backends.backend import ProcessBackend
from megatron_async.process_backends.local import local_backend
from tests.engine import SETTINGS, VOCAB, collect, make_request, tokens_of, until_streaming
from tests.hf_models import save_hf_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ProcessBackend]:
    (tmp_path / "logs").mkdir()
    with local_backend(tmp_path / "logs") as found:
        yield found


def _server_processes(log_directory: Path) -> list[psutil.Process]:
    """Return the processes, with their children, of servers whose model directory is next to this
    log directory."""
    model_directory = str(log_directory.parent)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "engines.sglang.server" in line and model_directory in line:
            found += [process, *process.children(recursive=True)]
    return found


def test_hosted_engine_is_reported_dead_and_leaves_no_process_when_killed(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    save_hf_model("qwen3", tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=2048)
    config = RunConfig.model_validate(
        {"model": {"path": str(tmp_path / "model")}, "engines": SETTINGS.model_dump()}
    )
    logs = tmp_path / "logs"
    launcher = HostedEngines(config, logs, backend)

    async def check() -> None:
        assert not await launcher.alive(0)
        client = await launcher.launch(0)
        assert client.engine_id == "engine0" and await launcher.alive(0)
        assert len(tokens_of(await collect(client, make_request("r", [5, 9], 20)))) == 20
        processes = _server_processes(logs)
        assert len(processes) > 1
        arrived: list[TokenChunk] = []
        long = make_request("long", [5, 9], 1900)
        running = asyncio.create_task(collect(client, long, arrived))
        await until_streaming([arrived])
        started = time.monotonic()
        os.kill(processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="engine0"):
            await asyncio.wait_for(running, 10)
        with pytest.raises(EngineError, match="GET /model_info"):
            await client.version()
        # The connections of a killed process close before the kernel has removed the process.
        while await launcher.alive(0):
            assert time.monotonic() - started < 5
            await asyncio.sleep(0.05)
        assert time.monotonic() - started < 5
        await launcher.stop(0)
        _, remaining = psutil.wait_procs(processes, timeout=5)
        assert [process for process in remaining if process.status() != psutil.STATUS_ZOMBIE] == []

    asyncio.run(asyncio.wait_for(check(), 280))
