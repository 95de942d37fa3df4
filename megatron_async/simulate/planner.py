"""`megatron-async plan`: how to use so many GPUs for a model, schedules and response lengths.

1. Every schedule that is asked for is tried with engines on separate GPUs and, if it does not
   overlap generation with training, with engines that share all GPUs with an offloaded trainer.
   A `simulate.placement` that is set is the only one.
2. Every split of the GPUs, every TP of the engines and every TP x PP of the trainer that fits into
   memory is estimated in closed form. Unless `trainer.recompute` is set, each trainer layout
   recomputes as little as fits; all layers where trainer and engines share GPUs without offloading.
3. The best trainer layout of each trainer size and the best TP of each engine size are combined.
   The best combinations are simulated, which gives the order, the step time and the lag.

Plans whose speeds differ by at most 2 % count as equally fast; the simpler layout then comes first,
which is the one with fewer pipeline stages and, of equal ones, the smaller TP.

N' is the smallest number of requests in flight with 95 % of the generation speed that any N' within
the KV cache has (a larger one only adds lag), and never more than the lag bound allows.

The estimate: generation takes tokens / (b / decode step time at b requests an engine), and where a
step's end gives up the KV of running requests, their prefill; the KV of a running request is its
prompt and the mean number of tokens generated so far, E[L^2] / (2 E[L]) by renewal theory. Training
as in `trainer_costs`. With overlap a step takes the longer of the two, else their sum.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

from megatron_async.config.load import build_simulation, merge, parse_override
from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.config.recipes import SCHEDULE_PRESETS
from megatron_async.config.simulate import SimulationConfig
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
from megatron_async.simulate.statistics import Summary

_SIZES = (1, 2, 4, 8, 16)
ENOUGH_THROUGHPUT = 0.95
"""Share of the largest throughput at which N' is not raised further."""
_KEPT = 3
"""Trainer layouts and TP sizes that are combined when the GPUs can be split in one way only."""
_TIE = 0.02
"""Plans within this share of the best speed are as fast: the steps of a simulation vary by it."""
_MOST_LARGER = 16  # times the GPUs that were asked for
"""Factors of `simulate.gpus` that are tried where nothing fits."""
_MOST_REMEDIES = 3
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

    @property
    def complexity(self) -> tuple[int, int]:
        """Pipeline stages and TP: of equally fast layouts the smallest is taken."""
        return self.layout.pipeline, self.layout.tensor


@dataclass(frozen=True)
class EnginePlan:
    """Engines that hold the model."""

    count: int
    tensor: int
    concurrency: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A whole plan, as it was estimated.

    Attributes:
        step_seconds: estimated time of a step.
        response_tokens: tokens generated for a step.
        summary: result of the simulation; None before it.
    """

    trainer: TrainerPlan
    engines: EnginePlan
    step_seconds: float
    response_tokens: int
    config: SimulationConfig
    summary: Summary | None = None

    @property
    def complexity(self) -> tuple[int, int]:
        """Pipeline stages and TP of the trainer's layout."""
        return self.trainer.complexity

    @property
    def refused(self) -> bool:
        """Return whether a run refuses it today: engines that share the GPUs of several nodes."""
        settings = self.config.simulate
        shared = settings.placement == "colocated"
        return shared and self.trainer.layout.ranks > settings.gpus_per_node


P = TypeVar("P", TrainerPlan, Candidate)


@dataclass(frozen=True)
class RankedPlans:
    """Simulated plans, the best first.

    Attributes:
        considered: number of plans that were estimated.
        unusable: messages about schedules that do not fit the other settings, or the GPUs.
        accepted: the nearest settings that a run accepts, if it refuses every plan.
    """

    candidates: list[Candidate]
    considered: int
    unusable: list[str] = field(default_factory=list)
    accepted: str = ""


@dataclass(frozen=True)
class _Workload:
    """A batch as drawn from the length distribution. `kv_tokens`: of a running request."""

    sequences: list[int]
    response_tokens: int
    kv_tokens: float


