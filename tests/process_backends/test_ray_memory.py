"""Tests that the memory of Ray's server does not grow with the number of calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from megatron_async.process_backends.backend import RemoteObject
from megatron_async.process_backends.on_ray import ray_backend
from tests.process_backends.subject import Subject
from tests.process_backends.test_contract import LIMIT

CALLS = 3000
MAX_BYTES_A_CALL = 1024


async def call(remote: RemoteObject, times: int) -> None:
    for _ in range(times // 100):
        await asyncio.gather(
            *(remote.call(lambda one: one.echo(1), limit=LIMIT) for _ in range(100))
        )
    await asyncio.sleep(3)  # Ray's processes send reports to the server once a second.


def own_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@pytest.mark.slow
def test_gcs_server_memory_does_not_grow_with_calls(tmp_path: Path) -> None:
    with ray_backend(None, tmp_path / "token") as backend:
        remote = backend.start(Subject, name="subject", here=True)
        asyncio.run(call(remote, 500))
        children = psutil.Process().children(recursive=True)
        server = next(child for child in children if child.name() == "gcs_server")
        before = own_bytes(server)
        asyncio.run(call(remote, CALLS))
        assert (own_bytes(server) - before) / CALLS < MAX_BYTES_A_CALL
