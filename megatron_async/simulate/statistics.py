"""Collects the results of a simulated run, which are counters for each step, and summarizes them
without the warm-up steps.

Invariants
- Shares of time are shares of the virtual time between two publications of weights: the one that
  ends the warm-up, and the last one.
- The lag of a trained token is the step that trains it minus the policy version that generated it.
  The lag in samples of a trajectory is the number of trajectories in the batches a to n - 1, where
  a is the oldest policy version of its trained tokens and n its batch (`trajectory.sample_lag`).
- The part of a lag in the queue is n minus the policy version that engines served when the group
  was completed, that is, when its last trajectory got a reward. The rest is the part before the
  queue.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron_async.simulate.engine import Engine, EngineCounters, Tokens
from megatron_async.trajectory.sample_lag import SamplesTrained


@dataclass(frozen=True, slots=True)
class StepRow:
    """One batch that the trainer has received, with the seconds that it waited for it and trained
    on it.

    Attributes:
        step: Number of the training step.
        sequences: Number of trajectories.
        tokens: Number of prompt and response tokens.
        waited: Seconds that the trainer waited for the batch.
        seconds: Seconds of training on the batch.
    """

    step: int
    sequences: int
    tokens: int
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchLag:
    """Lag of the trained tokens of one batch.

    Attributes:
        step: Number of the training step.
        tokens: Number of trained tokens.
        lag_sum: Sum of the lags of the trained tokens, in policy versions.
        queue_sum: Sum of the parts of these lags in the queue.
        lag_max: Largest lag of a trained token.
        off_policy: Number of trained tokens whose lag is not 0.
        trajectories: Number of trajectories with trained tokens.
        samples_sum: Sum of the lags in samples of these trajectories.
        samples_max: Largest lag in samples of these trajectories.
    """

    step: int
    tokens: int
    lag_sum: float
    queue_sum: float
    lag_max: int
    off_policy: int
    trajectories: int
    samples_sum: int
    samples_max: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters at the time when a policy version is published.

    Attributes:
        at: Virtual time in seconds.
        update_seconds: Seconds of the weight update, from the end of training to the publication.
        concurrency: Number of requests in flight that the scheduler aims at (N').
        engines: Sums of the counters of all engines.
        wasted: Number of tokens of dropped and restarted trajectories so far.
        waiting: Seconds so far in which requests could run that only the trainer's progress
            permits.
    """

    at: float
    update_seconds: float
    concurrency: int
    engines: EngineCounters
    wasted: int
    waiting: float


@dataclass(frozen=True)
class Summary:
    """Results of a simulated run after its warm-up; seconds are virtual seconds.

    Attributes:
        step_seconds: Mean seconds of a training step.
        rollout_seconds: Mean seconds per step that the trainer waits for a batch.
        train_seconds: Mean seconds of training on a batch.
        update_seconds: Mean seconds from the end of training until the new version is published. A
            background publication overlaps the next training.
        tokens_per_second: Trained tokens per second.
        engine_idle: Share of the time in which engines neither decode nor prefill. Weight transfers
            count as idle. On GPUs shared with the trainer, only the time outside training counts.
        trainer_idle: Share of the time in which the trainer waits for a batch.
        rollout_waits: Share of the time in which requests could run that only the trainer's
            progress permits (`Scheduler.waits_for_trainer`).
        gpu_idle: Share of the time of all GPUs without decode, prefill or training.
        slots_busy: Mean number of requests in the engines' decode batches while engines are busy,
            as a share of the number of requests in flight that the scheduler aims at (N').
        kv_full: Share of the engines' busy time in which requests wait for space in the KV cache.
        concurrency: Number of requests in flight (N') at the end.
        lag_mean: Mean lag of trained tokens, in policy versions.
        lag_in_queue: The part of `lag_mean` from the completion of the groups until training; the
            rest is the part before.
        lag_max: Largest lag of a trained token.
        longest_decile: Share of the longest tenth of all sampled responses among the trained
            responses, relative to a tenth (`length_bias`).
        lag_samples_mean: Mean lag in samples of the trained trajectories.
        lag_samples_max: Largest lag in samples.
        off_policy: Share of the trained tokens whose lag is not 0.
        recomputed: Number of tokens that were prefilled again, divided by the number of generated
            tokens. It is the sum of the next three values.
        recomputed_at_resume: The part of `recomputed` that was due to resumed responses.
        recomputed_at_preemption: The part of `recomputed` that was due to preempted requests.
        recomputed_at_update: The part of `recomputed` that was due to weight updates that discarded
            the KV cache.
        wasted: Number of generated tokens of dropped and restarted trajectories, divided by the
            number of all generated tokens.
        dropped: Number of dropped trajectories by reason, of the whole run.
        warnings: The scheduler's warnings by name.
    """

    step_seconds: float
    rollout_seconds: float
    train_seconds: float
    update_seconds: float
    tokens_per_second: float
    engine_idle: float
    trainer_idle: float
    rollout_waits: float
    gpu_idle: float
    slots_busy: float
    kv_full: float
    concurrency: int
    lag_mean: float
    lag_in_queue: float
    lag_max: int
    longest_decile: float
    lag_samples_mean: float
    lag_samples_max: int
    off_policy: float
    recomputed: float
    recomputed_at_resume: float
    recomputed_at_preemption: float
    recomputed_at_update: float
    wasted: float
    dropped: dict[str, int]
    warnings: dict[str, str]


