"""Results of a simulated run: counters by step, and their summary after the warm-up.

Invariants
- Shares are of virtual wall time between the publication that ends the warm-up and the last one.
- Lag is that of trained tokens: the step that trains them minus the version that wrote them. Lag in
  samples is that of trajectories (`trajectory.sample_lag`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_async.simulate.engine import Engine, EngineCounters, Tokens
from megatron_async.trajectory.sample_lag import SamplesTrained


@dataclass(frozen=True, slots=True)
class StepRow:
    """A batch when the trainer takes it: seconds it waited for it and works on it."""

    step: int
    sequences: int
    tokens: int
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchLag:
    """Lag of one batch's trained tokens, and in samples of its `trajectories` that have any."""

    step: int
    tokens: int
    lag_sum: float
    lag_max: int
    off_policy: int
    trajectories: int
    samples_sum: int
    samples_max: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters at a publication."""

    at: float
    update_seconds: float
    concurrency: int
    engines: EngineCounters
    wasted: int


@dataclass(frozen=True)
class Summary:
    """Figures of a run after its warm-up; seconds are virtual.

    Shares: `engine_idle` of engines that neither decode nor prefill (weight transfers count as
    idle; on shared GPUs only the time outside training counts), `trainer_idle` of the trainer
    waiting for a batch, `gpu_idle` of all GPUs doing none of decode, prefill and training,
    `slots_busy` of N' that are in a decode batch while its engine is busy, `kv_full` of the busy
    time in which requests wait for room in the KV cache, `recomputed` and its
    parts: tokens prefilled again as a share of the generated ones, `wasted` tokens of dropped and
    restarted trajectories as a share of the generated ones.
    """

    step_seconds: float
    rollout_seconds: float
    train_seconds: float
    update_seconds: float
    tokens_per_second: float
    engine_idle: float
    trainer_idle: float
    gpu_idle: float
    slots_busy: float
    kv_full: float
    concurrency: int
    lag_mean: float
    lag_max: int
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


class Statistics:
    """Collects while a world runs."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._reported_preemptions = dict.fromkeys((engine.engine_id for engine in engines), 0)
        self._wasted = 0
        self._trained = SamplesTrained()
        self.dropped: Counter[str] = Counter()
        self.warnings: dict[str, str] = {}
        self.rows: list[StepRow] = []
        self.lags: list[BatchLag] = []
        self.marks: list[_Mark] = []

    def new_preemptions(self, engine: Engine) -> int:
        """Preemptions since the last call."""
        total = engine.counters.preemptions
        news = total - self._reported_preemptions[engine.engine_id]
        self._reported_preemptions[engine.engine_id] = total
        return news

    def wasted(self, tokens: int) -> None:
        """Count tokens that nothing is trained on."""
        self._wasted += tokens

    def batch(self, step: int, versions: Sequence[Tokens], mask_before: int | None) -> None:
        """A batch is emitted; tokens before version `mask_before` are not trained."""
        if mask_before is not None:
            versions = [[run for run in written if run[0] >= mask_before] for written in versions]
        tokens: dict[int, int] = {}
        for version, count in itertools.chain.from_iterable(versions):
            lag = step - version
            tokens[lag] = tokens.get(lag, 0) + count
        total = sum(tokens.values())
        lag_sum = float(sum(lag * count for lag, count in tokens.items()))
        of_tokens = (total, lag_sum, max(tokens, default=0), total - tokens.get(0, 0))
        # a trajectory's oldest trained version comes first: versions never fall
        samples = [self._trained.between(written[0][0], step) for written in versions if written]
        of_samples = (len(samples), sum(samples), max(samples, default=0))
        self._trained.add(len(versions))
        self.lags.append(BatchLag(step, *of_tokens, *of_samples))

    def published(self, at: float, update_seconds: float, concurrency: int) -> None:
        """New weights are out."""
        for engine in self._engines:
            engine.advance(at)
        totals = EngineCounters()
        for item in fields(EngineCounters):
            values = (getattr(engine.counters, item.name) for engine in self._engines)
            setattr(totals, item.name, sum(values))
        self.marks.append(_Mark(at, update_seconds, concurrency, totals, self._wasted))

    def summary(self, warmup: int, *, engine_gpus: int, trainer_gpus: int, shared: bool) -> Summary:
        """Figures of the steps after the first `warmup` (at least one is left out)."""
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
        generating = wall
        if shared:
            gpu_busy = (busy + trained) / wall
            generating = max(wall - trained, 1e-12)
        else:
            both = engine_gpus + trainer_gpus
            gpu_busy = (busy * engine_gpus + trained * trainer_gpus) / (wall * both)
        slots = counters["slot_seconds"] / (max(busy, 1e-12) * end.concurrency)
        tokens = sum(lag.tokens for lag in lags)
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
            gpu_idle=1 - gpu_busy,
            slots_busy=min(1.0, slots),
            kv_full=counters["full_seconds"] / max(counters["busy_seconds"], 1e-12),
            concurrency=end.concurrency,
            lag_mean=sum(lag.lag_sum for lag in lags) / max(1, tokens),
            lag_max=max((lag.lag_max for lag in lags), default=0),
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
