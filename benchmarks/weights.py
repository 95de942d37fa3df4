"""Measures weight updates: seconds of phases, bytes of transports, and the pause of generation.

    python -m benchmarks.weights --gigabytes 1.1 --out benchmarks/results/weights.md

A Megatron trainer of one rank (this process) sends the weights of a random Qwen3 in float32 to one
SGLang server on the same CPU. Before each update, the program measures the raw bandwidth of gloo's
broadcast between two processes, with the same number of bytes, in buffers of the size of a bucket.
The transport `delta` sends the difference of a real optimizer step. Results are medians over
`--repeats`.

Two processes that copy through the loopback interface keep both cores of a small machine busy. To
measure with a link that is slower than memory, so that the cores are not always busy, run
`bash benchmarks/limited_loopback.sh 10gbit python -m ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_check.models import ragged_batch
from benchmarks.papers.training import engine
from benchmarks.reporting import publish, table
from megatron_async.config import RunConfig, build_config
from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.models.tiny_model import TinyModel, build_tiny_model
from megatron_async.rollout.probe import PROMPTS, TOKENS, errors, packed, sample
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.publisher import WeightPublisher
from megatron_async.weight_sync.transports.base import TransferReport

MIB = 1 << 20
LAYER_PARAMETERS = 1536 * (1536 + 2 * 512 + 1536 + 3 * 6144)
# Largest accepted mean error of log-probs; `delta` rounds weights to bfloat16.
_ROUNDED_TO_BFLOAT16 = 0.05
TRANSPORTS = ("distributed", "tensor", "disk", "delta")
RUNNING = 2
LIMIT_VARIABLE = "LOOPBACK_LIMIT"


# ------------------------------------------------------------ raw bandwidth


def _group(store: Any, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=120))


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def receive(port: int, size: int, count: int) -> None:
    """Receive all buffers repeatedly, until one starts with a zero; runs in the other process."""
    group = _group(dist.TCPStore("127.0.0.1", port, 2), 1)
    buffers = torch.ones(count, size, dtype=torch.uint8)
    while True:
        for buffer in buffers:
            _broadcast(group, buffer)
            if not buffer[0]:
                return


class RawLink:
    """A gloo group of two processes that only broadcast.

    They broadcast as many bytes as the model has, between memory that both sides have written
    before. A single buffer would stay in the CPU's caches, but a model does not.
    """

    def __init__(self, size: int, count: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        self._buffers = torch.ones(count, size, dtype=torch.uint8)
        self._process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(store.port, size, count), daemon=True
        )
        self._process.start()
        self._group = _group(store, 0)
        self.measure()

    def measure(self) -> float:
        """Broadcast all buffers once; return the bytes per second."""
        began = time.perf_counter()
        for buffer in self._buffers:
            _broadcast(self._group, buffer)
        return self._buffers.nbytes / (time.perf_counter() - began)

    def close(self) -> None:
        self._buffers[0, 0] = 0
        _broadcast(self._group, self._buffers[0])
        self._process.join(60)


# ------------------------------------------------------------ trainer and engine


def settings(model: Path, transport: str, bucket_mib: int) -> RunConfig:
    """Return the settings of a run with this model, transport and size of buckets."""
    return build_config(
        {
            "model": {"path": str(model)},
            "optimizer": {"lr": 1e-6},
            "schedule": {"preset": "async"},
            "algorithm": {"recipe": "pg"},
            "engines": {"device": "cpu", "max_total_tokens": 4096},
            "sampling": {"max_new_tokens": 2048},
            "weights": {"transport": transport, "bucket_mib": bucket_mib},
        }
    )


@dataclass
class Update:
    """Measurements of one update.

    Attributes:
        report: The transport's report.
        verify_seconds: Seconds of the verification of weights.
        still_seconds: Seconds from the pause of generation to the next token.
        raw: Raw bandwidth before the update, in bytes per second.
    """

    report: TransferReport
    verify_seconds: float
    still_seconds: float
    raw: float


@dataclass
class Bench:
    """The trainer, the engine, and all measurements so far."""

    trainer: PolicyTrainer
    model: Path
    url: str
    folder: Path
    raw: RawLink
    bucket_mib: int
    number: int = 0
    updates: dict[str, list[Update]] = field(default_factory=dict)

    def train(self) -> None:
        """Make one optimizer step on eight random sequences, so that the weights change."""
        batch = ragged_batch([32] * 8, self.trainer.vocab_size, step=self.number)
        rewards_S = (np.arange(8) % 2).astype(np.float32)
        report = self.trainer.train_batch(replace(batch, rewards_S=rewards_S))
        if report.skipped:
            raise RuntimeError(f"the step was skipped: {report.skip_reason}")

    @contextmanager
    def publisher(self, transport: str) -> Iterator[WeightPublisher]:
        """Yield a publisher with this transport; close it at the end."""
        config = settings(self.model, transport, self.bucket_mib)
        publisher = WeightPublisher(config, self.trainer.model, self.folder / transport)
        try:
            yield publisher
        finally:
            publisher.close()

    def update(self, publisher: WeightPublisher, label: str | None) -> None:
        """Publish the weights while requests run; record the update as `label` if it is given."""
        raw = self.raw.measure()
        self.number += 1
        found = asyncio.run(self._update(publisher, raw))
        if label is not None:
            self.updates.setdefault(label, []).append(found)
        print(
            f"{label}: {found.report.seconds:.2f} s, {found.report.sent_bytes / 1e9:.3f} GB, "
            f"raw {raw / 1e9:.2f} GB/s, still {found.still_seconds:.2f} s, "
            f"phases { ({k: round(v, 2) for k, v in found.report.phases.items()}) }",
            file=sys.stderr,
            flush=True,
        )

    async def _update(self, publisher: WeightPublisher, raw: float) -> Update:
        """Pause running requests, publish the weights, resume, and verify; return measurements."""
        config = settings(self.model, "distributed", self.bucket_mib)
        client = await SGLangClient.connect("engine", self.url, config.engines)
        try:
            arrivals: list[float] = []
            tasks = [
                asyncio.create_task(_stream(client, f"r{self.number}-{i}", arrivals))
                for i in range(RUNNING)
            ]
            while len(arrivals) < 2 * RUNNING:
                await asyncio.sleep(0.01)
            await client.pause("retract")
            paused = time.perf_counter()
            version = PolicyVersion(0, self.number)
            publish = asyncio.to_thread(
                publisher.publish, [EngineAddress("engine", self.url)], version
            )
            if await publish != ["engine"]:
                raise RuntimeError("the engine did not load the update")
            await client.resume()
            seen = len(arrivals)
            while len(arrivals) == seen:
                await asyncio.sleep(0.001)
            still = arrivals[seen] - paused
            await client.abort([f"r{self.number}-{i}" for i in range(RUNNING)])
            await asyncio.gather(*tasks)
            began = time.perf_counter()
            await self._verify(client, version)
            verified = time.perf_counter() - began
        finally:
            await client.close()
        assert publisher.report is not None
        return Update(publisher.report, verified, still, raw)

    async def _verify(self, client: SGLangClient, version: PolicyVersion) -> None:
        """Check that log-probs of tokens sampled from the engine agree with the trainer's."""
        weights = settings(self.model, "disk", 1).weights
        await client.checksum()
        prompts = [np.array([5, 6, 7, i], np.int32) for i in range(PROMPTS)]
        limit = weights.timeout_seconds
        samples = await sample(client, prompts, SamplingConfig(), version, TOKENS, limit)
        logprobs_T = self.trainer.compute_logprobs(packed(samples, 1.0))
        [error] = errors(samples, logprobs_T).values()
        if not error.mean <= _ROUNDED_TO_BFLOAT16:
            raise RuntimeError(f"the engine's weights differ from the trainer's: {error}")


