"""Limits count the time that a process has lived through, and no other."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_async.runtime.time_limits import STEP_SECONDS, AwakeClock, AwakeTimeout


def test_the_clock_leaves_out_what_passed_between_two_late_ticks() -> None:
    times = [100.0]
    clock = AwakeClock(lambda: times[-1])
    began = clock()
    for now in (100.5, 101.0, 101.5):
        times.append(now)
        clock.tick()
    assert clock() - began == 1.5
    times.append(700.0)  # nobody ticked: the process was stopped
    assert clock() - began == 1.5 + 2 * STEP_SECONDS
    clock.tick()
    times.append(700.25)
    assert clock() - began == 1.75 + 2 * STEP_SECONDS


def test_a_limit_ends_in_its_time_on_a_loop_that_runs() -> None:
    async def body() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with AwakeTimeout(0.7):
                await asyncio.Event().wait()
        assert time.monotonic() - began >= 0.7

    asyncio.run(body())


def test_an_answer_that_came_while_the_process_stood_still_is_in_time() -> None:
    """Ten times the limit have passed when the loop goes on, and the answer is there."""

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
