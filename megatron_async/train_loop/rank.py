"""Entry of one trainer rank under torchrun: `-m megatron_async.train_loop.rank RUN_DIR`.

Where the rollout side is comes from the environment (`MEGATRON_ASYNC_RAY_ADDRESS`), set by whoever
started both. A failure with a sentence is left in the run directory for the supervisor, and so is
how the run ended: complete, or stopped because it was asked to (SIGUSR2, see `train_loop/stop.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict

from megatron_async.config import RunConfig
from megatron_async.import_path import load_object
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.train_loop.rank_exit import exit_code, leave
from megatron_async.train_loop.stop import StopRequest

# Set by whoever starts both sides.
RAY_ADDRESS_VARIABLE = "MEGATRON_ASYNC_RAY_ADDRESS"


def train(directory: RunDirectory, config: RunConfig, ray_address: str, stop: StopRequest) -> None:
    """Build this rank's trainer, restore the newest checkpoint, run the loop, export."""
    from megatron_async.trainer.device import import_megatron

    import_megatron()
    from megatron_async.checkpoint.manager import CheckpointManager
    from megatron_async.models.save import save_hf
    from megatron_async.rollout.messages import ResumePoint
    from megatron_async.telemetry.health import HealthWatch
    from megatron_async.telemetry.metrics import MetricsWriter, read_metrics
    from megatron_async.telemetry.summary import summarise
    from megatron_async.telemetry.trackers.base import TrackedRun
    from megatron_async.telemetry.trackers.build import start_trackers
    from megatron_async.train_loop.loop import TrainLoop
    from megatron_async.train_loop.manager_client import RayLink, RolloutLink
    from megatron_async.train_loop.rank_zero import RankZero, patience_seconds
    from megatron_async.trainer.offload import trainer_memory
    from megatron_async.trainer.parallel import parallel_session
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.weight_sync.publisher import WeightPublisher
    from megatron_async.weight_sync.transports.base import seconds_to_give_up

    with ExitStack() as stack:
        session = parallel_session(
            config.parallel,
            config.trainer,
            config.seed,
            held_up_seconds=seconds_to_give_up(config.weights),
        )
        first = stack.enter_context(session).rank == 0
        rank_zero = RankZero.waited_for(patience_seconds(config))
        lineage = rank_zero.does(directory.next_lineage)
        checkpoints = CheckpointManager(directory.checkpoints, config.checkpoint, rank_zero.group)
        newest = checkpoints.newest()
        resume = ResumePoint(lineage)
        if newest is not None:
            manifest = newest.manifest
            position = int(manifest.extra["store_position"])
            resume = ResumePoint(lineage, newest.step, manifest.lineage, position)

        def build() -> PolicyTrainer:
            trainer = PolicyTrainer(config, lineage=lineage)
            if newest is not None:
                checkpoints.load(trainer, newest)
            return trainer

        # Side by side with the engines' start; on shared devices only when the engines rest.
        colocated = config.engines.placement == "colocated"
        trainer = None if colocated else build()
        metrics: MetricsWriter | None = None
        link: RolloutLink | None = None
        before: list[dict[str, float]] = []
        if first:
            ray_link = RayLink(config, ray_address, stop.asked)
            stack.callback(ray_link.close)
            link = ray_link
            if config.experiment.ledger is not None:
                ledger = load_object(config.experiment.ledger, "experiment.ledger")
                link = ledger(directory.path).link(ray_link)
            trained = read_metrics(directory.metrics_file)
            before = [metrics for metrics in trained if metrics["step"] < resume.step]
            run = TrackedRun(
                config.name, directory.path, config.model_dump(mode="json"), lineage=lineage
            )
            trackers = start_trackers(config.telemetry, run)
            metrics = MetricsWriter(directory.metrics_file, trackers, lineage=lineage)
            stack.callback(metrics.close)
            for damaged in checkpoints.newer_than(newest):
                message = f"{damaged.path} is damaged (trainer.log has the fault) and passed over"
                metrics.warn(max(0, resume.step - 1), "checkpoint_damaged", message)
        rank_zero.does(lambda: link.attach(resume) if link is not None else None)
        trainer = trainer or build()
        publisher = WeightPublisher(config, trainer.model, directory.path / "weights")
        stack.callback(publisher.close)
        loop = TrainLoop(
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
            health=HealthWatch(config.schedule.max_async_level, before),
        )
        complete = loop.run()
        if complete and config.checkpoint.export_hf:
            # A run that was extended by --resume exports anew.
            rank_zero.does(lambda: shutil.rmtree(directory.hf_export, ignore_errors=True))
            save_hf(trainer.model, directory.hf_export, config.model.path)
        if metrics is not None:
            metrics.report(trainer.step, json.dumps(asdict(summarise(directory)), indent=1))
        outcome = RunOutcome.COMPLETE if complete else RunOutcome.STOPPED
        rank_zero.does(lambda: directory.report_outcome(outcome))


def main(arguments: list[str]) -> int:
    """Exit code of one rank (`train_loop/rank_exit.py`)."""
    stop = StopRequest.from_environment()
    directory, config = RunDirectory.find(arguments[0], [])
    address = os.environ[RAY_ADDRESS_VARIABLE]
    return exit_code(directory, lambda: train(directory, config, address, stop))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
