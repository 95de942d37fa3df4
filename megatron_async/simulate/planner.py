"""`megatron-async plan`: how to use so many GPUs for a model, a schedule and a length distribution.

1. Every split of the GPUs (or all of them twice, colocated), every TP of the engines and every
   TP x PP of the trainer that fits into memory is estimated in closed form. Unless
   `trainer.recompute` is set, each trainer layout recomputes as little as fits; all layers where
   trainer and engines share GPUs without offloading.
2. The best trainer layout of each trainer size and the best TP of each engine size are combined;
   the best combinations are simulated, which gives the order, the step time and the lag.

N' is the smallest number of requests in flight with 95 % of the generation speed that any N' within
the KV cache has (a larger one only adds lag), and never more than the lag bound lets run.

The estimate: generation takes tokens / (b / decode step time at b requests an engine), and where a
step's end gives up the KV of running requests, their prefill; the KV of a running request is its
prompt and the mean number of tokens generated so far, E[L^2] / (2 E[L]) by renewal theory. Training
as in `trainer_costs`. With overlap a step takes the longer of the two, else their sum.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.errors import UserError
from megatron_async.models.shape import shape_of
from megatron_async.simulate.build import (
    episode_source,
    fitting_recompute,
    group_source,
    memory_of_trainer,
    simulate,
    trainer_costs,
)
from megatron_async.simulate.engine_costs import RooflineEngine
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.memory import kv_capacity_tokens
from megatron_async.simulate.show import cells
from megatron_async.simulate.statistics import Summary

_SIZES = (1, 2, 4, 8, 16)
ENOUGH_THROUGHPUT = 0.95
"""Share of the largest throughput at which N' is not raised further."""
_KEPT = 3
"""Trainer layouts and TP sizes that are combined when the GPUs can be split in one way only."""
_TIE = 0.02
"""Plans within this share of the best speed are as fast: the steps of a simulation vary by it."""
KV_FILL = 0.92
"""Share of the KV cache that N' may fill on average."""


@dataclass(frozen=True)
class TrainerPlan:
    """A trainer layout that fits."""

    layout: ParallelConfig
    recompute: Recompute
    seconds: float
    memory: float
    fixed_memory: float


@dataclass(frozen=True)
class EnginePlan:
    """Engines that hold the model."""

    count: int
    tensor: int
    concurrency: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A whole plan; `summary` once it was simulated. Memory is of a trainer GPU, in bytes."""

    trainer: TrainerPlan
    engines: EnginePlan
    step_seconds: float
    config: RunConfig
    summary: Summary | None = None


@dataclass(frozen=True)
class RankedPlans:
    """The best first; the others are the runner-ups."""

    candidates: list[Candidate]
    considered: int

    @property
    def sentence(self) -> str:
        """The answer in words."""
        best = self.candidates[0]
        layout, summary = best.trainer.layout, best.summary
        assert summary is not None
        return (
            f"best of {self.considered}: {layout.ranks} trainer GPUs (TP {layout.tensor}, PP "
            f"{layout.pipeline}, DP {layout.data}) and {best.engines.count} engines of TP "
            f"{best.engines.tensor}, schedule.concurrency={best.engines.concurrency}, "
            f"trainer.recompute={best.trainer.recompute}: "
            f"{summary.step_seconds:.1f} s a step, {summary.tokens_per_second:,.0f} trained "
            f"tokens/s, lag {summary.lag_mean:.2f} (largest {summary.lag_max})"
        )


@dataclass(frozen=True)
class _Workload:
    """A batch as drawn from the length distribution. `kv_tokens`: of a running request."""

    sequences: list[int]
    response_tokens: int
    kv_tokens: float


def make_plan(settings: Mapping[str, Any], top: int) -> RankedPlans:
    """Search and simulate. Raises UserError when nothing fits."""
    settings = dict(settings)
    config = build_config(_with_layout(settings, ParallelConfig(), EnginePlan(1, 1, 8, 0.0)))
    if config.simulate.placement == "colocated" and config.schedule.overlap:
        raise UserError(
            f"schedule.overlap true (preset {config.schedule.preset}) needs simulate.placement "
            "disaggregated, got colocated"
        )
    gpus = _gpus(settings, config)
    found = sorted(_candidates(config, settings, gpus), key=lambda c: c.step_seconds)
    if not found:
        raise UserError(
            f"nothing fits: simulate.gpus {gpus} of {config.simulate.gpu.name} "
            f"cannot hold trainer and engines of {shape_of(config).parameters / 1e9:.1f} B "
            "parameters; raise simulate.gpus or choose a larger simulate.gpu.name"
        )
    tried = [replace(c, summary=simulate(c.config)) for c in found[:top]]
    return RankedPlans(ranked(tried), len(found))


def ranked(tried: Sequence[Candidate]) -> list[Candidate]:
    """Sort by speed; of those that are as fast as the best, within a tie, by lag."""
    rated = [(c, c.summary) for c in tried if c.summary is not None]
    best = max((s.tokens_per_second for _, s in rated), default=0.0)

    def order(pair: tuple[Candidate, Summary]) -> tuple[bool, float, float]:
        speed, tied = pair[1].tokens_per_second, pair[1].tokens_per_second >= (1 - _TIE) * best
        return not tied, pair[1].lag_mean if tied else -speed, -speed

    return [candidate for candidate, _ in sorted(rated, key=order)]


def _gpus(settings: Mapping[str, Any], config: RunConfig) -> int:
    """`simulate.gpus`, or as many as the file's own layout has; one node where it has none."""
    if config.simulate.gpus is not None:
        return config.simulate.gpus
    layout = {**settings.get("parallel", {}), **settings.get("engines", {})}
    if not layout.keys() & {"ranks", "count", "tensor"}:
        return config.simulate.gpus_per_node
    own = build_config(settings)
    if config.simulate.placement == "colocated":
        return own.parallel.ranks
    return own.parallel.ranks + own.engines.count * own.engines.tensor


