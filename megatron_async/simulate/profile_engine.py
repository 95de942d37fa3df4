"""`megatron-async profile-engine`: measure a running SGLang server, write its cost model as YAML.

The file (read by `simulate.cost_model`):

    format: megatron_async.engine_cost
    format_version: 1
    measured: {url: ..., date: ..., new_tokens: 64}
    kv_capacity_tokens: 65536
    decode:                       # one decode step of `batch` requests that read `kv_tokens` of KV
      - {batch: 16, kv_tokens: 2560, seconds: 0.0123}
    prefill:                      # what a request costs beside its decode steps
      - {tokens: 128, seconds: 0.004}

Everything is measured twice. At rest (requests of one length that start together; a prefill alone)
it gives slopes: over KV tokens, over prompt tokens. Under load, where requests of all lengths start
and end all the time, it gives levels, with all that comes on top in a run: batches of unequal
lengths, prefills between decode steps, HTTP, slots that are empty for a round trip. `seconds` is
the former, moved to the latter.

Invariants
- A decode measurement at rest uses only the time in which all its requests run; one under load
  only the time in which no slot is without a request.
- Prompts are random tokens, new ones for each request, and the server's prefix cache is flushed
  before each measurement, so that nothing is prefilled for free.
- The server must be idle otherwise; its weights and settings are not touched.
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
"""Prompts use ids 1..31, which every tokenizer has."""
_PREFILL_REPEATS = 3
_LOAD_TOKENS = (16, 48)
"""Mean response lengths of the two measurements under load."""
_LOAD_STEPS = 192
"""Decode steps that a measurement under load takes, about; small batches take more of them."""
_LOAD_REQUESTS = 64
"""At least so many, or their mean length could be far from the one asked for."""
_MEASUREMENT_SECONDS = 600.0


@dataclass(frozen=True)
class Arrival:
    """A chunk of a request: when it came, and how many tokens the request has since then."""

    at: float
    tokens: int


def decode_seconds(arrivals: list[list[Arrival]]) -> tuple[float, float]:
    """(seconds a step, mean tokens a request had) while all requests ran.

    The time from the moment when the last request has its first chunk until the first request ends;
    each request's rate is taken between its own chunks in that time. Raises ComponentFailure when
    there are too few chunks.
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
            "enough; raise --new-tokens"
        )
    return statistics.median(rates), statistics.fmean(middles)


@dataclass(frozen=True)
class Load:
    """Chunks that `batch` clients, each with one request after the other, got in a window.

    `kv_tokens`: what the batch held on average.
    """

    batch: int
    seconds: float
    requests: int
    tokens: int
    kv_tokens: float

    def seconds_without_kv(self, per_kv_token: float) -> float:
        """The window without the time for reading KV."""
        return self.seconds - self.tokens / self.batch * per_kv_token * self.kv_tokens

    def step_seconds(self, request_seconds: float, per_kv_token: float) -> float:
        """A decode step's seconds beside its KV, when each request costs `request_seconds`."""
        left = self.seconds_without_kv(per_kv_token) - self.requests * request_seconds
        return max(0.0, left * self.batch / self.tokens)


def request_seconds(short: Load, long: Load, per_kv_token: float) -> float:
    """The part of the time that goes with requests, not with tokens; never below 0.

    Both loads have the same batch: window = requests q + tokens / batch (step + KV), two equations
    for q and step.
    """
    first, second = (load.seconds_without_kv(per_kv_token) for load in (short, long))
    determinant = short.requests * long.tokens - long.requests * short.tokens
    return max(0.0, (first * long.tokens - second * short.tokens) / determinant)


class EngineProfiler:
    """Measures through an `EngineClient`."""

    def __init__(self, client: EngineClient, new_tokens: int) -> None:
        self._client = client
        self._new_tokens = new_tokens
        self._rng = np.random.default_rng(0)
        self._serial = 0

    async def decode(self, batch: int, context: int) -> dict[str, float]:
        """Return a row of `decode`."""
        await self._client.flush_cache()
        arrivals = await asyncio.gather(
            *(self._generate(context, self._new_tokens) for _ in range(batch))
        )
        seconds, generated = decode_seconds(arrivals)
        kv_tokens = batch * (context + generated)
        return {"batch": batch, "kv_tokens": round(kv_tokens), "seconds": round(seconds, 7)}

    async def prefill(self, tokens: int, step_seconds: float) -> dict[str, float]:
        """Return a row of `prefill`."""
        times = []
        for _ in range(_PREFILL_REPEATS):
            await self._client.flush_cache()
            began = time.monotonic()
            await self._generate(tokens, 1)
            times.append(time.monotonic() - began)
        seconds = max(0.0, statistics.median(times) - step_seconds)
        return {"tokens": tokens, "seconds": round(seconds, 7)}

    async def load(self, batch: int, context: int, mean_tokens: int) -> Load:
        """`batch` clients at work: prompts of `context` tokens, responses of geometric length.

        A geometric length has no memory: ends are spread evenly from the beginning, and a running
        request has `mean_tokens` on average.
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
        began, ended = sorted(ends)[batch - 1], sorted(ends)[wanted - 1]
        return Load(
            batch,
            ended - began,
            wanted - batch,
            sum(arrival.tokens for arrival in arrivals if began < arrival.at <= ended),
            batch * (context + mean_tokens),
        )

    async def _generate(self, context: int, new_tokens: int) -> list[Arrival]:
        """Run a request to its end; returns its chunks with the tokens so far."""
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
    """The whole cost model. Raises EngineError, ComponentFailure."""
    profiler = EngineProfiler(client, new_tokens)
    await profiler.decode(1, contexts[0])  # the first requests of a server compile and allocate
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
    """Move the rows of a cost model that was measured at rest to what they are under load.

    What a request costs is taken from the largest batch, where it matters. A batch of one has no
    neighbors: it stays.
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
    moved = per_request - at_rest.prefill(context, 0.0)
    for row in data["prefill"]:
        row["seconds"] = round(max(0.0, row["seconds"] + moved), 7)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text!r} is not a list of positive numbers like 1,4,16")
    return numbers


def profile_command(
    url: str, out: Path, batches: str, contexts: str, new_tokens: int, api_key: str
) -> None:
    """Measure and write. Raises UserError for bad options, ComponentFailure for a dead engine."""
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
            f"profile-engine: {url} took more than {_MEASUREMENT_SECONDS:.0f} s"
        ) from error
    fitted = fit_engine_costs(data)
    with writing(out):
        out.write_text(yaml.safe_dump(data, sort_keys=False))
    for batch, fixed, per_kv in zip(fitted.batches, fitted.fixed, fitted.per_kv_token, strict=True):
        typer.echo(f"batch {batch}: {1e3 * fixed:.3f} ms + {1e6 * per_kv:.4f} us per KV token")
    typer.echo(f"cost model in {out}; use it with simulate.cost_model={out}")
