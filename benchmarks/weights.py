"""What a weight update costs: seconds by phase, bytes by transport, and how long generation waits.

    python -m benchmarks.weights --gigabytes 1.1 --out benchmarks/results/weights.md

A Megatron trainer of one rank (this process) and one SGLang server on the same CPU, on a random
Qwen3 in float32. The raw bandwidth of gloo's broadcast between two processes is measured in the
same run, before each update, with as many bytes in buffers of the size of a bucket. The
difference of `delta` is that of a real optimizer step. Figures are medians over `--repeats`.

Two processes that copy through the loopback keep both cores of a small machine busy. A link that is
slower than memory leaves them time: `bash benchmarks/limited_loopback.sh 10gbit python -m ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.command import command_line
from megatron_async.config import RunConfig, build_config
from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.models.families import rules_of
from megatron_async.models.tiny_model import TinyModel, build_tiny_model
from megatron_async.rollout.probe import PROMPTS, TOKENS, errors, packed, sample
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.publisher import WeightPublisher
from megatron_async.weight_sync.transports.base import TransferReport
from megatron_async.weight_sync.verify import engine_parameter

MIB = 1 << 20
LAYER_PARAMETERS = 1536 * (1536 + 2 * 512 + 1536 + 3 * 6144)
# Mean error of log-probs with which `delta` passes.
_ROUNDED_TO_BFLOAT16 = 0.05
TRANSPORTS = ("distributed", "tensor", "disk", "delta")
RUNNING = 2
SMALL_BUCKET_MIB = 8
# The estimate's stated figures: what a 70B update would meet on a cluster.
PARAMETERS_70B = 70.6e9
LINK_GBIT = 400.0
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
    """The other process: receive all buffers again and again, until one begins with a zero."""
    group = _group(dist.TCPStore("127.0.0.1", port, 2), 1)
    buffers = torch.ones(count, size, dtype=torch.uint8)
    while True:
        for buffer in buffers:
            _broadcast(group, buffer)
            if not buffer[0]:
                return


class RawLink:
    """A gloo group of two processes that do nothing but broadcast.

    As many bytes as the model has, between memory that both sides have touched before: a single
    buffer would stay in the caches, which no model does.
    """

    def __init__(self, size: int, count: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            2,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._buffers = torch.ones(count, size, dtype=torch.uint8)
        numbers = [str(number) for number in (port, size, count)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights", "--receive", *numbers]
        )
        self._group = _group(store, 0)
        self.measure()

    def measure(self) -> float:
        """Bytes a second of broadcasting all buffers once."""
        began = time.perf_counter()
        for buffer in self._buffers:
            _broadcast(self._group, buffer)
        return self._buffers.nbytes / (time.perf_counter() - began)

    def close(self) -> None:
        self._buffers[0, 0] = 0
        _broadcast(self._group, self._buffers[0])
        self._process.wait(60)


# ------------------------------------------------------------ trainer and engine


def settings(model: Path, transport: str, bucket_mib: int) -> RunConfig:
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


def training_batch(vocab: int, step: int) -> TokenBatch:
    """Eight random responses of 32 tokens."""
    rng = np.random.default_rng(step)
    count, length = 8, 32
    total = count * length
    mask_T = np.tile(np.arange(length) >= 4, count).astype(np.float32)
    zeros_T = np.zeros(total, np.int32)
    return TokenBatch(
        step=step,
        token_ids_T=rng.integers(0, vocab, total, dtype=np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=(rng.normal(-3.0, 0.2, total) * mask_T).astype(np.float32),
        version_T=zeros_T,
        lag_T=zeros_T,
        cu_seqlens_S1=np.arange(0, total + 1, length, dtype=np.int32),
        rewards_S=(np.arange(count) % 2).astype(np.float32),
        group_ids_S=(np.arange(count) // 4).astype(np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=np.full(count, 4, np.int32),
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=np.zeros(count, np.bool_),
    )


@dataclass
class Update:
    """One measured update."""

    report: TransferReport
    verify_seconds: float
    still_seconds: float
    raw: float


@dataclass
class Bench:
    """The trainer, the engine, and everything measured so far."""

    trainer: PolicyTrainer
    model: Path
    url: str
    folder: Path
    raw: RawLink
    bucket_mib: int
    number: int = 0
    updates: dict[str, list[Update]] = field(default_factory=dict)
    dropped: list[Update] = field(default_factory=list)

    def train(self) -> None:
        report = self.trainer.train_batch(training_batch(self.trainer.vocab_size, self.number))
        if report.skipped:
            raise RuntimeError(f"the step was skipped: {report.skip_reason}")

    @contextmanager
    def publisher(self, transport: str, bucket_mib: int | None = None) -> Iterator[WeightPublisher]:
        config = settings(self.model, transport, bucket_mib or self.bucket_mib)
        publisher = WeightPublisher(config, self.trainer.model, self.folder / transport)
        try:
            yield publisher
        finally:
            publisher.close()

    def update(self, publisher: WeightPublisher, label: str | None) -> Update:
        """Publish with requests running; `label` None: not recorded."""
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
        return found

    def update_of_receiver(self, publisher: WeightPublisher, receiver: EngineAddress) -> None:
        """Publish to a process that joins the same kind of group, and drops what it receives."""
        raw = self.raw.measure()
        self.number += 1
        publisher.publish([receiver], PolicyVersion(0, self.number))
        assert publisher.report is not None
        self.dropped.append(Update(publisher.report, 0.0, 0.0, raw))
        print(f"receiver: {publisher.report}, raw {raw / 1e9:.2f} GB/s", file=sys.stderr)

    async def _update(self, publisher: WeightPublisher, raw: float) -> Update:
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
                raise RuntimeError("the engine did not take the update")
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
        weights = settings(self.model, "disk", 1).weights
        await client.checksum()
        prompts = [np.array([5, 6, 7, i], np.int32) for i in range(PROMPTS)]
        limit = weights.timeout_seconds
        samples = await sample(client, prompts, SamplingConfig(), version, TOKENS, limit)
        logprobs_T = self.trainer.compute_logprobs(packed(samples, 1.0))
        [error] = errors(samples, logprobs_T).values()
        if not error.mean <= _ROUNDED_TO_BFLOAT16:
            raise RuntimeError(f"the engine does not hold the trainer's weights: {error}")


async def _stream(client: SGLangClient, name: str, arrivals: list[float]) -> None:
    prompt = np.array([5, 6, 7], dtype=np.int32)
    request = GenerationRequest(name, prompt, 2000, SamplingConfig(), ignore_eos=True)
    async for _ in client.generate(request):
        arrivals.append(time.perf_counter())


# ------------------------------------------------------------ tables


def middle(updates: list[Update], value: Callable[[Update], float]) -> float:
    return statistics.median(value(update) for update in updates)


def phase_table(bench: Bench) -> list[str]:
    lines = [
        "| transport | update, s | phases (they overlap), s | verify, s | generation stands "
        "still, s |",
        "|---|--:|---|--:|--:|",
    ]
    for label, updates in bench.updates.items():
        names = updates[0].report.phases
        phases = ", ".join(
            f"{name} {statistics.median(u.report.phases.get(name, 0.0) for u in updates):.2f}"
            for name in names
        )
        lines.append(
            f"| {label} | {middle(updates, lambda u: u.report.seconds):.2f} | {phases} | "
            f"{middle(updates, lambda u: u.verify_seconds):.2f} | "
            f"{middle(updates, lambda u: u.still_seconds):.2f} |"
        )
    return lines


def byte_table(bench: Bench) -> list[str]:
    lines = ["| transport | bytes sent to one engine, GB | share of the weights |", "|---|--:|--:|"]
    for label, updates in bench.updates.items():
        sent = middle(updates, lambda u: float(u.report.sent_bytes))
        whole = middle(updates, lambda u: float(u.report.bytes))
        lines.append(f"| {label} | {sent / 1e9:.4f} | {sent / whole:.1%} |")
    return lines


def share_lines(bench: Bench) -> list[str]:
    updates = bench.updates["distributed"]
    before_load = middle(
        updates,
        lambda u: (
            u.report.bytes
            / (u.report.seconds - sum(u.report.phases[name] for name in ("begin", "load", "end")))
            / u.raw
        ),
    )
    whole = middle(updates, lambda u: u.report.bytes / u.report.seconds / u.raw)
    to_receiver = middle(bench.dropped, lambda u: u.report.bytes / u.report.seconds / u.raw)
    raws = [u.raw for found in bench.updates.values() for u in found]
    return [
        f"Raw gloo broadcast in buffers of {bench.bucket_mib} MiB: "
        f"{statistics.median(raws) / 1e9:.2f} GB/s (median of {len(raws)} pairs, "
        f"{min(raws) / 1e9:.2f} to {max(raws) / 1e9:.2f}).",
        "",
        f"- `distributed`, gather and transfer from the end of the engine's running step (`begin`) "
        f"until the last byte has arrived: {before_load:.0%} of the raw bandwidth.",
        f"- the same to a process that joins the same kind of group, receives in the same way and "
        f"drops what it received, instead of SGLang: {to_receiver:.0%}.",
        f"- the whole update, with that wait and the load of the last bucket: {whole:.0%}.",
    ]


def estimate_lines(bench: Bench, small: list[Update]) -> list[str]:
    """70B: bytes over the stated link at the measured share, and measured seconds per bucket."""
    large = bench.updates["distributed"]
    more = middle(small, lambda u: u.report.buckets) - middle(large, lambda u: u.report.buckets)
    slower = middle(small, lambda u: u.report.seconds) - middle(large, lambda u: u.report.seconds)
    per_bucket = max(0.0, slower / more)
    size = 2 * PARAMETERS_70B
    link = LINK_GBIT / 8 * 1e9
    count = -(-size // (512 * MIB))
    share = min(1.0, middle(large, lambda u: u.report.bytes / u.report.seconds / u.raw))
    return [
        f"{size / 1e9:.0f} GB in bfloat16, {count:.0f} buckets of 512 MiB, one sender at a time on "
        f"a link of {LINK_GBIT:.0f} Gbit/s ({link / 1e9:.0f} GB/s). Lower bound by bytes: "
        f"{size / link:.1f} s. At the share of the raw bandwidth that the whole update had here "
        f"({share:.0%}): {size / link / share:.1f} s. Each bucket costs {per_bucket * 1e3:.0f} ms "
        f"beside its bytes (measured with buckets of {bench.bucket_mib} and of {SMALL_BUCKET_MIB} "
        f"MiB), which is {count * per_bucket:.1f} s more if none of it overlaps. **So about "
        f"{size / link / share:.0f} to {size / link / share + count * per_bucket:.0f} s. This is "
        "arithmetic on CPU measurements and a stated link, not a measurement on GPUs.**",
        "",
        "Others report, on GPUs: SGLang's flattened buckets 30B in 2.5 s, slime 30B in about 7 to "
        "16 s against a lower bound of 1 s.",
    ]


def measure(arguments: argparse.Namespace, folder: Path) -> list[str]:
    model = folder / "model"
    layers = max(1, round(arguments.gigabytes * 1e9 / 4 / LAYER_PARAMETERS))
    shape = TinyModel(
        hidden_size=1536, layers=layers, heads=12, kv_heads=4, head_dim=128, ffn_size=6144,
        init_std=0.02,
    )  # fmt: skip
    parameters = build_tiny_model(model, seed=1, shape=shape)
    config = settings(model, "distributed", arguments.bucket_mib)
    process = SGLangProcess(model, config.engines, folder / "engine.log")
    process.start()
    size = arguments.bucket_mib * MIB
    raw = RawLink(size, -(-4 * parameters // size))
    try:
        with parallel_session(config.parallel, config.trainer, config.seed):
            trainer = PolicyTrainer(config)
            bench = Bench(trainer, model, process.url, folder, raw, arguments.bucket_mib)
            small = run(bench, arguments.transports, arguments.repeats)
            return report(bench, small, parameters, arguments)
    finally:
        raw.close()
        process.stop()


@contextmanager
def receiver(bench: Bench) -> Iterator[EngineAddress]:
    """A process with SGLang's endpoints that receives weights and loads nothing."""
    known = bench.folder / "names.json"
    tensors = bench.trainer.model[0].architecture
    names = [
        name
        for rule in rules_of(tensors)
        for layer in range(tensors.num_layers)
        for name in rule.tensor_names(layer, 0)
    ]
    known.write_text(json.dumps(sorted({engine_parameter(name) for name in names})))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.weight_sync.fake_engine", "drops", str(known)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield EngineAddress("receiver", f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait(10)


