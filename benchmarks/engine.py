"""The inference engine on CPU: what decode attention, streaming, aborts, pauses and updates cost.

    python -m benchmarks.engine                       # two servers, about three minutes when quiet
    python -m benchmarks.engine --out FILE

Two servers run side by side on the quickstart's architecture with random weights, one with
SGLang's `torch_native` attention and one with `torch_batched`; each measurement alternates between
what it compares, so that other load on the machine hits both. Lengths are forced. Ratios are of
medians. Prints markdown tables and, with --out, writes them with the command and the date.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.command import command_line
from megatron_async.config.rollout import EngineConfig, SamplingConfig, WeightsConfig
from megatron_async.engines.interface import GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.engines.sglang.server import CPU_ATTENTION_BACKEND
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.publisher import make_sender

LENGTH = 256
REPEATS = 3
CONCURRENCY = (1, 16, 64, 128)
INTERVALS = (1, 8, 16, 32)
SETTINGS = EngineConfig(device="cpu")


def request(name: str, index: int, length: int = LENGTH) -> GenerationRequest:
    """A short prompt with a forced length."""
    prompt = np.array([5, 6, 7 + index % 32], dtype=np.int32)
    return GenerationRequest(name, prompt, length, SamplingConfig(), ignore_eos=True)


async def drain(client: SGLangClient, wanted: GenerationRequest) -> int:
    """Read a stream to its end; tokens."""
    return sum([len(chunk.token_ids) async for chunk in client.generate(wanted)])


async def streamed(client: SGLangClient, concurrency: int) -> float:
    """Tokens/s of so many streamed requests at once."""
    started = time.perf_counter()
    tokens = await asyncio.gather(*(drain(client, request(f"s{i}", i)) for i in range(concurrency)))
    return sum(tokens) / (time.perf_counter() - started)


async def whole(client: SGLangClient, concurrency: int) -> float:
    """Tokens/s of so many requests at once that answer only when they are complete."""

    async def one(index: int) -> int:
        answer = await client._post(
            "generate",
            {
                "input_ids": request("w", index).input_ids.tolist(),
                "sampling_params": {"max_new_tokens": LENGTH, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        return len(answer["output_ids"])

    started = time.perf_counter()
    tokens = await asyncio.gather(*(one(i) for i in range(concurrency)))
    return sum(tokens) / (time.perf_counter() - started)


@contextmanager
def server(folder: Path, label: str, model: Path, extra: list[str]) -> Iterator[tuple[str, float]]:
    """A running server: its URL and how long its start took."""
    settings = SETTINGS.model_copy(update={"extra_args": extra})
    process = SGLangProcess(model, settings, folder / f"{label}.log")
    started = time.perf_counter()
    process.start()
    try:
        yield process.url, time.perf_counter() - started
    finally:
        process.stop()


async def attention(native: SGLangClient, batched: SGLangClient) -> list[str]:
    """Tokens/s of both backends by concurrency."""
    rows = ["| concurrent requests | torch_native | torch_batched | ratio |", "|--:|--:|--:|--:|"]
    for concurrency in CONCURRENCY:
        pairs = [
            (await streamed(native, concurrency), await streamed(batched, concurrency))
            for _ in range(REPEATS)
        ]
        old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
        rows.append(f"| {concurrency} | {old:.0f} | {new:.0f} | {new / old:.2f} |")
    return rows


async def streaming(clients: dict[int, SGLangClient]) -> list[str]:
    """Tokens/s at 64 requests by stream interval, and without streaming."""
    rates: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        rates.setdefault("not streamed", []).append(await whole(next(iter(clients.values())), 64))
        for interval, client in clients.items():
            rates.setdefault(str(interval), []).append(await streamed(client, 64))
    base = statistics.median(rates["not streamed"])
    rows = ["| stream interval | tokens/s | share of not streamed |", "|--:|--:|--:|"]
    for label, values in rates.items():
        middle = statistics.median(values)
        rows.append(f"| {label} | {middle:.0f} | {middle / base:.2f} |")
    return rows


async def control(client: SGLangClient, url: str, model: Path, folder: Path) -> list[str]:
    """Seconds of abort, pause and updates with 64 requests running."""

    async def running() -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(drain(client, request(f"c{i}", i, 1000))) for i in range(64)]
        await asyncio.sleep(1.0)
        return tasks

    seconds: dict[str, list[float]] = {}

    def note(label: str, started: float) -> None:
        seconds.setdefault(label, []).append(time.perf_counter() - started)

    names = [f"c{i}" for i in range(64)]
    tensors = list(load_file(model / "model.safetensors").items())
    for repeat in range(REPEATS):
        tasks = await running()
        started = time.perf_counter()
        await client.abort(names)
        await asyncio.gather(*tasks)
        note("abort of 64, until all streams have ended", started)
        for mode in ("in_place", "retract"):
            tasks = await running()
            started = time.perf_counter()
            await client.pause(mode)  # type: ignore[arg-type]
            note(f"pause {mode}", started)
            started = time.perf_counter()
            await client.resume()
            note("resume", started)
            await client.abort(names)
            await asyncio.gather(*tasks)
        for transport in ("distributed", "tensor", "disk"):
            settings = WeightsConfig(transport=transport)  # type: ignore[arg-type]
            sender = make_sender(settings, SETTINGS, torch.device("cpu"), folder)
            started = time.perf_counter()
            await asyncio.to_thread(sender.connect, [EngineAddress("engine", url)])
            note(f"connect {transport}", started)
            tasks = await running()
            await client.pause("retract")
            started = time.perf_counter()
            await asyncio.to_thread(sender.send, [tensors], PolicyVersion(0, repeat + 1))
            note(f"update {transport}", started)
            started = time.perf_counter()
            await client.checksum()
            note("checksum", started)
            await client.resume()
            await client.abort(names)
            await asyncio.gather(*tasks)
            await asyncio.to_thread(sender.close)
    rows = ["| operation | median ms | max ms |", "|:--|--:|--:|"]
    for label, values in seconds.items():
        rows.append(
            f"| {label} | {statistics.median(values) * 1e3:.0f} | {max(values) * 1e3:.0f} |"
        )
    return rows


async def measure(urls: dict[str, str], model: Path, folder: Path) -> list[str]:
    """All tables."""
    clients = {name: await SGLangClient.connect(name, url, SETTINGS) for name, url in urls.items()}
    native, batched = clients["torch_native"], clients[CPU_ATTENTION_BACKEND]
    try:
        for client in clients.values():
            await streamed(client, 64)  # warm
        lines = ["## Decode attention, tokens/s", "", *await attention(native, batched), ""]
        intervals = {interval: _with_interval(batched, interval) for interval in INTERVALS}
        lines += ["## Streaming at 64 requests", "", *await streaming(intervals), ""]
        table = await control(batched, urls[CPU_ATTENTION_BACKEND], model, folder)
        return [*lines, "## Control, 64 requests running", "", *table]
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))


def _with_interval(client: SGLangClient, interval: int) -> SGLangClient:
    """The same server and session, asking for another stream interval."""

    class Other(SGLangClient):
        def _body(self, wire_id, request):  # type: ignore[no-untyped-def]
            body = super()._body(wire_id, request)
            body["sampling_params"]["stream_interval"] = interval
            return body

    other = Other.__new__(Other)
    other.__dict__.update(client.__dict__)
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the tables here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "model"
        parameters = build_tiny_model(model, seed=0)
        urls, starts = {}, {}
        for backend in ("torch_native", CPU_ATTENTION_BACKEND):
            extra = ["--attention-backend", backend]
            urls[backend], starts[backend] = stack.enter_context(
                server(folder, backend, model, extra)
            )
        tables = asyncio.run(measure(urls, model, folder))
    start_line = ", ".join(f"{seconds:.1f} s" for seconds in starts.values())
    text = "\n".join(
        [
            "# Inference engine on CPU",
            "",
            f"`{command_line('benchmarks.engine')}`, {datetime.date.today()}, "
            f"{parameters:,} parameters, forced length {LENGTH}, medians of {REPEATS}. "
            f"Server start: {start_line}.",
            "",
            *tables,
            "",
        ]
    )
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