def _candidates(config: RunConfig, settings: dict[str, Any], gpus: int) -> Iterator[Candidate]:
    workload = _workload(config)
    splits = _splits(config, gpus)
    kept = _KEPT if len(splits) == 1 else 1
    for trainer_gpus, engine_gpus in splits:
        for trainer in _trainers(config, workload, trainer_gpus)[:kept]:
            for engines in _engines(config, workload, engine_gpus, trainer)[:kept]:
                yield _candidate(config, settings, trainer, engines)


def _candidate(
    config: RunConfig, settings: dict[str, Any], trainer: TrainerPlan, engines: EnginePlan
) -> Candidate:
    candidate = build_config(_with_layout(settings, trainer.layout, engines))
    candidate = candidate.with_section("trainer", recompute=trainer.recompute)
    both = (trainer.seconds, engines.seconds)
    step = max(both) if config.schedule.overlap else sum(both)
    step += trainer_costs(candidate).publish_seconds
    return Candidate(trainer, engines, step, candidate)


def _splits(config: RunConfig, gpus: int) -> list[tuple[int, int]]:
    """Trainer and engine GPUs: whole nodes when there are more than two, else any number."""
    settings = config.simulate
    if settings.placement == "colocated":
        return [(gpus, gpus)]
    if gpus < 2:
        raise UserError(f"simulate.gpus {gpus} cannot be split; placement disaggregated needs 2")
    unit = settings.gpus_per_node if gpus > 2 * settings.gpus_per_node else 1
    return [(n, gpus - n) for n in range(unit, gpus, unit)]


def _workload(config: RunConfig) -> _Workload:
    source, episodes = group_source(config), episode_source(config)
    groups = range(config.schedule.groups_per_batch)
    prompt = config.simulate.lengths.prompt_tokens
    if episodes is None:
        lengths = [length for number in groups for length in source.group(number)[0]]
        generated = sum(n * n for n in lengths) / (2 * sum(lengths))
        return _Workload([n + prompt for n in lengths], sum(lengths), generated + prompt)
    sequences, kv, answered = [], 0.0, 0
    for plan in (plan for number in groups for plan in episodes.group(number)):
        context = prompt
        for turn in plan:
            context += turn.observation
            kv += turn.tokens * (context + turn.tokens / 2)
            context += turn.tokens
        sequences.append(context)
        answered += sum(turn.tokens for turn in plan)
    return _Workload(sequences, answered, kv / answered)


def _trainers(config: RunConfig, workload: _Workload, gpus: int) -> list[TrainerPlan]:
    """Layouts that fit, fastest first."""
    shape, gpu = shape_of(config), gpu_of(config.simulate.gpu)
    plans = []
    for tensor in _tensor_sizes(config, gpus):
        for pipeline in _SIZES:
            if shape.layers % pipeline or gpus % (tensor * pipeline):
                continue
            layout = ParallelConfig(
                ranks=gpus, tensor=tensor, pipeline=pipeline, sequence=tensor > 1
            )
            planned = config.model_copy(update={"parallel": layout})
            recompute = fitting_recompute(planned, shape, gpu.memory)
            if recompute is None:
                continue
            memory = memory_of_trainer(planned, shape, recompute)
            costs = trainer_costs(planned.with_section("trainer", recompute=recompute))
            seconds = costs.batch_seconds(workload.sequences, config.schedule.updates_per_batch)
            kept = 0.0 if config.simulate.offload else memory.state
            plans.append(TrainerPlan(layout, recompute, seconds, memory.peak, kept))
    return sorted(plans, key=lambda plan: plan.seconds)


