"""Does an old KV cache hurt? PipelineRL's ablation (arXiv 2509.19128) on the real engine.

    python -m benchmarks.stale_kv --model runs/quickstart/sft --out benchmarks/results/stale_kv.md

Drift. A short on-policy training leaves one set of weights for each step. For each lag g,
responses are sampled (a) with the weights of steps n - g .. n put in under the running requests,
cache kept, (b) the same with the cache recomputed, (c) whole, with the weights of step n - g; and
(d), the floor, whole with those of step n. The same prompts each time. Every sampled token's
log-prob under the weights of step n is computed by the trainer: KL(sampled by || step n) per token,
by its unbiased k1 and its low-variance k3 estimator, and the ESS share of the importance ratios.

Learning. From the same fine-tuned model and for equal samples: `pipeline` with the cache kept, the
same recomputed, and `sync` whose every batch is taken in G minibatches, so that whole responses are
up to G - 1 versions old. One trainer rank and one warm engine for all.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command_line
from benchmarks.papers.training import GROUP, Training, configure, train
from megatron_async.checkpoint.convert import megatron_to_hf
from megatron_async.config import RunConfig
from megatron_async.engines.interface import GenerationRequest, PauseMode
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.tasks import build_task
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion, Prompt

SAMPLING_SECONDS = 600.0
KEEP, RECOMPUTE = "in flight, cache kept", "in flight, cache recomputed"
WHOLE, FLOOR = "whole, g versions old", "whole, on-policy (floor)"
PAUSES: dict[str, PauseMode] = {KEEP: "in_place", RECOMPUTE: "retract"}


@dataclass(frozen=True)
class Row:
    """One run: accuracies in percent, reward and spread over its last quarter."""

    name: str
    before: float
    after: float
    reward: float
    worst_drop: float
    seconds: float
    ess: float
    lag_mean: float
    lag_max: float


def row_of(run: Training) -> Row:
    """Return the row of a training."""
    rewards = np.array(run.series("rollout/reward_mean"))
    return Row(
        run.name,
        run.before,
        run.after,
        run.final_reward,
        float((np.maximum.accumulate(rewards) - rewards).max()),
        run.seconds,
        run.mean("off_policy/ess"),
        run.mean("rollout/lag_mean"),
        run.largest("rollout/lag_max"),
    )


def table(rows: list[Row]) -> str:
    """Return a Markdown table of trainings."""
    out = [
        "| run | accuracy before | after | reward, last quarter | largest fall of reward "
        "| wall s | ESS | lag mean / max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.name} | {r.before:.1f} % | {r.after:.1f} % | {r.reward:.3f} | {r.worst_drop:.3f} "
        f"| {r.seconds:.0f} | {r.ess:.3f} | {r.lag_mean:.2f} / {r.lag_max:.0f} |"
        for r in rows
    ]
    return "\n".join(out)


@dataclass
class Sample:
    """One response as the engine reported it; grows while it streams."""

    prompt: Prompt
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class Drift:
    """KL of what sampled to the newest weights, per response token."""

    arm: str
    lag: int
    tokens: int
    mean_token_lag: float
    k1: float
    k3: float
    ess: float


async def sample(
    client: SGLangClient,
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Sequence[Path],
    pause: PauseMode | None,
    stop_token_ids: tuple[int, ...],
    span: int,
) -> list[Sample]:
    """Respond to all prompts at once, under `weights[0]`, `weights[1]`, ... in turn.

    Update i happens when the longest response so far has i / len(weights) of `span` tokens.
    """
    number = {path: int(path.name) for path in weights}
    await client.flush_cache()  # waits until what ended a moment ago is gone
    await client.load_from_disk(weights[0], PolicyVersion(0, number[weights[0]]))
    samples = [Sample(prompt, [], [], []) for prompt in prompts]
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
            mine.token_ids += chunk.token_ids.tolist()
            mine.logprobs += chunk.logprobs.tolist()
            mine.versions += [chunk.version.number] * len(chunk.token_ids)
            progress.set()
        running -= 1
        progress.set()

    async def update() -> None:
        assert pause is not None
        for part, path in enumerate(weights[1:], start=1):
            reach = part * span / len(weights)
            while running and max(len(s.token_ids) for s in samples) < reach:
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


def pack(samples: Sequence[Sample], step: int) -> TokenBatch:
    """Samples as one packed batch; the prompt is not scored."""
    lengths_S = [len(s.prompt.token_ids) + len(s.token_ids) for s in samples]
    prompts_S = np.array([len(s.prompt.token_ids) for s in samples], np.int32)
    count = len(samples)

    def stream(prompt_value: float, of: str, dtype: Any) -> Any:
        parts = [[prompt_value] * len(s.prompt.token_ids) + list(getattr(s, of)) for s in samples]
        return np.concatenate([np.asarray(part, dtype) for part in parts])

    tokens_T: IntArray = np.concatenate(
        [np.concatenate([s.prompt.token_ids, np.asarray(s.token_ids, np.int32)]) for s in samples]
    ).astype(np.int32)
    versions_T = stream(-1, "versions", np.int32)
    mask_T = (versions_T >= 0).astype(np.float32)
    return TokenBatch(
        step=step,
        token_ids_T=tokens_T,
        loss_mask_T=mask_T,
        rollout_logprobs_T=stream(0.0, "logprobs", np.float32),
        version_T=versions_T,
        lag_T=np.where(mask_T > 0, step - versions_T, 0).astype(np.int32),
        cu_seqlens_S1=np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32),
        rewards_S=np.zeros(count, np.float32),
        group_ids_S=np.arange(count, dtype=np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=prompts_S,
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=np.zeros(count, np.bool_),
    )


def drift(arm: str, lag: int, batch: TokenBatch, newest_T: FloatArray) -> Drift:
    """Both estimators of KL(sampled by || newest) over response tokens, and the ESS share."""
    scored = batch.loss_mask_T > 0
    log_ratio = (newest_T - batch.rollout_logprobs_T)[scored].astype(np.float64)
    ratio = np.exp(log_ratio)
    return Drift(
        arm,
        lag,
        int(scored.sum()),
        float(batch.lag_T[scored].mean()),
        float(-log_ratio.mean()),
        float((ratio - 1 - log_ratio).mean()),
        float(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum())),
    )


def versions_of_a_training(
    options: argparse.Namespace, root: Path, url: str, count: int
) -> list[Path]:
    """Hugging Face directories `0` ... `count`: the weights after each on-policy step."""
    config = configure(
        "versions",
        {
            "steps": count,
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
        raise RuntimeError(f"{len(checkpoints)} checkpoints were kept of {count}")
    return paths


async def sample_arms(
    options: argparse.Namespace, config: RunConfig, url: str, paths: Sequence[Path]
) -> dict[tuple[str, int], list[Sample]]:
    """Responses of every arm at every lag."""
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


def measure_drift(options: argparse.Namespace, root: Path, url: str) -> list[Drift]:
    """The first half: KL by arm and lag."""
    paths = versions_of_a_training(options, root, url, max(options.lags))
    config = configure("drift", {}, options.model, root, options)
    config = config.with_section("model", path=str(paths[-1]))
    sampled = asyncio.run(sample_arms(options, config, url, paths))
    rows = []
    with parallel_session(config.parallel, config.trainer, config.seed):
        trainer = PolicyTrainer(config)
        for (arm, lag), samples in sampled.items():
            batch = replace(pack(samples, len(paths) - 1), temperature=config.sampling.temperature)
            rows.append(drift(arm, lag, batch, trainer.compute_logprobs(batch)))
    return rows


def learning_runs(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The second half: overrides of the three runs, equal in samples and updates."""
    pipeline = {"preset": "pipeline", "groups_per_batch": options.groups}
    updates = options.whole_updates
    return {
        "pipeline, cache kept": {"schedule": {**pipeline, "kv": "keep"}},
        "pipeline, cache recomputed": {"schedule": {**pipeline, "kv": "recompute"}},
        f"whole responses, {updates} updates a batch": {
            "steps": options.steps // updates,
            "schedule": {
                "preset": "sync",
                "groups_per_batch": options.groups * updates,
                "updates_per_batch": updates,
                "concurrency": options.groups * updates * GROUP,
            },
        },
    }