def make_plan(settings: Mapping[str, Any], top: int, presets: Sequence[str] = ()) -> RankedPlans:
    """Search, and simulate the best plans.

    Args:
        settings: the file's, with overrides, not yet checked.
        top: number of plans to simulate; at least one of each schedule is.
        presets: schedules to compare; empty for the file's own, or for all if it names none.

    Raises:
        UserError: nothing fits; the message names the nearest settings that fit.
    """
    settings = dict(settings)
    config = _unplaced(settings)
    gpus = _gpus(settings, config)
    variants, unusable = _variants(settings, presets)
    by_variant = [list(_candidates(_with(settings, variant), gpus)) for variant in variants]
    if not any(by_variant):
        raise UserError(_nothing_fits(settings, variants, gpus))
    found = zip(variants, by_variant, strict=True)
    fitting = {"".join(variant[:1]) for variant, candidates in found if candidates}
    unfitting = dict.fromkeys("".join(variant[:1]) for variant in variants)
    unusable += [f"{name} needs more GPUs" for name in unfitting if name not in fitting]
    tried = ranked([replace(c, summary=simulate(c.config)) for c in _to_simulate(by_variant, top)])
    accepted = _larger(settings, variants, gpus) if tried[0].refused else ""
    return RankedPlans(tried, sum(map(len, by_variant)), unusable, accepted)


def _larger(settings: dict[str, Any], variants: Sequence[Sequence[str]], gpus: int) -> str:
    """Return the smallest number of GPUs that fits and that a run accepts, as a setting."""
    step = min(gpus, _unplaced(settings).simulate.gpus_per_node)
    for count in range(gpus + step, _MOST_LARGER * gpus + 1, step):
        found = [c for variant in variants for c in _candidates(_with(settings, variant), count)]
        best = min((c for c in found if not c.refused), key=_seconds_per_token, default=None)
        if best is not None:
            return f"simulate.gpus={count} ({best.step_seconds:.0f} s a step)"
    return ""


def _unplaced(settings: dict[str, Any]) -> SimulationConfig:
    """Return the settings with the smallest layout, which is valid for every number of GPUs."""
    return build_simulation(_with_layout(settings, ParallelConfig(), EnginePlan(1, 1, 8, 0.0)))


