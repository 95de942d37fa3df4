"""Engines in hosts of their own, without a real engine behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_async.config import build_config
from megatron_async.engines.host import HostedEngines
from megatron_async.places.local import local_place
from tests.crash.run import configuration, prepare


def test_an_engine_that_was_begun_is_the_one_that_is_launched(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = build_config(configuration("copris", "simulated", tmp_path, "run", {}))

    async def launched() -> list[str]:
        launcher = HostedEngines(config, tmp_path, place)
        launcher.begin()
        clients = [await launcher.launch(index) for index in (0, 1, 0)]
        assert await launcher.alive(0) and await launcher.alive(1)
        await asyncio.gather(launcher.stop(0), launcher.stop(1))
        return [client.engine_id for client in clients]

    with local_place(tmp_path) as place:
        found = asyncio.run(asyncio.wait_for(launched(), 240))
    assert found == ["engine0", "engine1", "engine0.1"]
