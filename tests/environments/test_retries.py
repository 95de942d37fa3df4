"""Tests retries of clients that close their connection and call again, over raw sockets.

Each test determines the order in which the gateway sees requests and closed connections.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments.calls import AgentCalls, Call
from megatron_async.environments.chat import ChatAnswer
from megatron_async.environments.gateway import Gateway

MESSAGES = [{"role": "user", "content": "hello"}]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@dataclass
class Episode:
    """A gateway, the calls of one API key, and raw clients that the test controls."""

    gateway: Gateway
    calls: AgentCalls
    url: str
    key: str
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        """Connect a client, which has not sent a request yet, and return it."""
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        port = int(self.url.rpartition(":")[2].partition("/")[0])
        await loop.sock_connect(connection, ("127.0.0.1", port))
        connections = len(self.clients) + 1
        self.clients.append(Client(connection, self.key))
        await until(lambda: len(self.gateway._connections) >= connections - self.disconnected)
        return self.clients[-1]

    @property
    def disconnected(self) -> int:
        """Number of clients that have closed their connection."""
        return sum(client.socket.fileno() < 0 for client in self.clients)

    async def ask(self, client: Client) -> Call:
        """Send a client's first request, and return its call once the gateway has received it."""
        before = len(self.equal)
        client.ask()
        await until(lambda: len(self.equal) > before and bool(self.equal[-1].clients))
        return self.equal[-1]

    @property
    def equal(self) -> list[Call]:
        """The calls that clients made; all of them have equal messages."""
        return next(iter(self.calls._by_digest.values()), [])

    async def answer(self) -> None:
        """Send the next call a response, as the worker does."""
        call = await self.calls.next(2)
        assert call is not None
        turn = self.calls.begin(call, self.calls.match(call))
        self.calls.reply(turn, ChatAnswer(f"5-{turn}", f"answer {turn}"))


@dataclass
class Client:
    """A client with a raw socket, which sends and closes immediately."""

    socket: socket.socket
    key: str

    def ask(self, *, retry: int = 0, stream: bool = False) -> None:
        body = json.dumps({"messages": MESSAGES, "stream": stream})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {self.key}\r\nx-stainless-retry-count: {retry}\r\n\r\n"
        )
        self.socket.send((head + body).encode())

    async def read(self) -> str:
        """Read the reply, and return the text of the policy's response."""
        received = b""
        while b"answer" not in received or not received.endswith(b"}"):
            async with asyncio.timeout(5):
                received += await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
        body = json.loads(received.partition(b"\r\n\r\n")[2])
        return str(body["choices"][0]["message"]["content"])

    async def arrived(self) -> None:
        """Wait until a reply can be read, without reading it."""

        def is_readable() -> bool:
            try:
                return bool(self.socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                return False

        await until(is_readable)

    def leave(self) -> None:
        self.socket.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0.002)


def run(loop: str, body: Callable[[Episode], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        gateway, calls = Gateway(SamplingConfig()), AgentCalls(lambda: False)
        episode = Episode(gateway, calls, await gateway.start(), gateway.open(calls))
        await asyncio.wait_for(body(episode), 30)
        for client in episode.clients:
            client.leave()
        await gateway.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(whole())


pytestmark = pytest.mark.parametrize("loop", LOOPS)


@pytest.mark.parametrize("closes_later", [False, True])
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_retry_gets_the_abandoned_call_when_equal_calls_wait(
    loop: str, leaves: int, closes_later: bool
) -> None:
    """The close of the first connection and the retry reach the gateway in one loop iteration.

    With `closes_later`, the client closes its first connection after it has sent the retry, as a
    client does whose event loop closes connections in its next iteration.
    """

    async def body(episode: Episode) -> None:
        clients = [await episode.client() for _ in range(3)]
        again = await episode.client()
        for client in clients:
            await episode.ask(client)
        steps = [clients[leaves].leave, lambda: again.ask(retry=1)]
        for step in reversed(steps) if closes_later else steps:
            step()
        await until(lambda: sum(call.clients for call in episode.equal) == 3)
        await asyncio.sleep(0.1)
        for _ in range(3):
            await episode.answer()
        waiting = [client for client in clients if client is not clients[leaves]]
        found = [await client.read() for client in (*waiting, again)]
        assert sorted(found) == ["answer 0", "answer 1", "answer 2"]
        assert episode.calls.abandoned() == ()

    run(loop, body)


@pytest.mark.parametrize("sent", [False, True])
def test_retry_gets_its_response_when_the_client_disconnected_before_reading(
    loop: str, sent: bool
) -> None:
    """With `sent`, the response has arrived at the client, which did not read it.

    Otherwise the gateway's loop has not even processed the closed connection when it sends.
    """

    async def body(episode: Episode) -> None:
        first, other, again = [await episode.client() for _ in range(3)]
        await episode.ask(first)
        await episode.ask(other)
        if sent:
            await episode.answer()
            await first.arrived()
        first.leave()
        if not sent:
            await episode.answer()
        again.ask(retry=1)
        assert await again.read() == "answer 0"
        await episode.answer()
        assert await other.read() == "answer 1"
        assert episode.calls.abandoned() == ()

    run(loop, body)


@pytest.mark.parametrize("leaves", [False, True])
def test_retry_gets_another_response_when_the_first_client_has_received_its_own(
    loop: str, leaves: bool
) -> None:
    """The first attempt of the retried request never reached the gateway, as on a busy machine."""

    async def body(episode: Episode) -> None:
        first, again = await episode.client(), await episode.client()
        await episode.ask(first)
        await episode.answer()
        assert await first.read() == "answer 0"
        if leaves:
            first.leave()
        again.ask(retry=1)
        await episode.answer()
        assert await again.read() == "answer 1"
        assert episode.calls.abandoned() == ()

    run(loop, body)


def test_retry_gets_the_streamed_response_when_the_client_did_not_finish_reading(loop: str) -> None:
    async def body(episode: Episode) -> None:
        first, again = await episode.client(), await episode.client()
        first.ask(stream=True)
        await episode.answer()
        await first.arrived()
        await until(lambda: episode.equal[0].delivered)
        assert episode.equal[0].received
        first.leave()
        await until(lambda: not episode.equal[0].delivered)
        assert episode.calls.abandoned() == (), "one event counts as having received the response"
        again.ask(retry=1)
        assert await again.read() == "answer 0"

    run(loop, body)
