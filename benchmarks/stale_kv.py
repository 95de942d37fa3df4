"""Measures the effect of an old KV cache on the real engine (PipelineRL, arXiv 2509.19128).

    python -m benchmarks.stale_kv --model runs/quickstart/sft --out benchmarks/results/stale_kv.md

A short on-policy training gives one version of the weights for each step, up to step n. For each
lag g, responses to the same prompts are sampled in four ways:

(a) Requests run while the engine loads the weights of steps n - g to n, one after the other. The KV
    cache is kept.
(b) As (a), but the KV cache is recomputed after each load.
(c) Whole responses are sampled with the weights of step n - g.
(d) Whole responses are sampled with the weights of step n. This is the floor: on-policy drift.

The trainer computes the log-prob of every sampled token under the weights of step n. The table has
KL(sampling policy || step n) per token, with the unbiased estimator k1 and the low-variance
estimator k3, and the effective sample size of the importance ratios as a share (ESS share).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.papers.training import configure, engine, train
from benchmarks.reporting import publish, table
from megatron_async.checkpoint.convert import megatron_to_hf
from megatron_async.config import RunConfig
from megatron_async.engines.interface import GenerationRequest, PauseMode
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.tasks import build_task
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import (
    FinishReason,
    FloatArray,
    Group,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)

SAMPLING_SECONDS = 600.0
KEEP, RECOMPUTE = "in flight, cache kept", "in flight, cache recomputed"
WHOLE, FLOOR = "whole, g versions old", "whole, on-policy (floor)"
PAUSES: dict[str, PauseMode] = {KEEP: "in_place", RECOMPUTE: "retract"}


@dataclass
class Sample:
    """A response as reported by its engine; it grows while the engine generates."""

    prompt: Prompt
    segments: list[Segment]

    @property
    def tokens(self) -> int:
        """Number of response tokens so far."""
        return sum(map(len, self.segments))


async def sample(
    client: SGLangClient,
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Sequence[Path],
    pause: PauseMode | None,
    stop_token_ids: tuple[int, ...],
    span: int,
) -> list[Sample]:
    """Sample responses to all prompts at once, and load other weights during generation.

    Args:
        client: Client of the engine.
        config: Settings of the run.
        prompts: Prompts; each gets one response.
        weights: Model directories, whose names are version numbers. Generation starts with the
            first. Directory i is loaded when the longest response has i / len(weights) of `span`
            tokens.
        pause: How requests are paused during a load; None if `weights` has one directory.
        stop_token_ids: Tokens that end a response.
        span: Number of tokens over which the loads are spread.
    """
    number = {path: int(path.name) for path in weights}
    await client.flush_cache()  # also waits until the engine has removed ended requests
    await client.load_from_disk(weights[0], PolicyVersion(0, number[weights[0]]))
    samples = [Sample(prompt, []) for prompt in prompts]
    running = len(samples)
    progress = asyncio.Event()

    async def respond(index: int, mine: Sample) -> None:
        nonlocal running
        request = GenerationRequest(
            request_id=f"s{index}",
            input_ids=mine.prompt.token_ids,
            max_new_tokens=config.sampling.max_new_tokens,
            sampling=config.sampling,
            stop_token_ids=stop_token_ids,
        )
        async for chunk in client.generate(request):
            mine.segments.append(Segment(chunk.token_ids, chunk.logprobs, chunk.version))
            progress.set()
        running -= 1
        progress.set()

    async def update() -> None:
        assert pause is not None
        for part, path in enumerate(weights[1:], start=1):
            reach = part * span / len(weights)
            while running and max(one.tokens for one in samples) < reach:
                progress.clear()
                await progress.wait()
            if not running:
                return
            await client.pause(pause)
            await client.load_from_disk(
                path, PolicyVersion(0, number[path]), flush_cache=pause == "retract"
            )
            await client.resume()

    work = [respond(index, mine) for index, mine in enumerate(samples)]
    if len(weights) > 1:
        work.append(update())
    await asyncio.wait_for(asyncio.gather(*work), SAMPLING_SECONDS)
    return samples


def pack(samples: Sequence[Sample], step: int, temperature: float) -> TokenBatch:
    """Pack the samples in order as the batch of update `step`, from which lags are counted."""
    groups = []
    for number, one in enumerate(samples):
        trajectory = Trajectory(
            number,
            group_id=number,
            prompt=one.prompt,
            state=TrajectoryState.SCORED,
            segments=tuple(one.segments),
            finish_reason=FinishReason.STOP,
            reward=0.0,
        )
        groups.append(Group(number, one.prompt, (trajectory,)))
    return pack_groups(groups, step=step, lineage=0, branch_points={}, temperature=temperature)


def drift(batch: TokenBatch, newest_T: FloatArray) -> list[str]:
    """Return cells of a row: tokens, lag, both estimates of KL(sampling || newest), ESS share."""
    scored = batch.loss_mask_T > 0
    log_ratio = (newest_T - batch.rollout_logprobs_T)[scored].astype(np.float64)
    ratio = np.exp(log_ratio)
    k1, k3 = float(-log_ratio.mean()), float((ratio - 1 - log_ratio).mean())
    ess = float(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()))
    tokens, lag = int(scored.sum()), float(batch.lag_T[scored].mean())
    return [f"{tokens:,}", f"{lag:.2f}", f"{k1:.2e}", f"{k3:.2e}", f"{ess:.4f}"]


def versions_of_a_training(options: argparse.Namespace, root: Path, url: str) -> list[Path]:
    """Train on-policy; return Hugging Face directories with the weights of versions 0, 1, ..."""
    count = options.steps
    config = configure(
        "versions",
        {
            "schedule": {"preset": "sync"},
            "optimizer": {"lr": options.lr},
            "checkpoint": {"every_steps": 1, "keep": count + 1, "asynchronous": False},
        },
        options.model,
        root,
        options,
    )
    train(config, url)
    folder = root / "weights"
    folder.mkdir()
    paths = [folder / "0"]
    paths[0].symlink_to(options.model.resolve())
    checkpoints = sorted((root / "versions" / "checkpoints").glob("*/manifest.json"))
    for number, manifest in enumerate(checkpoints, start=1):
        paths.append(folder / str(number))
        megatron_to_hf(manifest.parent, paths[-1])
    if len(paths) != count + 1:
        raise RuntimeError(f"the run kept {len(checkpoints)} of {count} checkpoints")
    return paths


async def sample_arms(
    options: argparse.Namespace, config: RunConfig, url: str, paths: Sequence[Path]
) -> dict[tuple[str, int], list[Sample]]:
    """Sample the responses of every arm at every lag; return them by arm and lag."""
    task = build_task(config.task, str(options.model))
    prompts = [p for p in task.eval_prompts(options.prompts) for _ in range(options.samples)]
    client = await SGLangClient.connect("stale-kv", url, config.engines)
    newest = len(paths) - 1
    plan: dict[tuple[str, int], tuple[Sequence[Path], PauseMode | None]] = {
        (FLOOR, 0): (paths[newest:], None)
    }
    for lag in options.lags:
        for arm, pause in PAUSES.items():
            plan[arm, lag] = (paths[newest - lag :], pause)
        plan[WHOLE, lag] = (paths[newest - lag : newest - lag + 1], None)
    results = {}
    try:
        for (arm, lag), (weights, mode) in plan.items():
            results[arm, lag] = await sample(
                client, config, prompts, weights, mode, tuple(task.stop_token_ids), options.span
            )
            print(arm, lag, "sampled", file=sys.stderr, flush=True)
    finally:
        await client.close()
    return results


def measure_drift(options: argparse.Namespace, root: Path, url: str) -> str:
    """Measure the drift of every arm at every lag; return the table."""
    paths = versions_of_a_training(options, root, url)
    config = configure("drift", {}, options.model, root, options)
    config = config.with_section("model", path=str(paths[-1]))
    sampled = asyncio.run(sample_arms(options, config, url, paths))
    rows = []
    with parallel_session(config.parallel, config.trainer, config.seed):
        trainer = PolicyTrainer(config)
        for (arm, lag), samples in sampled.items():
            batch = pack(samples, len(paths) - 1, config.sampling.temperature)
            rows.append([arm, lag, *drift(batch, trainer.compute_logprobs(batch))])
    header = "sampled | g | response tokens | mean token lag | KL, k1 | KL, k3 | ESS share"
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4, 8], help="lags g")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument(
        "--span", type=int, default=64, help="tokens over which weight updates are spread"
    )
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of the training")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 per update")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    options = parser.parse_args()
    options.steps = max(options.lags)
    with tempfile.TemporaryDirectory(prefix="stale-kv-") as scratch:
        root = Path(scratch)
        # The engine reports tokens often, so that each update happens close to its intended token.
        fine = {"engines": {"stream_interval": 4}}
        config = configure("engine", fine, options.model, root, options)
        with engine(config, root / "engine.log") as url:
            text = measure_drift(options, root, url)
    publish("benchmarks.stale_kv", "What old KV caches do to ratios", text, options.out)


if __name__ == "__main__":
    main()
