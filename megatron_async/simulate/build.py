"""From a run's configuration to a simulated world, and its figures.

The run's own settings are used wherever they apply: `schedule`, `parallel`, `engines.count`
and `engines.tensor`, `engines.max_running_requests`, `sampling.max_new_tokens`, `seed`,
`task.scorer_workers`, `trainer.microbatch_tokens`. The rest is `simulate`.
`engines.max_total_tokens` is not used: KV capacity is that of the modeled GPU, of the measured
cost model, or `simulate.kv_capacity_tokens`.
"""

from dataclasses import replace
from pathlib import Path

from megatron_async.config.model import Recompute
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.models.shape import ModelShape, shape_of
from megatron_async.scheduler.record import Recorder
from megatron_async.simulate.engine import Engine
from megatron_async.simulate.engine_costs import (
    EngineCosts,
    MeasuredEngine,
    RooflineEngine,
    read_engine_costs,
)
from megatron_async.simulate.episodes import EpisodeSource
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.lengths import GroupSource
from megatron_async.simulate.memory import (
    PAUSED_ENGINE_BYTES,
    TrainerMemory,
    kv_capacity_tokens,
    trainer_memory,
    trainer_state_bytes,
)
from megatron_async.simulate.recomputation import by_work, check_recompute
from megatron_async.simulate.statistics import Summary
from megatron_async.simulate.trainer_costs import TrainerCosts
from megatron_async.simulate.world import World


def engine_costs(config: SimulationConfig) -> EngineCosts:
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
            sharded = config.optimizer.sharded
            taken = trainer_state_bytes(shape, config.parallel, sharded=sharded)
        capacity = settings.kv_capacity_tokens or kv_capacity_tokens(
            shape, gpu.memory, settings.engine_memory_share, config.engines.tensor, taken
        )
        costs = RooflineEngine(shape, gpu, settings.efficiency, config.engines.tensor, capacity)
    longest = config.sampling.max_new_tokens + settings.lengths.prompt_tokens
    if capacity < longest:
        room = "simulate.kv_capacity_tokens"
        if not (settings.cost_model or settings.kv_capacity_tokens):
            card, tensor = settings.gpu.name, config.engines.tensor
            room = f"engines.tensor {tensor}, simulate.gpu.name {card} or {room}"
        raise UserError(
            f"an engine holds {max(0, capacity)} tokens of KV, the longest response and its prompt "
            f"are {longest} (sampling.max_new_tokens {config.sampling.max_new_tokens}): set a "
            f"larger {room}"
        )
    return costs


def check_placement(config: SimulationConfig) -> None:
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


def memory_of_trainer(
    config: SimulationConfig, shape: ModelShape, recompute: Recompute | None = None
) -> TrainerMemory:
    """Estimate the memory of a trainer GPU, with `trainer.recompute` or with another setting."""
    longest = config.sampling.max_new_tokens + config.simulate.lengths.prompt_tokens
    return trainer_memory(
        shape,
        config.parallel,
        sharded=config.optimizer.sharded,
        expert=config.parallel.expert,
        microbatch_tokens=max(config.trainer.microbatch_tokens, longest),
        logit_tokens=config.trainer.logprob_chunk_tokens,
        recompute=config.trainer.recompute if recompute is None else recompute,
    )


def fitting_recompute(
    config: SimulationConfig, shape: ModelShape, memory_bytes: float
) -> Recompute | None:
    """Return the `trainer.recompute` with the least work whose estimated peak fits into a GPU.

    The only choice is the value that is set, or, in a simulation that leaves the trainer's state
    beside the KV cache (no `simulate.offload`), `all`. On GPUs that engines share, the memory of a
    paused engine stays free. Returns None if no choice fits.
    """
    room = config.simulate.trainer_memory_share * memory_bytes
    layers, wanted = shape.layers // config.parallel.pipeline, config.trainer.recompute
    choices = by_work(shape, layers)
    if "recompute" in config.trainer.model_fields_set:
        choices = [wanted] if not isinstance(wanted, int) or wanted <= layers else []
    elif config.simulate.placement == "colocated" and not config.simulate.offload:
        choices = ["all"]
    if "colocated" in (config.engines.placement, config.simulate.placement):
        room -= PAUSED_ENGINE_BYTES
    fitting = (c for c in choices if memory_of_trainer(config, shape, c).peak <= room)
    return next(fitting, None)


def trainer_costs(config: SimulationConfig) -> TrainerCosts:
    """Return the trainer's cost model, with the `trainer.recompute` that a start would choose."""
    shape, gpu = shape_of(config), gpu_of(config.simulate.gpu)
    recompute, stages = config.trainer.recompute, config.parallel.pipeline
    check_recompute(recompute, shape.layers // stages, stages)
    if "recompute" not in config.trainer.model_fields_set:
        recompute = fitting_recompute(config, shape, gpu.memory) or "all"
    return TrainerCosts(
        shape,
        gpu,
        config.parallel,
        config.simulate,
        config.trainer.microbatch_tokens,
        config.optimizer.sharded,
        config.algorithm.epochs,
        recompute,
    )


def group_source(config: SimulationConfig) -> GroupSource:
    """The responses of a run's prompts, drawn. Raises UserError for a bad length file."""
    return GroupSource(
        config.simulate.lengths,
        config.simulate.reward,
        group_size=config.schedule.group_size,
        longest=config.sampling.max_new_tokens,
        seed=config.seed,
    )


def episode_source(config: SimulationConfig) -> EpisodeSource | None:
    """Episodes, drawn; None for responses without an environment. Raises UserError."""
    settings = config.simulate
    if settings.episode.turns is None:
        return None
    return EpisodeSource(
        settings.episode,
        settings.lengths,
        group_size=config.schedule.group_size,
        longest=config.sampling.max_new_tokens,
        seed=config.seed,
    )


def build_world(config: SimulationConfig, recorder: Recorder | None = None) -> World:
    """Everything at time zero. Raises UserError for settings that do not fit together."""
    check_placement(config)
    settings = config.simulate
    costs, max_running = engine_costs(config), config.engines.max_running_requests
    episodes = episode_source(config)
    open_episodes = None if episodes is None else config.schedule.open_episodes or "auto"
    return World(
        config.resolved_schedule.model_copy(update={"open_episodes": open_episodes}),
        settings,
        engines=[
            Engine(f"engine-{i}", costs, settings, max_running) for i in range(config.engines.count)
        ],
        most_scorers=config.task.scorer_workers,
        trainer=trainer_costs(config),
        source=group_source(config),
        episodes=episodes,
        recorder=recorder,
    )


def simulate(config: SimulationConfig) -> Summary:
    """Run `simulate.steps` batches and summarize those after the warm-up."""
    world = build_world(config)
    world.run(config.simulate.steps)
    return world.statistics.summary(
        config.simulate.warmup_steps,
        engine_gpus=config.engines.count * config.engines.tensor,
        trainer_gpus=config.parallel.ranks,
        shared=config.simulate.placement == "colocated",
    )
