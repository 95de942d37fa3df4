"""Builds one trainer rank from the run directory, runs its loop, and reports the run's outcome.

Import this module after a call of `trainer.device.import_megatron`, because its own imports import
Megatron.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from megatron_async.checkpoint.manager import Checkpoint, CheckpointManager
from megatron_async.config import RunConfig
from megatron_async.models.save import save_hf
from megatron_async.process_backends.addresses import connect_backend
from megatron_async.rollout.messages import ResumePoint
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.scoring.identity import reward_identity
from megatron_async.tasks.data_identity import data_identity
from megatron_async.telemetry.health import HealthWatch
from megatron_async.telemetry.learning import UnreachedThreshold
from megatron_async.telemetry.metrics import MetricsWriter, read_metrics
from megatron_async.telemetry.summary import summarize
from megatron_async.telemetry.trackers.base import TrackedRun
from megatron_async.telemetry.trackers.build import start_trackers
from megatron_async.train_loop.attempt import restart_warning, restarts
from megatron_async.train_loop.loop import TrainLoop
from megatron_async.train_loop.manager_client import RemoteLink, RolloutLink
from megatron_async.train_loop.rank_zero import RankZero, patience_seconds
from megatron_async.train_loop.stop import StopRequest
from megatron_async.trainer.capabilities import detect
from megatron_async.trainer.offload import trainer_memory
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.weight_sync.publisher import WeightPublisher
from megatron_async.weight_sync.transports.base import seconds_to_give_up


def train(
    directory: RunDirectory, config: RunConfig, backend: str, stop: StopRequest, cause: str
) -> None:
    """Run one trainer rank: build the trainer, restore the newest checkpoint, train, export.

    Args:
        directory: The run directory.
        config: The run's settings.
        backend: Address of the process backend, at which the rollout manager is found.
        stop: The request to stop, which may come at any time.
        cause: Message of the failure after which torchrun has restarted all ranks; empty if unknown
            or if there was no restart.
    """
    with ExitStack() as stack:
        session = parallel_session(
            config.parallel,
            config.trainer,
            config.seed,
            max_stall_seconds=seconds_to_give_up(config.weights),
        )
        first = stack.enter_context(session).rank == 0
        rank_zero = RankZero.with_timeout(patience_seconds(config))
        lineage = rank_zero.run(directory.next_lineage)
        checkpoints = CheckpointManager(directory.checkpoints, config.checkpoint, rank_zero.group)
        newest = checkpoints.newest()
        resume = _resume_point(lineage, newest)

        def build() -> PolicyTrainer:
            trainer = PolicyTrainer(config, lineage=lineage)
            if newest is not None:
                checkpoints.load(trainer, newest)
            return trainer

        # The trainer is built while the engines start. If they share devices, it is built only
        # after the engines have started and freed the devices' memory.
        colocated = config.engines.placement == "colocated"
        trainer = None if colocated else build()
        link: RolloutLink | None = None
        metrics: MetricsWriter | None = None
        before = _steps_before(directory, resume.step) if first else []
        if first:
            link = _link(directory, config, backend, stop, stack)
            metrics = writer(directory, config, stack, lineage=lineage, step=resume.step)
            damaged = checkpoints.newer_than(newest)
            found = _warnings(config, restarts(lineage), cause, damaged, resume.step)
            for name, message in found:
                metrics.warn(max(0, resume.step - 1), name, message)
        rank_zero.run(lambda: link.attach(resume) if link is not None else None)
        trainer = trainer or build()
        where = rank_zero.run(lambda: directory.weights_directory(config.weights.directory))
        publisher = WeightPublisher(config, trainer.model, where)
        stack.callback(publisher.close)
        complete = TrainLoop(
            config=config,
            trainer=trainer,
            publisher=publisher,
            checkpoints=checkpoints,
            link=link,
            metrics=metrics,
            stop=stop,
            resume=resume,
            memory=trainer_memory(config, trainer),
            rank_zero=rank_zero,
            begin=lambda: directory.begin(data_identity(config, directory.data_identity())),
            health=HealthWatch(config.schedule.max_async_level, before),
            scored_by=reward_identity(config) if first else "",
            threshold=_threshold(config, directory, before),
        ).run()
        if complete and config.checkpoint.export_hf:
            _export(trainer, directory, config, rank_zero)
        if metrics is not None:
            metrics.report(trainer.step, json.dumps(asdict(summarize(directory)), indent=1))
        outcome = RunOutcome.COMPLETE if complete else RunOutcome.STOPPED
        rank_zero.run(lambda: directory.report_outcome(outcome))


def _steps_before(directory: RunDirectory, step: int) -> list[dict[str, float]]:
    """Return the metrics that were logged for the steps before `step`."""
    return [line for line in read_metrics(directory.metrics_file) if line["step"] < step]


def _threshold(
    config: RunConfig, directory: RunDirectory, before: Sequence[Mapping[str, float]]
) -> UnreachedThreshold:
    """Return the check that warns if no reward of the run has reached `eval.solved_at`, the reward
    from which a response counts as right.

    Args:
        config: The run's settings.
        directory: The run directory, from which the rewards of earlier evaluations are read.
        before: Metrics of the steps that were trained before this start of the trainer. Their
            rewards count too.
    """
    counts = bool(config.eval_sets() or config.task.difficulty.pools)
    evaluated = read_metrics(directory.metrics_file, kind="eval") if before else []
    largest = [n for line in evaluated for name, n in line.items() if name.endswith("reward_max")]
    return UnreachedThreshold(config.eval.solved_at if counts else None, before, largest)


def _export(
    trainer: PolicyTrainer, directory: RunDirectory, config: RunConfig, rank_zero: RankZero
) -> None:
    """Write the model in Hugging Face format. If there is an export already, replace it.

    A complete run that was resumed with more steps has an export, of the model after the former
    last step.
    """
    rank_zero.run(lambda: shutil.rmtree(directory.hf_export, ignore_errors=True))
    version = str(trainer.version)
    save_hf(trainer.model, directory.hf_export, config.model.path, version=version)


def _warnings(
    config: RunConfig, number: int, cause: str, damaged: Iterable[Checkpoint], loaded: int
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each warning about this start of the trainer.

    Args:
        config: The run's settings.
        number: Number of restarts of the trainer ranks since the run was launched.
        cause: Message of the failure before the newest restart; empty if unknown.
        damaged: Checkpoints that were skipped because they are damaged.
        loaded: Step of the checkpoint that was loaded.
    """
    if number:
        yield restart_warning(number, cause, loaded, config.trainer.max_restarts)
    for checkpoint in damaged:
        message = (
            f"checkpoint {checkpoint.path} is damaged (trainer.log has the details); "
            f"the checkpoint of step {loaded} was loaded instead"
        )
        yield "checkpoint_damaged", message