async def _stream(client: SGLangClient, name: str, arrivals: list[float]) -> None:
    prompt = np.array([5, 6, 7], dtype=np.int32)
    request = GenerationRequest(name, prompt, 2000, SamplingConfig(), ignore_eos=True)
    async for _ in client.generate(request):
        arrivals.append(time.perf_counter())


# ------------------------------------------------------------ tables


def middle(updates: list[Update], value: Callable[[Update], float]) -> float:
    return statistics.median(value(update) for update in updates)


def phase_table(bench: Bench) -> str:
    """Return a table of each transport's median seconds."""
    header = (
        "transport | update, s | phases (they overlap), s | verify, s | generation stands still, s"
    )
    rows = []
    for label, updates in bench.updates.items():
        phases = ", ".join(
            f"{name} {statistics.median(u.report.phases.get(name, 0.0) for u in updates):.2f}"
            for name in updates[0].report.phases
        )
        seconds = middle(updates, lambda u: u.report.seconds)
        verify = middle(updates, lambda u: u.verify_seconds)
        still = middle(updates, lambda u: u.still_seconds)
        rows.append((label, f"{seconds:.2f}", phases, f"{verify:.2f}", f"{still:.2f}"))
    return table(header, rows)


def byte_table(bench: Bench) -> str:
    """Return a table of the bytes that each transport sends."""
    rows = []
    for label, updates in bench.updates.items():
        sent = middle(updates, lambda u: float(u.report.sent_bytes))
        whole = middle(updates, lambda u: float(u.report.bytes))
        rows.append((label, f"{sent / 1e9:.4f}", f"{sent / whole:.1%}"))
    return table("transport | bytes sent to one engine, GB | share of the weights", rows)


