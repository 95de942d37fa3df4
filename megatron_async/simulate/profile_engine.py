"""Implements `megatron-async profile-engine`: measures a running SGLang server, and writes its cost
model as YAML.

The file (read by `simulate.cost_model`):

    format: megatron_async.engine_cost
    format_version: 1
    measured: {url: ..., date: ..., new_tokens: 64}
    kv_capacity_tokens: 65536
    decode:                       # one decode step of `batch` requests that read `kv_tokens` of KV
      - {batch: 16, kv_tokens: 2560, seconds: 0.0123}
    prefill:                      # seconds of a request in addition to its decode steps
      - {tokens: 128, seconds: 0.004}

Everything is measured at rest and under load. At rest, requests of equal length start together, or
there is a single prefill. This shows how the times grow with the number of KV tokens and of prompt
tokens. Under load, requests of different lengths start and end all the time. This shows the mean
times with all costs of a real run: batches of unequal lengths, prefills between decode steps, HTTP,
and the time between the end of a request and the arrival of the next one. `seconds` in the file is
the value at rest plus a constant, with which the mean is the one measured under load.

Invariants
- A decode measurement at rest uses only the time in which all its requests run. A measurement under
  load uses only the time in which each client has a request.
- Prompts are random tokens, new ones for each request, and the server's prefix cache is flushed
  before each measurement, so that no prefill is skipped.
- The server must have no other requests. Its weights and settings are not changed.
"""

import asyncio
import datetime
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import EngineClient, EngineError, TokenChunk
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import writing
from megatron_async.rollout.responses import ResponseSpec, read
from megatron_async.simulate.engine_costs import FORMAT, FORMAT_VERSION, fit_engine_costs

_TOKEN_IDS = 32
"""Prompts use the token ids 1 to 31, which every tokenizer has."""
_PREFILL_REPEATS = 3
_LOAD_TOKENS = (16, 48)
"""Mean response lengths in tokens of the two measurements under load."""
_LOAD_STEPS = 192
"""Approximate number of decode steps of a measurement under load. Small batches need more, to reach
`_LOAD_REQUESTS`."""
_LOAD_REQUESTS = 64
"""Minimum number of requests of a measurement under load. With fewer, their mean length could be
far from the requested mean."""
_MEASUREMENT_SECONDS = 600.0


@dataclass(frozen=True)
class Arrival:
    """Arrival of one chunk of a response.

    Attributes:
        at: Time of arrival in seconds on the monotonic clock.
        tokens: Number of tokens of the response so far; in a measurement under load, number of
            tokens of this chunk only.
    """

    at: float
    tokens: int


def decode_seconds(arrivals: list[list[Arrival]]) -> tuple[float, float]:
    """Compute two values of the time in which all requests of a measurement ran: the median seconds
    per decode step, and the mean number of tokens of a request.

    This time begins when the last of the requests has its first chunk, and ends when the first
    request ends. The speed of each request is computed from its own chunks in this time.

    Args:
        arrivals: Chunks of each request.

    Raises:
        ComponentFailure: The requests did not run together for long enough.
    """
    start = max(chunks[0].at for chunks in arrivals)
    end = min(chunks[-1].at for chunks in arrivals)
    rates, middles = [], []
    for chunks in arrivals:
        inside = [chunk for chunk in chunks if start <= chunk.at <= end]
        if len(inside) >= 2 and inside[-1].tokens > inside[0].tokens:
            steps = inside[-1].tokens - inside[0].tokens
            rates.append((inside[-1].at - inside[0].at) / steps)
            middles.append((inside[-1].tokens + inside[0].tokens) / 2)
    if not rates:
        raise ComponentFailure(
            f"profile-engine: {len(arrivals)} requests did not run at the same time for long "
            "enough to measure a decode step. Increase --new-tokens"
        )
    return statistics.median(rates), statistics.fmean(middles)


@dataclass(frozen=True)
class Load:
    """Result of a measurement under load, in which each of `batch` clients sends its next request
    when the previous one has ended.

    Attributes:
        batch: Number of clients.
        seconds: Length of the measured time.
        requests: Number of requests that ended in the measured time.
        tokens: Number of tokens that arrived in the measured time.
        kv_tokens: Mean number of tokens in the KV cache, of all running requests together.
    """

    batch: int
    seconds: float
    requests: int
    tokens: int
    kv_tokens: float

    def seconds_without_kv(self, per_kv_token: float) -> float:
        """Return the seconds of the measured time minus the time for reading the KV cache."""
        return self.seconds - self.tokens / self.batch * per_kv_token * self.kv_tokens

    def step_seconds(self, request_seconds: float, per_kv_token: float) -> float:
        """Return the seconds of one decode step without reading the KV cache, if each request costs
        `request_seconds` in addition; at least 0."""
        remaining = self.seconds_without_kv(per_kv_token) - self.requests * request_seconds
        return max(0.0, remaining * self.batch / self.tokens)