def _with(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    return reduce(lambda merged, text: merge(merged, parse_override(text)), overrides, settings)


def _variants(
    settings: dict[str, Any], presets: Sequence[str]
) -> tuple[list[list[str]], list[str]]:
    """Return overrides for every schedule with every placement, and the unusable schedules.

    Raises UserError if a schedule that was asked for by name does not fit the other settings.
    """
    recipe = settings.get("algorithm", {}).get("recipe")
    named = settings.get("schedule", {}).get("preset") or recipe
    every = list(presets) == ["all"] or not (presets or named)
    placed = "placement" in settings.get("simulate", {})
    variants, unusable = [], []
    for preset in list(SCHEDULE_PRESETS) if every else presets or [""]:
        schedule = [f"schedule.preset={preset}"] if preset else []
        try:
            config = _unplaced(_with(settings, schedule))
            overlap = config.schedule.overlap
            if overlap and config.simulate.placement == "colocated":
                raise UserError(
                    f"schedule.overlap true (preset {config.schedule.preset}) needs "
                    "simulate.placement disaggregated, got colocated"
                )
        except UserError as error:
            if not every:
                raise
            unusable.append(f"schedule.preset {preset}: {error}")
            continue
        variants.append(schedule)
        if not placed and not overlap:
            shared = ["simulate.placement=colocated", "simulate.offload=true"]
            variants.append([*schedule, *shared])
    return variants, unusable


def _to_simulate(by_variant: Sequence[Sequence[Candidate]], top: int) -> list[Candidate]:
    """Choose the best estimate of each variant, then the best of all others, `top` in all."""
    ordered = [_simplest_first(found, _seconds_per_token) for found in by_variant if found]
    firsts = sorted((found[0] for found in ordered), key=_seconds_per_token)
    others = sorted((c for found in ordered for c in found[1:]), key=_seconds_per_token)
    return [*firsts, *others][: max(top, len(firsts))]


def _simplest_first(plans: Sequence[P], seconds: Callable[[P], float]) -> list[P]:
    """Sort by speed, but equally fast plans (within `_TIE`) by complexity."""
    limit = min(map(seconds, plans), default=0.0) / (1 - _TIE)

    def order(plan: P) -> tuple[Any, ...]:
        if seconds(plan) > limit:
            return True, seconds(plan)
        return False, plan.complexity, seconds(plan)

    return sorted(plans, key=order)


def _seconds_per_token(candidate: Candidate) -> float:
    return candidate.step_seconds / candidate.response_tokens


def _nothing_fits(settings: dict[str, Any], asked: Sequence[Sequence[str]], gpus: int) -> str:
    """Return the message that names the nearest settings with which something fits.

    Args:
        asked: overrides for each schedule with which nothing fits.
    """
    config = _unplaced(_with(settings, asked[0]))
    schedules = {_unplaced(_with(settings, variant)).schedule.preset: None for variant in asked}
    larger = _larger(settings, asked, gpus)
    remedies = [(False, 1, 0.0, larger)] if larger else []
    own = {k: v for k, v in settings.get("simulate", {}).items() if k != "placement"}
    variants, _ = _variants({**settings, "simulate": own}, ["all"])
    for variant in variants:
        found = _candidates(_with(settings, variant), gpus)
        best = min(found, key=_seconds_per_token, default=None)
        if best is not None:
            text = f"{' '.join(variant)} ({best.step_seconds:.0f} s a step)"
            if best.refused:
                text += ", which a run over several nodes refuses today"
            remedies.append((best.refused, len(variant), _seconds_per_token(best), text))
    remedy = "choose a larger simulate.gpu.name"
    if remedies:
        nearest = [text for *_, text in sorted(remedies)[:_MOST_REMEDIES]]
        remedy = f"these settings fit: {'; or '.join(nearest)}"
    return (
        f"nothing fits: simulate.gpus {gpus} of {config.simulate.gpu.name} cannot hold trainer and "
        f"engines of {shape_of(config).parameters / 1e9:.1f} B parameters with schedule.preset "
        f"{', '.join(schedules)}, simulate.placement {config.simulate.placement}; {remedy}"
    )


def ranked(tried: Sequence[Candidate]) -> list[Candidate]:
    """Sort by speed; of those that are as fast as the best, by simplicity, then by lag.

    Plans that a run refuses come last.
    """
    rated = [(c, c.summary) for c in tried if c.summary is not None]
    speeds = (s.tokens_per_second for c, s in rated if not c.refused)
    best = max(speeds, default=max((s.tokens_per_second for _, s in rated), default=0.0))

    def order(pair: tuple[Candidate, Summary]) -> tuple[Any, ...]:
        candidate, summary = pair
        speed = summary.tokens_per_second
        if speed < (1 - _TIE) * best:
            return candidate.refused, True, -speed
        return candidate.refused, False, candidate.complexity, summary.lag_mean, -speed

    return [candidate for candidate, _ in sorted(rated, key=order)]


def _gpus(settings: Mapping[str, Any], config: SimulationConfig) -> int:
    """`simulate.gpus`, or as many as the file's own layout has; one node where it has none."""
    if config.simulate.gpus is not None:
        return config.simulate.gpus
    layout = {**settings.get("parallel", {}), **settings.get("engines", {})}
    if not layout.keys() & {"ranks", "count", "tensor"}:
        return config.simulate.gpus_per_node
    own = build_simulation(settings)
    if config.simulate.placement == "colocated":
        return own.parallel.ranks
    return own.parallel.ranks + own.engines.count * own.engines.tensor


def _candidates(settings: dict[str, Any], gpus: int) -> Iterator[Candidate]:
    """Yield the estimated plans of one schedule and placement on so many GPUs."""
    config = _unplaced(settings)
    workload = _workload(config)
    splits = _splits(config, gpus)
    kept = _KEPT if len(splits) == 1 else 1
    for trainer_gpus, engine_gpus in splits:
        for trainer in _trainers(config, workload, trainer_gpus)[:kept]:
            for engines in _engines(config, workload, engine_gpus, trainer)[:kept]:
                yield _candidate(config, settings, workload, trainer, engines)


def _candidate(
    config: SimulationConfig,
    settings: dict[str, Any],
    workload: _Workload,
    trainer: TrainerPlan,
    engines: EnginePlan,
) -> Candidate:
    candidate = build_simulation(_with_layout(settings, trainer.layout, engines))
    candidate = candidate.with_section("trainer", recompute=trainer.recompute)
    both = (trainer.seconds, engines.seconds)
    step = max(both) if config.schedule.overlap else sum(both)
    step += trainer_costs(candidate).publish_seconds
    return Candidate(trainer, engines, step, workload.response_tokens, candidate)


def _splits(config: SimulationConfig, gpus: int) -> list[tuple[int, int]]:
    """Trainer and engine GPUs: whole nodes when there are more than two, else any number."""
    settings = config.simulate
    if settings.placement == "colocated":
        return [(gpus, gpus)]
    unit = settings.gpus_per_node if gpus > 2 * settings.gpus_per_node else 1
    return [(n, gpus - n) for n in range(unit, gpus, unit)]


def _workload(config: SimulationConfig) -> _Workload:
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


def _trainers(config: SimulationConfig, workload: _Workload, gpus: int) -> list[TrainerPlan]:
    """Return the layouts that fit, fastest first; of equally fast ones the simplest first."""
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
    return _simplest_first(plans, lambda plan: plan.seconds)


def _engines(
    config: SimulationConfig, workload: _Workload, gpus: int, trainer: TrainerPlan
) -> list[EnginePlan]:
    """TP sizes that hold the model and the longest response, fastest first."""
    taken = trainer.fixed_memory if config.simulate.placement == "colocated" else 0.0
    found = (
        _engine_plan(config, workload, gpus // tensor, tensor, taken)
        for tensor in _tensor_sizes(config, gpus)
    )
    return sorted((plan for plan in found if plan is not None), key=lambda plan: plan.seconds)


def _tensor_sizes(config: SimulationConfig, gpus: int) -> list[int]:
    """TP sizes that divide heads and GPUs, within a node."""
    heads, most = shape_of(config).heads, config.simulate.gpus_per_node
    return [n for n in _SIZES if n <= most and heads % n == 0 and gpus % n == 0]


def _engine_plan(
    config: SimulationConfig, workload: _Workload, count: int, tensor: int, taken: float
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


def sufficient_concurrency(config: SimulationConfig) -> int | None:
    """The N' that `plan` would give the engines of this layout; None where the model has no room.

    Raises UserError when the model's shape is not known.
    """
    engines = config.engines
    plan = _engine_plan(config, _workload(config), engines.count, engines.tensor, 0.0)
    return None if plan is None else plan.concurrency


def training_seconds(config: SimulationConfig) -> float:
    """Training on one batch and the weight update after it. Raises UserError."""
    costs, updates = trainer_costs(config), config.schedule.updates_per_batch
    return costs.batch_seconds(_workload(config).sequences, updates) + costs.publish_seconds


def _requests_allowed(config: SimulationConfig) -> int | None:
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
    config: SimulationConfig, costs: RooflineEngine, workload: _Workload, count: int, batch: int
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
    config: SimulationConfig, costs: RooflineEngine, workload: _Workload, count: int, limit: int
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