def share_lines(bench: Bench) -> str:
    """Return text with the raw bandwidth and the share of it that `distributed` reaches."""
    updates = bench.updates["distributed"]

    def before_load(update: Update) -> float:
        report = update.report
        waits = sum(report.phases[name] for name in ("begin", "load", "end"))
        return report.bytes / (report.seconds - waits) / update.raw

    whole = middle(updates, lambda u: u.report.bytes / u.report.seconds / u.raw)
    raws = [u.raw for found in bench.updates.values() for u in found]
    return (
        f"Raw gloo broadcast in buffers of {bench.bucket_mib} MiB: "
        f"{statistics.median(raws) / 1e9:.2f} GB/s (median of {len(raws)} pairs, "
        f"{min(raws) / 1e9:.2f} to {max(raws) / 1e9:.2f}).\n\n"
        "- `distributed`, gather and transfer, from the end of the engine's running step (`begin`) "
        f"to the arrival of the last byte: {middle(updates, before_load):.0%} of the raw "
        "bandwidth.\n"
        "- The whole update, including the wait for that step and the load of the last bucket: "
        f"{whole:.0%}."
    )


def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """Measure all transports; return the text of the result file."""
    model = folder / "model"
    layers = max(1, round(arguments.gigabytes * 1e9 / 4 / LAYER_PARAMETERS))
    shape = TinyModel(
        hidden_size=1536, layers=layers, heads=12, kv_heads=4, head_dim=128, ffn_size=6144,
        init_std=0.02,
    )  # fmt: skip
    parameters = build_tiny_model(model, seed=1, shape=shape)
    config = settings(model, "distributed", arguments.bucket_mib)
    size = arguments.bucket_mib * MIB
    with engine(config, folder / "engine.log") as url:
        raw = RawLink(size, -(-4 * parameters // size))
        try:
            with parallel_session(config.parallel, config.trainer, config.seed):
                bench = Bench(PolicyTrainer(config), model, url, folder, raw, arguments.bucket_mib)
                run(bench, arguments.transports, arguments.repeats)
        finally:
            raw.close()
    return report(bench, parameters, arguments.repeats)


def run(bench: Bench, transports: list[str], repeats: int) -> None:
    """Make all updates of the chosen transports."""
    for transport in dict.fromkeys(["distributed", *transports]):
        if transport == "delta":
            continue
        with bench.publisher(transport) as publisher:
            # The first update is not measured, because it connects to the engines.
            bench.update(publisher, None)
            for _ in range(repeats):
                bench.update(publisher, transport)
    if "delta" in transports:
        with bench.publisher("delta") as publisher:
            bench.update(publisher, "delta, whole")
            for _ in range(repeats):
                bench.train()
                bench.update(publisher, "delta, after an optimizer step")


def limit() -> str:
    """Return the bandwidth limit that `limited_loopback.sh` has set, in words."""
    rate = os.environ.get(LIMIT_VARIABLE)
    return f" limited to {rate} by a token bucket" if rate else ""


def report(bench: Bench, parameters: int, repeats: int) -> str:
    """Return the text of the result file."""
    size = bench.updates["distributed"][0].report.bytes
    return "\n\n".join(
        [
            f"torch {torch.__version__}. A Qwen3 of {parameters / 1e6:.0f} million parameters in "
            f"float32 ({size / 1e9:.2f} GB), one trainer rank, one SGLang server, "
            f"loopback interface{limit()}. Numbers are medians of {repeats}. The trainer, the "
            "engine and the second process of the raw link share the cores.",
            phase_table(bench),
            "## Bytes",
            byte_table(bench),
            "On a CPU, `tensor` sends a pickle of all values in base64, which is counted here. On "
            "a GPU, it sends handles. The difference of `delta` is that of one Adam step with "
            "learning rate 1e-6 on all weights.",
            "## Share of the raw bandwidth",
            share_lines(bench),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="size of the float32 weights")
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="transports in addition to `distributed`, which is always measured",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = measure(arguments, Path(folder))
    publish("benchmarks.weights", "What a weight update costs", text, arguments.out)


if __name__ == "__main__":
    main()
