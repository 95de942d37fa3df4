"""Serves engines without a model, with the endpoints of SGLang that rollouts use.

    python -m benchmarks.stub_engine ENGINES INTERVAL RATE

The program prints the ports in one line and serves until its input is closed. Each request gets its
first token immediately, and then reports of INTERVAL tokens at a rate of RATE tokens per second.
Reports have the form and size of SGLang's reports with `--incremental-streaming-output`.

The program generates load for a measured client, so its CPU time must be small compared with the
client's. The server in engines/simulated takes too much CPU time. Therefore this program simulates
no batches and has no coroutine for each request. It joins reports from prepared text, and parses
HTTP from the bytes of the transport.

Invariants
- A response counts upwards from the last token of the request's input (modulo `VOCABULARY`), and
  the log-prob of a token is a function of the token. So every token of a response can be checked.
- A request that is aborted or reaches `max_new_tokens` ends with a last report, which has the total
  number of tokens.
- `GET /stub` returns the number of all reported tokens, and the CPU time of the process.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import sys
import time
from functools import partial
from typing import Any, cast

import orjson
import uvloop

VOCABULARY = 131_072
_TICK_SECONDS = 0.005


def logprob(token: Any) -> Any:
    """Return the log-prob of a token, or of each token in an array; it ignores the position."""
    return -((token % 997) + 1) / 512


_IDS = [str(token) for token in range(VOCABULARY)]
_LOGPROBS = [f"[{logprob(token):.7f},{token},null]" for token in range(VOCABULARY)]


class Stream:
    """A running request."""

    def __init__(self, connection: Connection, body: dict[str, Any]) -> None:
        self.connection = connection
        self.rid = body["rid"]
        self.prompt = len(body["input_ids"])
        self.last = body["input_ids"][-1]
        self.most = body["sampling_params"]["max_new_tokens"]
        self.total = 0


class Stub:
    """An engine, which owns the running requests of all its connections."""

    def __init__(self, interval: int, rate: float) -> None:
        self.interval, self.rate = interval, rate
        self.version = "-1.0"
        self.running: dict[str, Stream] = {}
        self.due: list[tuple[float, int, Stream]] = []
        self.reported = 0
        self._order = itertools.count()

    def begin(self, connection: Connection, body: dict[str, Any]) -> None:
        """Start a request: report its first token, and schedule its next report."""
        stream = Stream(connection, body)
        self.running[stream.rid] = stream
        connection.stream = stream
        connection.begin_stream()
        now = time.monotonic()
        self.report(stream, 1)
        self._later(stream, now + random.random() * self.interval / self.rate)

    def _later(self, stream: Stream, when: float) -> None:
        if stream.rid in self.running:
            heapq.heappush(self.due, (when, next(self._order), stream))

    def tick(self) -> None:
        """Send all reports that are due."""
        now = time.monotonic()
        while self.due and self.due[0][0] <= now:
            when, _, stream = heapq.heappop(self.due)
            if self.running.get(stream.rid) is stream:
                self.report(stream, self.interval)
                self._later(stream, when + self.interval / self.rate)

    def report(self, stream: Stream, count: int, end: str | None = None) -> None:
        """Send a report with the next `count` tokens; end the request if `end` is given."""
        count = min(count, stream.most - stream.total)
        first = (stream.last + 1) % VOCABULARY
        places = [(first + i) % VOCABULARY for i in range(count)]
        stream.total += count
        stream.last = (stream.last + count) % VOCABULARY
        self.reported += count
        if end is None and stream.total == stream.most:
            end = "length"
        ids = ",".join([_IDS[place] for place in places])
        logprobs = ",".join([_LOGPROBS[place] for place in places])
        reason = "null" if end is None else f'{{"type":"{end}"}}'
        stream.connection.send_report(
            f'data: {{"text":"","output_ids":[{ids}],"meta_info":{{"id":"{stream.rid}",'
            f'"finish_reason":{reason},"prompt_tokens":{stream.prompt},'
            f'"weight_version":"{self.version}","total_retractions":0,"input_token_logprobs":[],'
            f'"output_token_logprobs":[{logprobs}],"completion_tokens":{stream.total},'
            '"cached_tokens":0,"cached_tokens_details":null,"dp_rank":null,"weight_versions":'
            f'[{{"version":"{self.version}","start":0,"end":{stream.total}}}],'
            '"e2e_latency":12.3456789}}\n\n',
            last=end is not None,
        )
        if end is not None:
            del self.running[stream.rid]

    def abort(self, body: dict[str, Any]) -> None:
        """Abort the request that `body` names, or all requests."""
        rids = list(self.running) if body.get("abort_all") else [body["rid"]]
        for rid in rids:
            if rid in self.running:
                self.report(self.running[rid], 0, "abort")

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request to any endpoint except /generate."""
        match path.partition("?")[0]:
            case "/abort_request":
                self.abort(body)
            case "/update_weights_from_disk":
                self.version = body["weight_version"]
            case "/v1/loads":
                load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
                return {"loads": [{**load, "max_total_num_tokens": 1 << 24, "token_usage": 0.5}]}
            case "/server_info":
                return {"dtype": "float32"}
            case "/model_info":
                return {"weight_version": self.version}
            case "/stub":
                used = {"process": os.getpid(), "cpu_seconds": time.process_time()}
                return {"reported": self.reported, **used}
        return {}


class Connection(asyncio.Protocol):
    """Connection of an HTTP/1.1 server with the features that the engines' client needs."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self.stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.stream is not None and self._stub.running.get(self.stream.rid) is self.stream:
            del self._stub.running[self.stream.rid]

    def data_received(self, data: bytes) -> None:
        """Parse each complete HTTP request in the buffer and reply to it."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            first, *headers = bytes(self._buffer[:end]).split(b"\r\n")
            lengths = (h for h in headers if h.lower().startswith(b"content-length:"))
            start = end + 4
            stop = start + int(next(lengths, b":0").split(b":")[1])
            if len(self._buffer) < stop:
                return
            body = orjson.loads(bytes(self._buffer[start:stop]) or b"{}")
            del self._buffer[:stop]
            path = first.split(b" ")[1].decode()
            if path == "/generate":
                self._stub.begin(self, body)
            else:
                self._answer(orjson.dumps(self._stub.answer(path, body)))

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def begin_stream(self) -> None:
        """Send the head of a streamed reply."""
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind)

    def send_report(self, text: str, *, last: bool) -> None:
        """Send one report; after the last report, the connection accepts another request."""
        data = text.encode()
        end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if last else b""
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, end))


async def serve(engines: int, interval: int, rate: float) -> None:
    """Serve `engines` engines until standard input is closed."""
    loop = asyncio.get_running_loop()
    stubs = [Stub(interval, rate) for _ in range(engines)]
    servers = [
        await loop.create_server(partial(Connection, stub), "127.0.0.1", 0, backlog=8192)
        for stub in stubs
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    closed = asyncio.Event()
    # Nothing is written to stdin, so it becomes readable only when it is closed.
    loop.add_reader(sys.stdin, closed.set)
    while not closed.is_set():
        for stub in stubs:
            stub.tick()
        await asyncio.sleep(_TICK_SECONDS)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
