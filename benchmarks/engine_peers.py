"""The engine on CPU beside transformers' `generate`: decode and prefill at the same sizes.

    python -m benchmarks.engine_peers                               # the quickstart's architecture
    python -m benchmarks.engine_peers --model DIR --decode 16 --name SmolLM2-135M

One server and one model in this process, on the same weights in float32; each round measures one
after the other, so that other load on the machine hits both, and a ratio is of one round. Decode:
so many requests at once, each a prompt of 8 tokens and a forced length, greedy for transformers and
sampled at temperature 1 with log-probs for the engine, which is what a run asks of it. Prefill:
so many different prompts of a given length and one new token. transformers gets its prompts as one
batch without padding, its best case. The engine computes on one core (its HTTP process runs on
another); transformers is measured with one thread and with one for each core.

Every measurement appends a row to --rows, and the table is of all rows of that name, so that a
later call adds rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.command import command_line
from benchmarks.engine import SETTINGS, drain
from benchmarks.rows import Row, append, read, spread
from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.models.tiny_model import build_tiny_model

_PROMPT_OF_DECODE = 8
_LONGEST = 32768


def prompts(count: int, length: int, vocabulary: int, seed: int) -> np.ndarray[Any, Any]:
    """Different token ids for each request and each seed: nothing of them is in a prefix cache."""
    rng = np.random.default_rng(seed)
    return rng.integers(5, vocabulary, (count, length), dtype=np.int32)


async def engine_seconds(client: SGLangClient, tokens_SL: np.ndarray[Any, Any], new: int) -> float:
    """All requests at once, until the last has ended."""
    stamp = time.monotonic_ns()
    requests = [
        GenerationRequest(f"p{stamp}-{i}", row, new, SamplingConfig(), ignore_eos=True)
        for i, row in enumerate(tokens_SL)
    ]
    began = time.perf_counter()
    counts = await asyncio.gather(*(drain(client, one) for one in requests))
    seconds = time.perf_counter() - began
    assert sum(counts) == new * len(requests), "the engine left tokens out"
    return seconds


@torch.no_grad()
def transformers_seconds(model: Any, tokens_SL: np.ndarray[Any, Any], new: int) -> float:
    """One call of `generate` for all."""
    ids = torch.from_numpy(tokens_SL).long()
    began = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
    )
    seconds = time.perf_counter() - began
    assert out.shape[1] == ids.shape[1] + new, "transformers left tokens out"
    return seconds


def one_round(
    url: str, model: Any, vocabulary: int, number: int, options: argparse.Namespace
) -> None:
    """Append a row for each phase and number of requests."""

    async def on_engine(tokens_SL: np.ndarray[Any, Any], new: int) -> float:
        client = await SGLangClient.connect("peers", url, SETTINGS)
        try:
            return await engine_seconds(client, tokens_SL, new)
        finally:
            await client.close()

    seed = number * 1000
    for requests in options.requests:
        sizes = {
            "decode": (_PROMPT_OF_DECODE, options.decode),
            "prefill": (options.prefill, 1),
        }
        for phase, (length, new) in sizes.items():
            counted = requests * (new if phase == "decode" else length)
            seed += 1
            tokens_SL = prompts(requests, length, vocabulary, seed)
            rates = {"engine": counted / asyncio.run(on_engine(tokens_SL, new))}
            for threads in sorted({1, os.cpu_count() or 1}):
                torch.set_num_threads(threads)
                rates[f"threads_{threads}"] = counted / transformers_seconds(model, tokens_SL, new)
            key = {"name": options.name, "phase": phase, "requests": requests, "round": number}
            length_of = {"prompt": length, "new": new}
            append(options.rows, key | length_of | rates | {"date": f"{datetime.date.today()}"})


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians and ranges over rounds."""
    threads = sorted({key for row in rows for key in row if key.startswith("threads_")})
    names = [f"transformers, {t.removeprefix('threads_')} thread(s)" for t in threads]
    out = [
        f"| model | phase | requests | prompt + new | rounds | engine | {' | '.join(names)} "
        f"| {' | '.join('engine / ' + name for name in names)} |",
        "|---|---|--:|--:|--:|--:|" + "--:|" * (2 * len(threads)),
    ]
    keys = ("name", "phase", "requests", "prompt", "new")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        of = [row for row in rows if tuple(row[k] for k in keys) == key]
        rates = [spread([row[t] for row in of], 0) for t in threads]
        ratios = [spread([row["engine"] / row[t] for row in of]) for t in threads]
        name, phase, requests, prompt, new = key
        cells = [
            *(name, phase, str(requests), f"{prompt} + {new}", str(len(of))),
            *(spread([row["engine"] for row in of], 0), *rates, *ratios),
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--name", default="quickstart", help="its name in the table")
    parser.add_argument("--requests", nargs="+", type=int, default=[32, 96])
    parser.add_argument("--decode", type=int, default=128, help="new tokens of a decode request")
    parser.add_argument("--prefill", type=int, default=250, help="prompt of a prefill request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-args", nargs="*", default=[], help="more SGLang arguments")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/engine_peers.jsonl"))
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    before = [row["round"] for row in read(options.rows) if row["name"] == options.name]
    first = 1 + max(before, default=-1)
    with tempfile.TemporaryDirectory() as name:
        path = options.model or Path(name) / "model"
        if options.model is None:
            build_tiny_model(path, seed=0)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        settings = SETTINGS.model_copy(
            update={"max_total_tokens": _LONGEST, "extra_args": options.engine_args}
        )
        process = SGLangProcess(path, settings, Path(name) / "engine.log")
        process.start()
        try:
            for number in range(first, first + options.rounds):
                one_round(process.url, model, model.config.vocab_size, number, options)
        finally:
            process.stop()
    text = table(read(options.rows))
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.engine_peers")
        options.out.write_text(f"`{command}`, {datetime.date.today()}, tokens/s\n\n{text}\n")


if __name__ == "__main__":
    main()
