"""Implements `megatron-async plan`: finds out how to use a number of GPUs for a model, schedules
and response lengths.

1. Each requested schedule is tried with engines on separate GPUs. A schedule that does not overlap
   generation with training is also tried with engines that share all GPUs with the trainer, whose
   state is offloaded to host memory while they generate. If `simulate.placement` is set, only that
   placement is tried.
2. A closed formula (below) estimates every split of the GPUs between trainer and engines, with
   every tensor-parallel size (TP) of the engines and every TP and pipeline-parallel size (PP) of
   the trainer that fits into memory. Unless `trainer.recompute` is set, each trainer layout
   recomputes as little as its memory allows. If trainer and engines share GPUs without offloading,
   it recomputes all layers.
3. The best trainer layout of each trainer size is combined with the best TP of each engine size.
   The best combinations are simulated, which gives the order of the plans, the step time and the
   lag.

Plans whose speed is within 2 % of the best speed count as equally fast. Among them, the simpler
layout comes first: the layout with fewer pipeline stages, then the layout with the smaller TP.

For the number of requests in flight (`schedule.concurrency`, written N'), only numbers are
considered whose KV fits into the cache and that the schedule can use (lag bound, `refill: batch`).
N' is the smallest of them that reaches 95 % of the best generation speed among them, because a
larger number only adds lag.

The closed formula of item 2: if each engine runs b requests, generating a batch takes

    response_tokens * seconds per decode step / (engines * b)

If the end of a step discards the KV of running requests, the time of their prefill is added. The KV
of a running request is its prompt and the mean number of tokens generated so far, E[L^2] / (2 E[L])
for response lengths L by renewal theory. Training is estimated as in `trainer_costs`. With overlap,
a step takes the longer of generation and training; otherwise it takes their sum. The time of the
weight update is added in both cases.
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
"""Share of the largest throughput that suffices: the number of requests in flight (N') is the
smallest one that reaches it."""
_KEPT = 3
"""If there is only one split of the GPUs, this number of best trainer layouts is combined with the
same number of best tensor-parallel sizes of the engines."""
_TIE = 0.02
"""Plans whose speed is within this share of the best speed count as equally fast, because the
simulated step time varies by about as much."""
_MAX_LARGER = 16
"""If no plan fits, or a run would refuse the best one, larger numbers of GPUs are tried, up to this
multiple of the requested number."""
_MAX_REMEDIES = 3
"""Maximum number of remedies that the error message names if no plan fits."""
KV_FILL = 0.92
"""Share of the KV cache that N' requests in flight may fill on average."""


@dataclass(frozen=True)
class TrainerPlan:
    """Trainer layout that fits into GPU memory, with its estimated costs.

    Attributes:
        layout: Numbers of ranks and of parallel shards.
        recompute: Value of `trainer.recompute`.
        seconds: Estimated time of training on one batch.
        memory: Estimated peak memory of one GPU in bytes.
        fixed_memory: Bytes of the trainer that stay on a GPU while engines on the same GPU
            generate; 0 with `simulate.offload`. Not used if the trainer has its own GPUs.
    """

    layout: ParallelConfig
    recompute: Recompute
    seconds: float
    memory: float
    fixed_memory: float

    @property
    def complexity(self) -> tuple[int, int]:
        """Numbers of pipeline stages and of tensor-parallel shards; of equally fast layouts the
        planner prefers the smallest pair."""
        return self.layout.pipeline, self.layout.tensor


@dataclass(frozen=True)
class EnginePlan:
    """Number and size of engines, whose memory suffices for the model and the longest response.

    Attributes:
        count: Number of engines.
        tensor: Tensor-parallel size of each engine.
        concurrency: Number of requests in flight on all engines together.
        seconds: Estimated time to generate one batch.
    """

    count: int
    tensor: int
    concurrency: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """Complete plan: trainer, engines and schedule, with estimated and simulated results.

    Attributes:
        trainer: Trainer layout.
        engines: Number, size and concurrency of the engines.
        step_seconds: Estimated time of a step.
        response_tokens: Number of tokens generated for a step.
        config: Settings with which the plan is simulated.
        summary: Result of the simulation; None before the simulation.
    """

    trainer: TrainerPlan
    engines: EnginePlan
    step_seconds: float
    response_tokens: int
    config: SimulationConfig
    summary: Summary | None = None

    @property
    def complexity(self) -> tuple[int, int]:
        """Numbers of pipeline stages and of tensor-parallel shards of the trainer; of equally fast
        plans the planner prefers the smallest pair."""
        return self.trainer.complexity

    @property
    def refused(self) -> bool:
        """Whether a real run refuses this plan, because its engines share the GPUs of several nodes
        with the trainer."""
        settings = self.config.simulate
        shared = settings.placement == "colocated"
        return shared and self.trainer.layout.ranks > settings.gpus_per_node


P = TypeVar("P", TrainerPlan, Candidate)


@dataclass(frozen=True)
class RankedPlans:
    """Simulated plans, the best plan first.

    Attributes:
        candidates: The plans.
        considered: Number of plans that were estimated.
        unusable: Messages about schedules that contradict other settings or need more GPUs.
        accepted: If a run would refuse the best plan, a setting with the nearest number of GPUs for
            which there is a plan that a run accepts; empty otherwise, or if no such number is
            found.
    """

    candidates: list[Candidate]
    considered: int
    unusable: list[str] = field(default_factory=list)
    accepted: str = ""


@dataclass(frozen=True)
class _Workload:
    """Work of one batch, drawn from the length distribution.

    Attributes:
        sequences: Number of tokens of each sequence that is trained on.
        response_tokens: Number of tokens that the policy generates for the batch.
        kv_tokens: Mean number of tokens that a running request has in the KV cache.
    """

    sequences: list[int]
    response_tokens: int
    kv_tokens: float


def make_plan(settings: Mapping[str, Any], top: int, presets: Sequence[str] = ()) -> RankedPlans:
    """Estimate all plans for a number of GPUs, simulate the best ones, and return the simulated
    plans.

    Args:
        settings: Settings of the file with overrides, not validated yet.
        top: Number of plans to simulate; at least one plan of each schedule and placement is
            simulated.
        presets: Schedules to compare; empty for the schedule of the file, or for all if it names
            none.

    Raises:
        UserError: No plan fits; the message names the nearest settings that fit.
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
    """Return a text with the smallest number of GPUs, larger than `gpus`, for which there is a plan
    that fits and that a run accepts: the setting and the estimated step time.

    Return an empty text if `_MAX_LARGER` times as many GPUs do not suffice.
    """
    step = min(gpus, _unplaced(settings).simulate.gpus_per_node)
    for count in range(gpus + step, _MAX_LARGER * gpus + 1, step):
        found = [c for variant in variants for c in _candidates(_with(settings, variant), count)]
        best = min((c for c in found if not c.refused), key=_seconds_per_token, default=None)
        if best is not None:
            return f"simulate.gpus={count} ({best.step_seconds:.0f} s a step)"
    return ""


def _unplaced(settings: dict[str, Any]) -> SimulationConfig:
    """Return the validated settings with the smallest trainer and engine layout, which is valid for
    every number of GPUs."""
    return build_simulation(_with_layout(settings, ParallelConfig(), EnginePlan(1, 1, 8, 0.0)))


def _with(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    return reduce(lambda merged, text: merge(merged, parse_override(text)), overrides, settings)


def _variants(
    settings: dict[str, Any], presets: Sequence[str]
) -> tuple[list[list[str]], list[str]]:
    """Return the settings (`section.name=value`) of every combination of schedule and placement to
    try, and messages about the schedules that cannot be used.

    Raises:
        UserError: A schedule that was requested by name contradicts other settings.
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
                    f"simulate.placement is colocated; schedule.overlap true (preset "
                    f"{config.schedule.preset}) needs simulate.placement: disaggregated"
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
    """Choose the plans to simulate: the best estimated plan of each schedule and placement
    (variant), then the best of the other plans, up to `top` in total."""
    ordered = [_simplest_first(found, _seconds_per_token) for found in by_variant if found]
    firsts = sorted((found[0] for found in ordered), key=_seconds_per_token)
    others = sorted((c for found in ordered for c in found[1:]), key=_seconds_per_token)
    return [*firsts, *others][: max(top, len(firsts))]


def _simplest_first(plans: Sequence[P], seconds: Callable[[P], float]) -> list[P]:
    """Sort plans by speed. Plans within `_TIE` of the best speed come first, sorted by
    complexity."""
    limit = min(map(seconds, plans), default=0.0) / (1 - _TIE)

    def order(plan: P) -> tuple[Any, ...]:
        if seconds(plan) > limit:
            return True, seconds(plan)
        return False, plan.complexity, seconds(plan)

    return sorted(plans, key=order)


def _seconds_per_token(candidate: Candidate) -> float:
    return candidate.step_seconds / candidate.response_tokens


def _nothing_fits(settings: dict[str, Any], tried: Sequence[Sequence[str]], gpus: int) -> str:
    """Return the error message that no plan fits, with the nearest settings that would fit.

    Args:
        settings: Settings of the file with overrides, not validated yet.
        tried: Overrides of each schedule and placement that was tried without success.
        gpus: Number of GPUs that was tried.
    """
    config = _unplaced(_with(settings, tried[0]))
    schedules = {_unplaced(_with(settings, variant)).schedule.preset: None for variant in tried}
    larger = _larger(settings, tried, gpus)
    remedies = [(False, 1, 0.0, larger)] if larger else []
    own = {k: v for k, v in settings.get("simulate", {}).items() if k != "placement"}
    variants, _ = _variants({**settings, "simulate": own}, ["all"])
    for variant in variants:
        found = _candidates(_with(settings, variant), gpus)
        best = min(found, key=_seconds_per_token, default=None)
        if best is not None:
            text = f"{' '.join(variant)} ({best.step_seconds:.0f} s a step)"
            if best.refused:
                text += ", which a real run on several nodes refuses"
            remedies.append((best.refused, len(variant), _seconds_per_token(best), text))
    remedy = "choose a larger simulate.gpu.name"
    if remedies:
        nearest = [text for *_, text in sorted(remedies)[:_MAX_REMEDIES]]
        remedy = f"these settings fit: {'; or '.join(nearest)}"
    return (
        f"no plan fits: simulate.gpus is {gpus} ({config.simulate.gpu.name}); their memory is too "
        f"small for trainer and engines of {shape_of(config).parameters / 1e9:.1f} B parameters "
        f"with schedule.preset {', '.join(schedules)} and simulate.placement "
        f"{config.simulate.placement}; {remedy}"
    )


def ranked(tried: Sequence[Candidate]) -> list[Candidate]:
    """Sort simulated plans by speed; sort plans that are as fast as the best plan by complexity,
    then by mean lag.

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
    """Return the number of GPUs to plan for: `simulate.gpus` if set, otherwise the number that the
    layout in the file uses, or the number of one node if the file sets no layout."""
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
    """Yield the plans of one schedule and placement that fit on `gpus` GPUs, with their
    estimates."""
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
    """Return the ways to divide the GPUs that are tried, each as a pair of the number of trainer
    GPUs and the number of engine GPUs.

    With more than two nodes, both are whole nodes. If trainer and engines share GPUs, both numbers
    are `gpus`.
    """
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
    """Return the trainer layouts that fit into memory, the fastest first, and of equally fast
    layouts the simplest first."""
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
    """Return the engine plans whose memory suffices for the model and the longest response, the
    fastest first.

    There is one plan for each possible tensor-parallel size.
    """
    trainer_bytes = trainer.fixed_memory if config.simulate.placement == "colocated" else 0.0
    found = (
        _engine_plan(config, workload, gpus // tensor, tensor, trainer_bytes)
        for tensor in _tensor_sizes(config, gpus)
    )
    return sorted((plan for plan in found if plan is not None), key=lambda plan: plan.seconds)


def _tensor_sizes(config: SimulationConfig, gpus: int) -> list[int]:
    """Return the tensor-parallel sizes that divide the attention heads and `gpus` and fit into one
    node."""
    heads, most = shape_of(config).heads, config.simulate.gpus_per_node
    return [n for n in _SIZES if n <= most and heads % n == 0 and gpus % n == 0]


def _engine_plan(
    config: SimulationConfig, workload: _Workload, count: int, tensor: int, trainer_bytes: float
) -> EnginePlan | None:
    """Return a plan for `count` engines of tensor-parallel size `tensor`, with the fewest requests
    in flight that give `ENOUGH_THROUGHPUT` of the largest throughput; None if the KV cache is too
    small for the longest response.

    Args:
        config: Settings of the run and the simulation.
        workload: Work of one batch.
        count: Number of engines.
        tensor: Tensor-parallel size of each engine.
        trainer_bytes: Bytes of each GPU that the trainer occupies while engines generate.
    """
    settings = config.simulate
    shape, gpu = shape_of(config), gpu_of(settings.gpu)
    capacity = kv_capacity_tokens(
        shape, gpu.memory, settings.engine_memory_share, tensor, trainer_bytes
    )
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
    """Return the number of requests in flight that `plan` would choose for the engines of this
    configuration; None if the model or the longest response does not fit into their memory.

    Raises:
        UserError: The model's shape is not known.
    """
    engines = config.engines
    plan = _engine_plan(config, _workload(config), engines.count, engines.tensor, 0.0)
    return None if plan is None else plan.concurrency


def training_seconds(config: SimulationConfig) -> float:
    """Estimate the seconds of training on one batch and of the weight update after it.

    Raises:
        UserError: The model's shape is not known.
    """
    costs, updates = trainer_costs(config), config.schedule.updates_per_batch
    return costs.batch_seconds(_workload(config).sequences, updates) + costs.publish_seconds


def _requests_allowed(config: SimulationConfig) -> int | None:
    """Return the largest number of requests that the schedule can have in flight even if
    `schedule.concurrency` is larger; None if the schedule does not limit the number."""
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
    """Estimate the seconds to generate one batch on `count` engines with `batch` running requests
    each."""
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
    """Return the smallest number of running requests per engine that gives `ENOUGH_THROUGHPUT` of
    the largest throughput, and the seconds to generate a batch with it.

    The numbers that are tried grow by 5 % each, up to `limit`.
    """
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
