"""What a call of an agent costs its worker, beside a plain reverse proxy.

    python -m benchmarks.agents --model PATH [--agents 1000] [--rounds 8]

The worker, its processes' protocol and the chat API are the real ones; answers come from a
simulated engine in this process. The agents themselves are in another process, so that their CPU
time is not the worker's: the function that the worker runs as an agent only hands its address and
key to them. All agents are open at once, each with about 2,000 tokens in 45 messages and more.

In a round every agent makes one call that continues its conversation (a new message, and the
answer before it); then every one sends the same body through the proxy, whose server replies with
an answer as long at once. CPU time is that of the whole process, user and system, by a round's
calls. Rounds of both take turns; the first of each warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from benchmarks.command import command_line
from megatron_async.config import RunConfig, build_config
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.workers import EnvironmentWorkers, HeldEpisodes
from megatron_async.places.local import local_place
from megatron_async.rollout.play import play
from megatron_async.rollout.respond import SharedEngines, Wanted
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.trajectory.types import PolicyVersion

_LONGEST_SECONDS = 600.0
_ANSWER = 24
_OPENING_MESSAGES = 45
_OPENING_WORDS, _NEW_WORDS = 34, 40
_WORDS = (
    "the",
    "store",
    "keeps",
    "every",
    "token",
    "of",
    "a",
    "branch",
    "until",
    "it",
    "is",
    "done",
)


# ------------------------------------------------------------ in the worker


async def outside(base_url: str, api_key: str, meet: str, **row: Any) -> float:
    """The agent: it is played by another process, over the address and key that it is given."""
    reader, writer = await asyncio.open_unix_connection(meet)
    about = {"url": base_url, "key": api_key, "worker": os.getpid()}
    writer.write(json.dumps(about).encode() + b"\n")
    reward = float(await reader.readline())
    writer.close()
    return reward


# ------------------------------------------------------------ the proxy, and what stands behind it


async def serve_proxy(upstream: str) -> None:
    """A reverse proxy as one would write it: a body in, the reply out."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def forward(request: web.Request) -> web.Response:
            headers = {"Content-Type": "application/json"}
            body = await request.read()
            async with session.post(upstream, data=body, headers=headers) as reply:
                given = await reply.read()
                return web.Response(
                    body=given, status=reply.status, content_type="application/json"
                )

        print(await listening(forward), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


async def listening(handler: Any) -> str:
    """The address of a server with this handler."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"


# ------------------------------------------------------------ the agents


def text(words: int, chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


@dataclass
class Client:
    """One conversation. `tokens`: of the input and the answer of its last call."""

    about: dict[str, Any]
    writer: asyncio.StreamWriter
    chance: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)

    def write(self) -> None:
        """Add what the next call brings."""
        if not self.messages:
            for number in range(_OPENING_MESSAGES):
                role = "assistant" if number % 2 else "user"
                content = text(_OPENING_WORDS, self.chance)
                self.messages.append({"role": role, "content": content})
        else:
            self.messages.append({"role": "user", "content": text(_NEW_WORDS, self.chance)})

    async def call(self, session: aiohttp.ClientSession, url: str, *, keep: bool) -> None:
        body = {"model": "policy", "messages": self.messages}
        headers = {"Authorization": f"Bearer {self.about['key']}"}
        async with session.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            found = await reply.json()
        if keep:
            usage = found["usage"]
            self.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            content = found["choices"][0]["message"]["content"]
            self.messages.append({"role": "assistant", "content": content})


async def play_agents(meet: str, agents: int, proxy: str) -> None:
    """Do what the lines of standard input ask for, and reply with a line to each."""
    clients: list[Client] = []
    every = asyncio.Event()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        about = json.loads(await reader.readline())
        clients.append(Client(about, writer, random.Random(len(clients))))
        if len(clients) == agents:
            every.set()

    await asyncio.start_unix_server(taken, meet, backlog=agents)
    print("ready", flush=True)
    timeout = aiohttp.ClientTimeout(_LONGEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_LONGEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await asyncio.wait_for(every.wait(), _LONGEST_SECONDS)
            if line == "gateway":
                for client in clients:
                    client.write()
                url = f"{clients[0].about['url']}/chat/completions"
                await asyncio.gather(*(c.call(session, url, keep=True) for c in clients))
            elif line == "proxy":
                await asyncio.gather(*(c.call(session, proxy, keep=False) for c in clients))
            else:
                for client in clients:
                    client.writer.write(b"1\n")
            inputs = [client.tokens[0] for client in clients]
            about = {"worker": clients[0].about["worker"], "least": min(inputs)}
            print(json.dumps({**about, "most": max(inputs)}), flush=True)


# ------------------------------------------------------------ the measurement


class Helper:
    """A process of this file, in a role of its own; it is asked by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.cpu = psutil.Process(process.pid)

    @classmethod
    async def start(cls, *words: str) -> tuple[Helper, str]:
        """The process and its first line."""
        pipe = asyncio.subprocess.PIPE
        started = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.agents", *words, stdin=pipe, stdout=pipe
            )
        )
        return started, await started._line()

    async def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        return dict(json.loads(await self._line()))

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), _LONGEST_SECONDS)

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _LONGEST_SECONDS)
        assert line, "a process of the benchmark has ended"
        return line.decode().strip()


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(config: RunConfig, agents: int, rounds: int, meet: str) -> list[dict[str, Any]]:
    """A row for each round: CPU milliseconds a call of the worker and of the proxy."""
    answer = {"role": "assistant", "content": text(_ANSWER, random.Random(0))}
    body = json.dumps({"choices": [{"index": 0, "message": answer}]}).encode()

    async def at_once(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    proxy, proxy_url = await Helper.start("--serve-proxy", await listening(at_once))
    played = ("--play-agents", meet, "--agents", str(agents), "--proxy", proxy_url)
    clients, _ = await Helper.start(*played)
    rows = []
    with local_place(Path(meet).parent) as place:
        held = HeldEpisodes(EnvironmentWorkers(config, place))
        episodes = [asyncio.ensure_future(one) for one in episodes_of(config, held, agents)]
        worker = psutil.Process((await clients.ask("gateway"))["worker"])
        for _ in range(rounds + 1):
            row: dict[str, Any] = {}
            for name, process in (("gateway", worker), ("proxy", proxy.cpu)):
                before, began = spent(process), time.monotonic()
                row |= await clients.ask(name)
                row[f"{name}_seconds"] = time.monotonic() - began
                row[name] = 1000 * (spent(process) - before) / agents
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        await clients.ask("end")
        found = await asyncio.wait_for(asyncio.gather(*episodes), _LONGEST_SECONDS)
        assert all(e is not None and e.turns[-1].reward == 1.0 for e in found)
        assert all(len(e.turns) == rounds + 2 and e.turns[-1].parent == rounds for e in found if e)
    await clients.end()
    await proxy.end()
    return rows[1:]


def episodes_of(config: RunConfig, held: HeldEpisodes, agents: int) -> list[Any]:
    """Episodes that are played as evaluations play them."""
    tokenizer = load_tokenizer(config.model.path)
    stops = tuple(stop_tokens(config.model.path, tokenizer))
    model = SimulatedEngineModel(
        vocab_size=len(tokenizer), mean_length=_ANSWER, step_seconds=0.001, longest_tokens=8192
    )
    engine = SimulatedEngine("engine", model)
    engine.set_weights(PolicyVersion(0, 0))
    engines = SharedEngines(lambda: [engine], slots=agents)
    wanted = Wanted(config.sampling, config.sampling.max_new_tokens, stops)

    def one(number: int) -> Any:
        payload = {"question": "", "answer": "", "metadata": {"seed": number}}
        return play(held, number, payload, wanted, f"e{number}", engines, config.episode, None)

    return [one(number) for number in range(agents)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds, with the least and the most."""
    lines = [
        "| | CPU ms a call, median over rounds (range) | s a round, median |",
        "|---|---|---|",
    ]
    for name in ("gateway", "proxy"):
        cpu, seconds = [r[name] for r in rows], [r[f"{name}_seconds"] for r in rows]
        spread = f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"
        lines.append(f"| {name} | {spread} | {statistics.median(seconds):.1f} |")
    least, most = min(r["least"] for r in rows), max(r["most"] for r in rows)
    lines.append(f"\nTokens of a call's input: {least:,} to {most:,}.")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder with a tokenizer")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    for internal in ("--serve-proxy", "--play-agents", "--proxy"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.serve_proxy:
        asyncio.run(serve_proxy(options.serve_proxy))
        return
    if options.play_agents:
        asyncio.run(play_agents(options.play_agents, options.agents, options.proxy))
        return
    with tempfile.TemporaryDirectory(prefix="agents-") as scratch:
        meet = str(Path(scratch) / "meet")
        agent = {"name": f"{Path(__file__).resolve()}:outside", "arguments": {"meet": meet}}
        limits = {"step_seconds": _LONGEST_SECONDS, "max_turns": 1000, "memory_mib": 16384}
        config = build_config(
            {
                "model": {"path": options.model},
                "agent": agent,
                "episode": limits,
                "sampling": {"max_new_tokens": 32},
            }
        )
        rows = asyncio.run(measure(config, options.agents, options.rounds, meet))
    print(f"`{command_line('benchmarks.agents')}`\n\n{table(rows)}")


if __name__ == "__main__":
    main()