def request_seconds(short: Load, long: Load, per_kv_token: float) -> float:
    """Compute the seconds that each request costs in addition to its tokens, from two measurements
    under load with short and long responses; at least 0.

    Both measurements have the same batch. For each of them, the measured time is

        seconds = requests * q + tokens / batch * (step + kv_tokens * per_kv_token)

    where q is the result and `step` the time of a decode step without reading the KV cache. These
    two equations are solved for q and `step`.
    """
    first, second = (load.seconds_without_kv(per_kv_token) for load in (short, long))
    determinant = short.requests * long.tokens - long.requests * short.tokens
    return max(0.0, (first * long.tokens - second * short.tokens) / determinant)


class EngineProfiler:
    """Measures decode and prefill times of one engine through its client."""

    def __init__(self, client: EngineClient, new_tokens: int) -> None:
        self._client = client
        self._new_tokens = new_tokens
        self._rng = np.random.default_rng(0)
        self._serial = 0

    async def decode(self, batch: int, context: int) -> dict[str, float]:
        """Measure a decode step at rest: `batch` requests with prompts of `context` tokens start
        together. Return a row of the file's table `decode`."""
        await self._client.flush_cache()
        arrivals = await asyncio.gather(
            *(self._generate(context, self._new_tokens) for _ in range(batch))
        )
        seconds, generated = decode_seconds(arrivals)
        kv_tokens = batch * (context + generated)
        return {"batch": batch, "kv_tokens": round(kv_tokens), "seconds": round(seconds, 7)}

    async def prefill(self, tokens: int, step_seconds: float) -> dict[str, float]:
        """Measure the prefill of a prompt of `tokens` tokens while the engine has no other request;
        return a row of the table `prefill` in the cost-model file.

        The result is the median time of a request that generates one token, minus `step_seconds`,
        the time of its decode step.
        """
        times = []
        for _ in range(_PREFILL_REPEATS):
            await self._client.flush_cache()
            started = time.monotonic()
            await self._generate(tokens, 1)
            times.append(time.monotonic() - started)
        seconds = max(0.0, statistics.median(times) - step_seconds)
        return {"tokens": tokens, "seconds": round(seconds, 7)}

    async def load(self, batch: int, context: int, mean_tokens: int) -> Load:
        """Measure the engine under load: `batch` clients send prompts of `context` tokens and get
        responses of geometrically distributed length, one after the other.

        With this distribution, a running request ends with the same probability at each step,
        however long it is already. So requests end evenly over time from the start of the
        measurement, and a running request has generated `mean_tokens` on average.
        """
        await self._client.flush_cache()
        arrivals: list[Arrival] = []
        ends: list[float] = []
        wanted = batch + max(batch * (_LOAD_STEPS // mean_tokens), _LOAD_REQUESTS)

        async def client() -> None:
            while len(ends) < wanted:
                length = int(self._rng.geometric(1 / mean_tokens))
                before = 0
                for arrival in await self._generate(context, length):
                    arrivals.append(Arrival(arrival.at, arrival.tokens - before))
                    before = arrival.tokens
                ends.append(arrivals[-1].at)

        await asyncio.gather(*(client() for _ in range(batch)))
        started, ended = sorted(ends)[batch - 1], sorted(ends)[wanted - 1]
        return Load(
            batch,
            ended - started,
            wanted - batch,
            sum(arrival.tokens for arrival in arrivals if started < arrival.at <= ended),
            batch * (context + mean_tokens),
        )

    async def _generate(self, context: int, new_tokens: int) -> list[Arrival]:
        """Generate one response with a random prompt of `context` tokens; return the arrival of
        each chunk with the number of tokens so far."""
        self._serial += 1
        prompt_ids = self._rng.integers(1, _TOKEN_IDS, context).astype(np.int32)
        wanted = ResponseSpec(SamplingConfig(), new_tokens, exact=True)
        arrivals: list[Arrival] = []

        async def take(chunk: TokenChunk) -> bool:
            before = arrivals[-1].tokens if arrivals else 0
            arrivals.append(Arrival(time.monotonic(), before + len(chunk.token_ids)))
            return True

        await read(self._client, wanted.request(f"profile-{self._serial};", prompt_ids), take)
        return arrivals


async def profile(
    client: EngineClient, batches: list[int], contexts: list[int], new_tokens: int
) -> dict[str, Any]:
    """Measure the whole cost model of an engine; return the content of the cost-model file.

    Args:
        client: Client of the engine.
        batches: Batch sizes to measure.
        contexts: Prompt lengths in tokens to measure.
        new_tokens: Number of tokens that each request of a measurement at rest generates.

    Raises:
        EngineError: A request failed.
        ComponentFailure: Requests did not run together for long enough.
    """
    profiler = EngineProfiler(client, new_tokens)
    # The result of the first measurement is not used, because a server compiles kernels and
    # allocates memory during its first requests.
    await profiler.decode(1, contexts[0])
    decode = [await profiler.decode(batch, c) for batch in batches for c in contexts]
    lengths = sorted({*contexts, 4 * max(contexts)})
    prefill = [await profiler.prefill(tokens, decode[0]["seconds"]) for tokens in lengths]
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "measured": {
            "url": client.url,
            "date": datetime.date.today().isoformat(),
            "new_tokens": new_tokens,
        },
        "kv_capacity_tokens": client.kv_capacity_tokens,
        "decode": decode,
        "prefill": prefill,
    }
    if max(batches) > 1:
        await _move_to_load(data, profiler, sorted(set(batches) - {1}), min(contexts))
    return data


async def _move_to_load(
    data: dict[str, Any], profiler: EngineProfiler, batches: list[int], context: int
) -> None:
    """Change the rows of a cost model, which were measured at rest, so that they fit the times that
    the engine needs under load.

    The cost of a request is measured with the largest batch, where it has the largest effect. Rows
    of a batch of one are not changed, because there are no other requests that could slow it down.
    """
    at_rest = fit_engine_costs(data)
    slopes = dict(zip(at_rest.batches, at_rest.per_kv_token, strict=True))
    levels = dict(zip(at_rest.batches, at_rest.fixed, strict=True))
    few, many = _LOAD_TOKENS
    loads = {batch: await profiler.load(batch, context, many) for batch in batches}
    largest = batches[-1]
    short = await profiler.load(largest, context, few)
    per_request = request_seconds(short, loads[largest], slopes[largest])
    for row in data["decode"]:
        batch = row["batch"]
        if batch in loads:
            level = loads[batch].step_seconds(per_request, slopes[batch])
            row["seconds"] = round(max(0.0, row["seconds"] + level - levels[batch]), 7)
    moved = per_request - at_rest.request_seconds - at_rest.prefill(context, 0.0)
    for row in data["prefill"]:
        row["seconds"] = round(max(0.0, row["seconds"] + moved), 7)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} is {text!r}; it must be a list of positive integers like 1,4,16")
    return numbers


