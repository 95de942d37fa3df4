"""Tests that time limits count only the time in which the process could run."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_async.runtime.time_limits import STEP_SECONDS, AwakeClock, AwakeTimeout


def test_awake_clock_counts_at_most_two_steps_between_late_ticks() -> None:
    times = [100.0]
    clock = AwakeClock(lambda: times[-1])
    began = clock()
    for now in (100.5, 101.0, 101.5):
        times.append(now)
        clock.tick()
    assert clock() - began == 1.5
    times.append(700.0)  # There was no tick for this long, because the process was stopped.
    assert clock() - began == 1.5 + 2 * STEP_SECONDS
    clock.tick()
    times.append(700.25)
    assert clock() - began == 1.75 + 2 * STEP_SECONDS


def test_awake_timeout_ends_in_time_when_the_loop_runs() -> None:
    async def body() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with AwakeTimeout(0.7):
                await asyncio.Event().wait()
        assert time.monotonic() - began >= 0.7

    asyncio.run(body())


def test_awake_timeout_does_not_end_when_reply_arrived_during_a_stop() -> None:
    """Ten times the limit has passed when the loop continues, and the reply is already there."""

    async def body() -> None:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with AwakeTimeout(0.2):
            writer.write(b"?")
            asyncio.get_running_loop().call_later(0.05, time.sleep, 2.0)
            assert await reader.read(1) == b"!"
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await asyncio.sleep(0.1)
        writer.write(b"!")

    async def both() -> None:
        nonlocal server
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        await body()
        server.close()

    server: asyncio.Server
    asyncio.run(asyncio.wait_for(both(), 30))
