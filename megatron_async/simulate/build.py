"""Builds a simulated world from a run's configuration, and runs it.

The simulation uses these settings of the run: `model`, `schedule`, `parallel`, `engines.count`,
`engines.tensor`, `engines.max_running_requests`, `engines.placement` (for `trainer.recompute`),
`sampling.max_new_tokens`, `seed`, `task.scorer_workers`, `algorithm.epochs`, `optimizer.sharded`,
and of `trainer` `microbatch_tokens`, `logprob_chunk_tokens` and `recompute`. All other inputs are
in the section `simulate`. `engines.max_total_tokens` is not used: the KV capacity is
`simulate.kv_capacity_tokens` or, if that is not set, computed for the simulated GPU or read from
the measured cost model.
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
    """Return the cost model of an engine: the measured model in the file `simulate.cost_model` if
    that is set, otherwise the roofline model.

    Raises:
        UserError: The file cannot be used, or the KV cache is too small for the longest response
            with its prompt.
    """
    settings = config.simulate
    if settings.cost_model:
        measured = read_engine_costs(Path(settings.cost_model))
        capacity = settings.kv_capacity_tokens or measured.kv_capacity_tokens
        costs: MeasuredEngine | RooflineEngine = replace(measured, kv_capacity_tokens=capacity)
    else:
        shape, gpu = shape_of(config), gpu_of(settings.gpu)
        trainer_bytes = 0.0
        if settings.placement == "colocated" and not settings.offload:
            sharded = config.optimizer.sharded
            trainer_bytes = trainer_state_bytes(shape, config.parallel, sharded=sharded)
        capacity = settings.kv_capacity_tokens or kv_capacity_tokens(
            shape, gpu.memory, settings.engine_memory_share, config.engines.tensor, trainer_bytes
        )
        costs = RooflineEngine(shape, gpu, settings.efficiency, config.engines.tensor, capacity)
    longest = config.sampling.max_new_tokens + settings.lengths.prompt_tokens
    if capacity < longest:
        remedy = "simulate.kv_capacity_tokens"
        if not (settings.cost_model or settings.kv_capacity_tokens):
            card, tensor = settings.gpu.name, config.engines.tensor
            remedy = f"engines.tensor {tensor}, simulate.gpu.name {card} or {remedy}"
        raise UserError(
            f"the KV cache of an engine has space for {max(0, capacity)} tokens; the longest "
            f"response with its prompt has {longest} (sampling.max_new_tokens is "
            f"{config.sampling.max_new_tokens}). Set a larger {remedy}"
        )
    return costs


def check_placement(config: SimulationConfig) -> None:
    """Raise UserError if the schedule or the numbers of GPUs contradict `simulate.placement:
    colocated`.

    With this placement, engines and trainer ranks share all GPUs. So both must use the same number
    of GPUs, and the schedule must not let them work at the same time.
    """
    if config.simulate.placement == "disaggregated":
        return
    if config.schedule.overlap:
        raise UserError(
            f"simulate.placement is colocated and schedule.overlap is true (preset "
            f"{config.schedule.preset}); shared GPUs cannot generate and train at the same time. "
            "Set simulate.placement: disaggregated, or a preset without overlap"
        )
    if config.simulate.background_publication:
        raise UserError(
            "simulate.placement is colocated and simulate.background_publication is true; engines "
            "on the trainer's GPUs wait for it. Set simulate.background_publication: false"
        )
    engines = config.engines.count * config.engines.tensor
    if engines != config.parallel.ranks:
        raise UserError(
            f"simulate.placement is colocated, but there are {engines} engine GPUs (engines.count "
            f"x engines.tensor) and {config.parallel.ranks} trainer GPUs (parallel.ranks). "
            "Set equal numbers"
        )


def memory_of_trainer(
    config: SimulationConfig, shape: ModelShape, recompute: Recompute | None = None
) -> TrainerMemory:
    """Estimate the memory that the trainer needs on each GPU.

    Args:
        config: Settings of the run and the simulation.
        shape: Shape of the model.
        recompute: Value to assume for `trainer.recompute`; None for the value in `config`.
    """
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
    """Return the value of `trainer.recompute` that recomputes least and with which the trainer's
    estimated peak memory fits into `simulate.trainer_memory_share` of a GPU's `memory_bytes`; None
    if no value fits.

    If the configuration sets `trainer.recompute`, only that value is tried. If trainer and engines
    share GPUs and the trainer's state stays on them while engines generate (`simulate.offload` is
    false), only `all` is tried. On shared GPUs, the memory of a paused engine is not available to
    the trainer.
    """
    limit = config.simulate.trainer_memory_share * memory_bytes
    layers, wanted = shape.layers // config.parallel.pipeline, config.trainer.recompute
    choices = by_work(shape, layers)
    if "recompute" in config.trainer.model_fields_set:
        choices = [wanted] if not isinstance(wanted, int) or wanted <= layers else []
    elif config.simulate.placement == "colocated" and not config.simulate.offload:
        choices = ["all"]
    if "colocated" in (config.engines.placement, config.simulate.placement):
        limit -= PAUSED_ENGINE_BYTES
    fitting = (c for c in choices if memory_of_trainer(config, shape, c).peak <= limit)
    return next(fitting, None)


def trainer_costs(config: SimulationConfig) -> TrainerCosts:
    """Return the trainer's cost model. If `trainer.recompute` is not set, the model uses the value
    that the start of a run would choose."""
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
        config.engines.tensor,
    )


def group_source(config: SimulationConfig) -> GroupSource:
    """Return the source that draws response lengths and rewards for each group of a run.

    Raises:
        UserError: The file `simulate.lengths.path` cannot be used.
    """
    return GroupSource(
        config.simulate.lengths,
        config.simulate.reward,
        group_size=config.schedule.group_size,
        longest=config.sampling.max_new_tokens,
        seed=config.seed,
    )


def episode_source(config: SimulationConfig) -> EpisodeSource | None:
    """Return the source that draws the turns of each group's episodes; None if
    `simulate.episode.turns` is not set, so that trajectories are single responses.

    Raises:
        UserError: The file `simulate.lengths.path` cannot be used.
    """
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
    """Create a simulated run at time 0 from its settings.

    Args:
        config: Settings of the run and the simulation.
        recorder: Records the scheduler's events and actions; None to record nothing.

    Raises:
        UserError: Settings contradict each other, or a file cannot be used.
    """
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
        max_scorers=config.task.scorer_workers,
        trainer=trainer_costs(config),
        source=group_source(config),
        episodes=episodes,
        recorder=recorder,
    )


def simulate(config: SimulationConfig) -> Summary:
    """Simulate `simulate.steps` training steps, and return a summary of the steps after the first
    `simulate.warmup_steps`."""
    world = build_world(config)
    world.run(config.simulate.steps)
    return world.statistics.summary(
        config.simulate.warmup_steps,
        engine_gpus=config.engines.count * config.engines.tensor,
        trainer_gpus=config.parallel.ranks,
        shared=config.simulate.placement == "colocated",
    )
