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

Invariants
- A decode measurement uses only the time in which all its requests run.
- Prefill is measured twice: alone, at several lengths, which gives its slope; and under load, where
  requests start and end all the time, which gives its level (HTTP, tokenless bookkeeping and the
  batching of prefills included). `seconds` is the former, moved to the latter.
- Prompts are random tokens, new ones for each request, and the server's prefix cache is flushed
  before each measurement, so that nothing is prefilled for free.
- The server must be idle otherwise; its weights and settings are not touched.
"""

from __future__ import annotations

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
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.rollout.interfaces import EngineClient, EngineError, GenerationRequest
from megatron_async.simulate.engine_costs import FORMAT, FORMAT_VERSION, fit_engine_costs

_TOKEN_IDS = 32
"""Prompts use ids 1..31, which every tokenizer has."""
_PREFILL_REPEATS = 3
_LOAD_ROUNDS = 4
_LOAD_TOKENS = (16, 48)
"""Mean response lengths of the two measurements under load."""
_MEASUREMENT_SECONDS = 600.0


@dataclass(frozen=True)
class Arrival:
    """One chunk of one request: when it came and how many tokens the request has since then."""

    at: float
    tokens: int


def decode_seconds(arrivals: list[list[Arrival]]) -> tuple[float, float]:
    """(seconds a step, mean tokens a request had) while all requests ran.

    The time from the moment when the last request has its first chunk until the first request ends;
    each request's rate is taken between its own chunks in that time. Raises ComponentFailure when
    there are too few chunks to tell.
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


def seconds_per_request(short: tuple[float, int], long: tuple[float, int], requests: int) -> float:
    """The part of the time that goes with requests, not with tokens; never below 0.

    (seconds, tokens) of two runs with equally many requests: seconds = requests q + tokens k.
    """
    (first, few), (second, many) = short, long
    return max(0.0, (first * many - second * few) / (requests * (many - few)))


class EngineProfiler:
    """Measures through an `EngineClient`."""

    def __init__(self, client: EngineClient, new_tokens: int, seed: int = 0) -> None:
        self._client = client
        self._new_tokens = new_tokens
        self._rng = np.random.default_rng(seed)
        self._serial = 0

    async def decode(self, batch: int, context: int) -> dict[str, float]:
        """One row of `decode`."""
        await self._client.flush_cache()
        arrivals = await asyncio.gather(
            *(self._generate(context, self._new_tokens) for _ in range(batch))
        )
        seconds, generated = decode_seconds(arrivals)
        kv_tokens = batch * (context + generated)
        return {"batch": batch, "kv_tokens": round(kv_tokens), "seconds": round(seconds, 7)}

    async def prefill(self, tokens: int, step_seconds: float) -> dict[str, float]:
        """One row of `prefill`."""
        times = []
        for _ in range(_PREFILL_REPEATS):
            await self._client.flush_cache()
            began = time.monotonic()
            await self._generate(tokens, 1)
            times.append(time.monotonic() - began)
        seconds = max(0.0, statistics.median(times) - step_seconds)
        return {"tokens": tokens, "seconds": round(seconds, 7)}

    async def request_seconds(self, batch: int, context: int) -> float:
        """What one request costs beside its decode steps, with `batch` in flight all the time."""
        short, long = [await self._load(batch, context, tokens) for tokens in _LOAD_TOKENS]
        return seconds_per_request(short, long, batch * _LOAD_ROUNDS)

    async def _load(self, batch: int, context: int, mean_tokens: int) -> tuple[float, int]:
        """(seconds, tokens) of `batch` clients that send their requests one after the other."""
        await self._client.flush_cache()
        lengths = self._rng.integers(
            mean_tokens // 2, mean_tokens * 3 // 2 + 1, (batch, _LOAD_ROUNDS)
        )

        async def client(own: list[int]) -> None:
            for tokens in own:
                await self._generate(context, tokens)

        began = time.monotonic()
        await asyncio.gather(*(client(row) for row in lengths.tolist()))
        return time.monotonic() - began, int(lengths.sum())

    async def _generate(self, context: int, new_tokens: int) -> list[Arrival]:
        self._serial += 1
        request = GenerationRequest(
            request_id=f"profile-{self._serial}",
            input_ids=self._rng.integers(1, _TOKEN_IDS, context).astype(np.int32),
            max_new_tokens=new_tokens,
            sampling=SamplingConfig(),
            ignore_eos=True,
        )
        arrivals: list[Arrival] = []
        tokens = 0
        async for chunk in self._client.generate(request):
            tokens += len(chunk.token_ids)
            arrivals.append(Arrival(time.monotonic(), tokens))
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
    if max(batches) > 1:
        under_load = await profiler.request_seconds(max(batches), lengths[0])
        moved = under_load - prefill[0]["seconds"]
        for row in prefill:
            row["seconds"] = round(max(0.0, row["seconds"] + moved), 7)
    return {
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
        from megatron_async.rollout.sglang_client import SGLangClient

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
    out.write_text(yaml.safe_dump(data, sort_keys=False))
    for batch, fixed, per_kv in zip(fitted.batches, fitted.fixed, fitted.per_kv_token, strict=True):
        typer.echo(f"batch {batch}: {1e3 * fixed:.3f} ms + {1e6 * per_kv:.4f} us per KV token")
    typer.echo(f"cost model in {out}; use it with simulate.cost_model={out}")