def profile_command(
    url: str, out: Path, batches: str, contexts: str, new_tokens: int, api_key: str
) -> None:
    """Measure the engine at `url`, write its cost model to the file `out`, and print the time of a
    decode step (fixed, and per KV token) for each batch size.

    Raises:
        UserError: An option is invalid, or the file cannot be written.
        ComponentFailure: The engine failed, or the measurement took too long.
    """
    sizes, lengths = _numbers("--batches", batches), _numbers("--contexts", contexts)

    async def measure() -> dict[str, Any]:
        from megatron_async.engines.sglang.client import SGLangClient

        client = await SGLangClient.connect("profiled", url, EngineConfig(api_key=api_key))
        try:
            async with asyncio.timeout(_MEASUREMENT_SECONDS):
                return await profile(client, sizes, lengths, new_tokens)
        finally:
            await client.close()

    try:
        data = asyncio.run(measure())
    except EngineError as error:
        raise ComponentFailure(f"profile-engine: {error}") from error
    except TimeoutError as error:
        raise ComponentFailure(
            f"profile-engine: measuring {url} took more than {_MEASUREMENT_SECONDS:.0f} s"
        ) from error
    fitted = fit_engine_costs(data)
    with writing(out):
        out.write_text(yaml.safe_dump(data, sort_keys=False))
    for batch, fixed, per_kv in zip(fitted.batches, fitted.fixed, fitted.per_kv_token, strict=True):
        typer.echo(f"batch {batch}: {1e3 * fixed:.3f} ms + {1e6 * per_kv:.4f} us per KV token")
    typer.echo(f"wrote the cost model to {out}; use it with simulate.cost_model={out}")