def _resume_point(lineage: int, newest: Checkpoint | None) -> ResumePoint:
    """Return the point at which this start of the trainer (a lineage) continues the run: the
    checkpoint `newest` or, if that is None, step 0."""
    if newest is None:
        return ResumePoint(lineage)
    position = int(newest.manifest.extra["store_position"])
    return ResumePoint(lineage, newest.step, newest.manifest.lineage, position)


def _link(
    directory: RunDirectory,
    config: RunConfig,
    backend_address: str,
    stop: StopRequest,
    stack: ExitStack,
) -> RolloutLink:
    """Connect to the process backend at `backend_address` and return the link to the rollout
    manager that it runs. `stack` closes the connection."""
    backend = connect_backend(backend_address, directory.logs)
    stack.callback(backend.close)
    return RemoteLink(config, backend, stop.asked)


def writer(
    directory: RunDirectory,
    config: RunConfig,
    stack: ExitStack,
    *,
    lineage: int,
    stage: str = "",
    step: int = 0,
) -> MetricsWriter:
    """Open the run's metrics file and experiment trackers; `stack` closes the returned writer.

    Args:
        directory: The run directory.
        config: The run's settings, which are passed to the trackers without the API key.
        stack: Closes the writer.
        lineage: Number of this start of the trainer, which is written with every line.
        stage: "sft" for fine-tuning; empty for reinforcement learning.
        step: Number of the first step that will be written.
    """
    settings = config.model_dump(mode="json", exclude={"engines": {"api_key"}})
    run = TrackedRun(config.name, directory.path, settings, lineage=lineage, stage=stage, step=step)
    metrics = MetricsWriter(
        directory.metrics_file, start_trackers(config.telemetry, run), lineage=lineage
    )
    stack.callback(metrics.close)
    device = detect().device_name or f"{os.cpu_count()} CPU cores"
    metrics.start(step, f"{device}; {config.parallel.ranks} trainer ranks")
    return metrics