def _engines(
    config: RunConfig, workload: _Workload, gpus: int, trainer: TrainerPlan
) -> list[EnginePlan]:
    """TP sizes that hold the model and the longest response, fastest first."""
    taken = trainer.fixed_memory if config.simulate.placement == "colocated" else 0.0
    found = (
        _engine_plan(config, workload, gpus // tensor, tensor, taken)
        for tensor in _tensor_sizes(config, gpus)
    )
    return sorted((plan for plan in found if plan is not None), key=lambda plan: plan.seconds)


def _tensor_sizes(config: RunConfig, gpus: int) -> list[int]:
    """TP sizes that divide heads and GPUs, within a node."""
    heads, most = shape_of(config).heads, config.simulate.gpus_per_node
    return [n for n in _SIZES if n <= most and heads % n == 0 and gpus % n == 0]


def _engine_plan(
    config: RunConfig, workload: _Workload, count: int, tensor: int, taken: float
) -> EnginePlan | None:
    """Engines of this TP with the N' that suffices; None where the longest response has no room."""
    settings = config.simulate
    shape, gpu = shape_of(config), gpu_of(settings.gpu)
    capacity = kv_capacity_tokens(shape, gpu.memory, settings.engine_memory_share, tensor, taken)
    if capacity < config.sampling.max_new_tokens + settings.lengths.prompt_tokens:
        return None
    costs = RooflineEngine(shape, gpu, settings.efficiency, tensor, capacity)
    limit = int(KV_FILL * capacity / workload.kv_tokens)
    allowed = _requests_allowed(config)
    if allowed is not None:
        limit = min(limit, -(-allowed // count))
    batch, seconds = _smallest_sufficient(config, costs, workload, count, max(1, limit))
    return EnginePlan(count, tensor, batch * count, seconds)


def sufficient_concurrency(config: RunConfig) -> int | None:
    """The N' that `plan` would give the engines of this layout; None where the model has no room.

    Raises UserError when the model's shape is not known.
    """
    engines = config.engines
    plan = _engine_plan(config, _workload(config), engines.count, engines.tensor, 0.0)
    return None if plan is None else plan.concurrency


def training_seconds(config: RunConfig) -> float:
    """Training on one batch and the weight update after it. Raises UserError."""
    costs, updates = trainer_costs(config), config.schedule.updates_per_batch
    return costs.batch_seconds(_workload(config).sequences, updates) + costs.publish_seconds


def _requests_allowed(config: RunConfig) -> int | None:
    """Requests that the schedule itself ever has in flight; None = as many as N'."""
    schedule = config.schedule
    batch = schedule.groups_per_batch * schedule.group_size
    limits = []
    if schedule.refill == "batch":
        limits.append(int(batch * schedule.oversample))
    if schedule.max_async_level is not None:
        limits.append(int(batch * (schedule.max_async_level + schedule.oversample)))
    return min(limits, default=None)


def _generation_seconds(
    config: RunConfig, costs: RooflineEngine, workload: _Workload, count: int, batch: int
) -> float:
    """Return the seconds of a step's generation on `count` engines of `batch` requests each."""
    kv_tokens = workload.kv_tokens
    fixed, per_kv = costs.decode(batch)
    seconds = workload.response_tokens / count * (fixed + per_kv * batch * kv_tokens) / batch
    schedule = config.schedule
    swaps = schedule.weight_update == "in_flight" and schedule.kv == "recompute"
    if schedule.boundary == "abort" or swaps:
        seconds += costs.prefill(round(batch * kv_tokens), batch * kv_tokens**2 / 2)
    return seconds


def _smallest_sufficient(
    config: RunConfig, costs: RooflineEngine, workload: _Workload, count: int, limit: int
) -> tuple[int, float]:
    """(requests an engine, seconds); on a grid of 5 % steps up to `limit`."""
    grid = sorted({*(min(limit, math.ceil(1.05**i)) for i in range(400)), limit})
    seconds = [_generation_seconds(config, costs, workload, count, batch) for batch in grid]
    enough = min(seconds) / ENOUGH_THROUGHPUT
    return next((b, s) for b, s in zip(grid, seconds, strict=True) if s <= enough)


def _with_layout(
    settings: dict[str, Any], layout: ParallelConfig, engines: EnginePlan
) -> dict[str, Any]:
    chosen = {
        "parallel": layout.model_dump(),
        "engines": {"count": engines.count, "tensor": engines.tensor},
        "schedule": {"concurrency": engines.concurrency},
    }
    return merge(settings, chosen)


_COLUMNS = ("trainer GPUs", "TP x PP x DP", "engines", "N'", "step s", "tokens/s", "lag")
_MORE_COLUMNS = ("memory", "recompute", "estimated s", "engine idle", "trainer idle")


def plan_table(plan: RankedPlans, *, wide: bool = False) -> Table:
    """Best first; `wide`: every column."""
    columns = _COLUMNS + _MORE_COLUMNS if wide else _COLUMNS
    out = Table(title="plans, best first")
    for name in columns:
        out.add_column(name, justify="right")
    for candidate in plan.candidates:
        layout, engines, summary = candidate.trainer.layout, candidate.engines, candidate.summary
        assert summary is not None
        row = cells(summary) | {
            "trainer GPUs": str(layout.ranks),
            "TP x PP x DP": f"{layout.tensor} x {layout.pipeline} x {layout.data}",
            "memory": f"{candidate.trainer.memory / 1e9:.0f} GB",
            "recompute": str(candidate.trainer.recompute),
            "engines": f"{engines.count} of TP {engines.tensor}",
            "N'": str(engines.concurrency),
            "estimated s": f"{candidate.step_seconds:.1f}",
            "step s": f"{summary.step_seconds:.1f}",
        }
        out.add_row(*(row[name] for name in columns))
    return out
