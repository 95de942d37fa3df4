"""From a run's configuration to a simulated world, and its figures.

The run's own settings are used wherever they apply: `schedule`, `parallel`, `engines.count`
and `engines.tensor`, `engines.max_running_requests`, `sampling.max_new_tokens`, `seed`,
`task.verifier_workers`, `trainer.microbatch_tokens`. The rest is `simulate`.
`engines.max_total_tokens` is not used: KV capacity is that of the modelled GPU, of the measured
cost model, or `simulate.kv_capacity_tokens`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_async.config import RunConfig
from megatron_async.errors import UserError
from megatron_async.models.shape import shape_of
from megatron_async.scheduler.record import Recorder
from megatron_async.simulate.engine import Engine, Limits
from megatron_async.simulate.engine_costs import (
    EngineCosts,
    MeasuredEngine,
    RooflineEngine,
    read_engine_costs,
)
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.lengths import GroupSource
from megatron_async.simulate.memory import TrainerLayout, kv_capacity_tokens, trainer_state_bytes
from megatron_async.simulate.statistics import Summary
from megatron_async.simulate.trainer_costs import TrainerCosts
from megatron_async.simulate.world import World


def trainer_layout(config: RunConfig) -> TrainerLayout:
    """The trainer's parallel sizes."""
    p = config.parallel
    return TrainerLayout(p.tensor, p.pipeline, p.context, p.data, config.optimizer.sharded)


def engine_costs(config: RunConfig) -> EngineCosts:
    """Measured if `simulate.cost_model` names a file, else the roofline. Raises UserError."""
    settings = config.simulate
    if settings.cost_model:
        measured = read_engine_costs(Path(settings.cost_model))
        capacity = settings.kv_capacity_tokens or measured.kv_capacity_tokens
        costs: MeasuredEngine | RooflineEngine = replace(measured, kv_capacity_tokens=capacity)
    else:
        shape, gpu = shape_of(config), gpu_of(settings.gpu)
        taken = 0.0
        if settings.placement == "colocated" and not settings.offload:
            taken = trainer_state_bytes(shape, trainer_layout(config))
        capacity = settings.kv_capacity_tokens or kv_capacity_tokens(
            shape, gpu.memory, settings.engine_memory_share, config.engines.tensor, taken
        )
        costs = RooflineEngine(shape, gpu, settings.efficiency, config.engines.tensor, capacity)
    longest = config.sampling.max_new_tokens + settings.lengths.prompt_tokens
    if capacity < longest:
        raise UserError(
            f"an engine holds {max(0, capacity)} tokens of KV, the longest response and its prompt "
            f"are {longest} (sampling.max_new_tokens {config.sampling.max_new_tokens}): raise "
            f"engines.tensor {config.engines.tensor}, use another simulate.gpu.name "
            f"{settings.gpu.name}, or set simulate.kv_capacity_tokens"
        )
    return costs


def check_placement(config: RunConfig) -> None:
    """Refuse what cannot be. Raises UserError."""
    if config.simulate.placement == "disaggregated":
        return
    if config.schedule.overlap:
        raise UserError(
            f"schedule.overlap true (preset {config.schedule.preset}) needs simulate.placement "
            "disaggregated, got colocated: the GPUs cannot generate and train at once"
        )
    engines = config.engines.count * config.engines.tensor
    if engines != config.parallel.ranks:
        raise UserError(
            f"simulate.placement colocated needs as many engine GPUs (engines.count x "
            f"engines.tensor = {engines}) as trainer GPUs (parallel.ranks {config.parallel.ranks})"
        )


def trainer_costs(config: RunConfig) -> TrainerCosts:
    """The trainer's cost model."""
    return TrainerCosts(
        shape_of(config),
        gpu_of(config.simulate.gpu),
        trainer_layout(config),
        config.simulate,
        config.trainer.microbatch_tokens,
        config.engines.tensor,
    )


def build_world(config: RunConfig, recorder: Recorder | None = None) -> World:
    """Everything at time zero. Raises UserError for settings that do not fit together."""
    check_placement(config)
    settings = config.simulate
    costs = engine_costs(config)
    limits = Limits(
        config.engines.max_running_requests,
        settings.admission_reserve_tokens,
        settings.retract_steps,
        settings.chunk_tokens,
    )
    source = GroupSource(
        settings.lengths,
        settings.reward,
        group_size=config.schedule.group_size,
        longest=config.sampling.max_new_tokens,
        seed=config.seed,
    )
    return World(
        config.resolved_schedule,
        settings,
        engines=[Engine(f"engine-{i}", costs, limits) for i in range(config.engines.count)],
        max_running=config.engines.max_running_requests,
        most_scorers=config.task.verifier_workers,
        trainer=trainer_costs(config),
        source=source,
        recorder=recorder,
    )


def simulate(config: RunConfig) -> Summary:
    """Run `simulate.steps` batches and summarise those after the warm-up."""
    world = build_world(config)
    world.run(config.simulate.steps)
    return world.statistics.summary(
        config.simulate.warmup_steps,
        engine_gpus=config.engines.count * config.engines.tensor,
        trainer_gpus=config.parallel.ranks,
        shared=config.simulate.placement == "colocated",
    )