def length_bias(
    sampled: Sequence[int], trained: Sequence[tuple[int, int]], *, tokens: bool = False
) -> list[float]:
    """Compare the lengths of trained responses with those of sampled responses, by decile of the
    sampled lengths.

    Args:
        sampled: Lengths of sampled responses, whether or not they were trained.
        trained: Length and number of trained tokens of each trained response
            (`Statistics.lengths`).
        tokens: Whether shares are shares of tokens instead of responses. Only these show that
            `on_stale: mask` leaves out tokens of long responses.

    Returns:
        For each decile, from the shortest lengths to the longest, the share of the trained
        responses (or tokens) in it divided by the share of the sampled ones. All values are 1 if
        lengths do not influence what is trained. Equal lengths can leave a decile empty; its value
        is nan.
    """
    lengths = np.asarray(sampled)
    edges = np.quantile(lengths, np.arange(1, 10) / 10)

    def shares(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        found = np.bincount(np.searchsorted(edges, values), weights, minlength=10)
        return found / found.sum()

    whole, used = np.asarray(trained).T
    weights = (used, lengths) if tokens else (np.ones_like(used), np.ones_like(lengths))
    with np.errstate(invalid="ignore"):
        ratios = shares(whole, weights[0]) / shares(lengths, weights[1])
    return [float(ratio) for ratio in ratios]


class Statistics:
    """Collects counters while a simulated run proceeds, and summarizes them at its end.

    Attributes:
        lengths: For each emitted batch, the length and the number of trained tokens of each
            response. They differ only under `on_stale: mask`.
        sampled: Length of each sampled response, whether or not it is trained.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._reported_preemptions = dict.fromkeys((engine.engine_id for engine in engines), 0)
        self._wasted = 0
        self.waiting_seconds = 0.0
        self._trained = SamplesTrained()
        self.dropped: Counter[str] = Counter()
        self.warnings: dict[str, str] = {}
        self.rows: list[StepRow] = []
        self.lags: list[BatchLag] = []
        self.lengths: list[list[tuple[int, int]]] = []
        self.sampled: list[int] = []
        self.marks: list[_Mark] = []

    def new_preemptions(self, engine: Engine) -> int:
        """Return the number of requests that `engine` has preempted since the last call for this
        engine."""
        total = engine.counters.preemptions
        news = total - self._reported_preemptions[engine.engine_id]
        self._reported_preemptions[engine.engine_id] = total
        return news

    def wasted(self, tokens: int) -> None:
        """Count `tokens` generated tokens of a dropped or restarted trajectory."""
        self._wasted += tokens

    def batch(
        self,
        step: int,
        versions: Sequence[Tokens],
        completed: Sequence[int],
        mask_before: int | None,
    ) -> None:
        """Record the lags of an emitted batch.

        Args:
            step: Number of the training step.
            versions: For each trajectory, its tokens by policy version.
            completed: For each trajectory, the policy number that engines served when its group was
                completed.
            mask_before: Tokens of policy versions before this one are not trained; None if all are
                trained.
        """
        whole = [sum(count for _, count in spans) for spans in versions]
        if mask_before is not None:
            versions = [[span for span in spans if span[0] >= mask_before] for spans in versions]
        trained = (sum(count for _, count in spans) for spans in versions)
        self.lengths.append(list(zip(whole, trained, strict=True)))
        tokens: dict[int, int] = {}
        for version, count in itertools.chain.from_iterable(versions):
            lag = step - version
            tokens[lag] = tokens.get(lag, 0) + count
        total = sum(tokens.values())
        lag_sum = float(sum(lag * count for lag, count in tokens.items()))
        queue_sum = float(
            sum(
                (step - number) * sum(count for _, count in spans)
                for number, spans in zip(completed, versions, strict=True)
            )
        )
        of_tokens = (total, lag_sum, queue_sum, max(tokens, default=0), total - tokens.get(0, 0))
        # Versions never decrease within a trajectory, so its first trained span has the oldest one.
        samples = [self._trained.between(spans[0][0], step) for spans in versions if spans]
        of_samples = (len(samples), sum(samples), max(samples, default=0))
        self._trained.add(len(versions))
        self.lags.append(BatchLag(step, *of_tokens, *of_samples))

    def published(self, at: float, update_seconds: float, concurrency: int) -> None:
        """Record the counters at virtual time `at`, when a new policy version is published to all
        engines."""
        for engine in self._engines:
            engine.advance(at)
        totals = EngineCounters()
        for item in fields(EngineCounters):
            values = (getattr(engine.counters, item.name) for engine in self._engines)
            setattr(totals, item.name, sum(values))
        counted = (totals, self._wasted, self.waiting_seconds)
        self.marks.append(_Mark(at, update_seconds, concurrency, *counted))

    def _longest_decile(self, warmup: int) -> float:
        """Return `Summary.longest_decile`; nan if responses are episodes or have equal lengths."""
        trained = [pair for batch in self.lengths[warmup:] for pair in batch]
        return length_bias(self.sampled, trained)[-1] if self.sampled and trained else math.nan

    def summary(self, warmup: int, *, engine_gpus: int, trainer_gpus: int, shared: bool) -> Summary:
        """Summarize the training steps after the first `warmup` steps.

        Args:
            warmup: Number of steps to exclude at the start. With 0, the first step is excluded too.
            engine_gpus: Number of GPUs of all engines.
            trainer_gpus: Number of GPUs of the trainer.
            shared: Whether engines and trainer use the same GPUs.
        """
        first, marks = max(1, warmup), self.marks
        start, end = marks[first - 1], marks[-1]
        wall = end.at - start.at
        steps = len(marks) - first
        rows = self.rows[first : len(marks)]
        lags = self.lags[first : len(marks)]
        counters = {
            item.name: getattr(end.engines, item.name) - getattr(start.engines, item.name)
            for item in fields(EngineCounters)
        }
        generated = max(1.0, counters["generated"])
        update = sum(mark.update_seconds for mark in marks[first:])
        trained = sum(row.seconds for row in rows)
        waited = sum(row.waited for row in rows)
        busy = counters["busy_seconds"] / len(self._engines)
        generating = max(wall - trained, 1e-12) if shared else wall
        if shared:
            gpu_busy = (busy + trained) / wall
        else:
            both = engine_gpus + trainer_gpus
            gpu_busy = (busy * engine_gpus + trained * trainer_gpus) / (wall * both)
        slots = counters["slot_seconds"] / (max(busy, 1e-12) * end.concurrency)
        tokens = sum(lag.tokens for lag in lags)
        lag_mean = sum(lag.lag_sum for lag in lags) / max(1, tokens)
        lag_in_queue = sum(lag.queue_sum for lag in lags) / max(1, tokens)
        recomputed = {
            name: counters[f"{name}_prefill"] / generated
            for name in ("resumed", "preempted", "updated")
        }
        return Summary(
            step_seconds=wall / steps,
            rollout_seconds=waited / steps,
            train_seconds=trained / steps,
            update_seconds=update / steps,
            tokens_per_second=tokens / wall,
            engine_idle=1 - busy / generating,
            trainer_idle=waited / wall,
            rollout_waits=(end.waiting - start.waiting) / wall,
            gpu_idle=1 - gpu_busy,
            slots_busy=min(1.0, slots),
            kv_full=counters["full_seconds"] / max(counters["busy_seconds"], 1e-12),
            concurrency=end.concurrency,
            lag_mean=lag_mean,
            lag_in_queue=lag_in_queue,
            lag_max=max((lag.lag_max for lag in lags), default=0),
            longest_decile=self._longest_decile(warmup),
            lag_samples_mean=sum(lag.samples_sum for lag in lags)
            / max(1, sum(lag.trajectories for lag in lags)),
            lag_samples_max=max((lag.samples_max for lag in lags), default=0),
            off_policy=sum(lag.off_policy for lag in lags) / max(1, tokens),
            recomputed=math.fsum(recomputed.values()),
            recomputed_at_resume=recomputed["resumed"],
            recomputed_at_preemption=recomputed["preempted"],
            recomputed_at_update=recomputed["updated"],
            wasted=(end.wasted - start.wasted) / generated,
            dropped=dict(self.dropped),
            warnings=dict(self.warnings),
        )