def run(bench: Bench, transports: list[str], repeats: int) -> list[Update]:
    """All updates; returns those with small buckets, which only the estimate uses."""
    for transport in dict.fromkeys(["distributed", *transports]):
        if transport == "delta":
            continue
        with bench.publisher(transport) as publisher:
            bench.update(publisher, None)  # connects, warms
            for _ in range(repeats):
                bench.update(publisher, transport)
    with receiver(bench) as address, bench.publisher("distributed") as publisher:
        for _ in range(repeats + 1):
            bench.update_of_receiver(publisher, address)
        del bench.dropped[0]
    with bench.publisher("distributed", SMALL_BUCKET_MIB) as publisher:
        bench.update(publisher, None)
        small = [bench.update(publisher, None) for _ in range(repeats)]
    if "delta" in transports:
        with bench.publisher("delta") as publisher:
            bench.update(publisher, "delta, whole")
            for _ in range(repeats):
                bench.train()
                bench.update(publisher, "delta, after an optimizer step")
    return small


def limit() -> str:
    """What `limited_loopback.sh` has done to the loopback, in words."""
    rate = os.environ.get(LIMIT_VARIABLE)
    return f" limited to {rate} by a token bucket" if rate else ""


def report(
    bench: Bench, small: list[Update], parameters: int, arguments: argparse.Namespace
) -> list[str]:
    size = bench.updates["distributed"][0].report.bytes
    return [
        "# What a weight update costs",
        "",
        f"`{command_line('benchmarks.weights')}`, {datetime.date.today()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}. A Qwen3 of "
        f"{parameters / 1e6:.0f} million parameters in float32 ({size / 1e9:.2f} GB), one trainer "
        f"rank, one SGLang server, loopback{limit()}; medians of {arguments.repeats}. Trainer, "
        "engine and the raw link's second process share the cores.",
        "",
        *phase_table(bench),
        "",
        "## Bytes",
        "",
        *byte_table(bench),
        "",
        "`tensor` counts the base64 of a pickle by value, as on a CPU; on a GPU it sends handles. "
        "The difference is that of one Adam step with learning rate 1e-6 on all weights.",
        "",
        "## Share of the raw bandwidth",
        "",
        *share_lines(bench),
        "",
        "## Estimate: 70B on NCCL",
        "",
        *estimate_lines(bench, small),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="weights, in float32")
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="beside `distributed`, which is always measured",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--receive", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(*arguments.receive)
        return
    with tempfile.TemporaryDirectory() as folder:
        text = "\n".join(measure(arguments, Path(folder))) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