def drift_table(rows: Sequence[Drift]) -> str:
    """Markdown."""
    out = [
        "| sampled | g | response tokens | mean token lag | KL, k1 | KL, k3 | ESS share |",
        "|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.arm} | {r.lag} | {r.tokens:,} | {r.mean_token_lag:.2f} | {r.k1:.2e} | {r.k3:.2e} "
        f"| {r.ess:.4f} |"
        for r in rows
    ]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4, 8], help="g")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--span", type=int, default=64, help="tokens over which updates spread")
    parser.add_argument("--lr", type=float, default=2e-4, help="of the training that drifts")
    parser.add_argument("--steps", type=int, default=32, help="updates of each learning run")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 in an update")
    parser.add_argument("--whole-updates", type=int, default=4, help="G of the third run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-learning", action="store_true")
    parser.add_argument("--out", type=Path, help="write the tables here too")
    options = parser.parse_args()
    parts = []
    with tempfile.TemporaryDirectory(prefix="stale-kv-") as scratch:
        root = Path(scratch)
        # Tokens are reported soon, so that an update meets the place that is meant for it.
        fine = {"engines": {"stream_interval": 4}}
        engines = configure("engine", fine, options.model, root, options).engines
        process = SGLangProcess(options.model, engines, root / "engine.log")
        process.start()
        try:
            parts.append(drift_table(measure_drift(options, root, process.url)))
            print(parts[-1], flush=True)
            if not options.no_learning:
                rows = []
                for name, overrides in learning_runs(options).items():
                    config = configure(name, overrides, options.model, root, options)
                    rows.append(row_of(train(config, process.url)))
                    print(rows[-1], file=sys.stderr, flush=True)
                parts.append(table(rows))
                print(parts[-1])
        finally:
            process.stop()
    if options.out is not None:
        command = command_line("benchmarks.stale_kv")
        text = "\n\n".join(parts)
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()
