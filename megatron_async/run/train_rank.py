"""Entry of one trainer rank under torchrun: `-m megatron_async.run.train_rank RUN_DIR`.

Where the rollout side is comes from the environment (`MEGATRON_ASYNC_RAY_ADDRESS`), set by whoever
started both. A failure with a sentence is left in the run directory for the supervisor, and so is
how the run ended: complete, or stopped because it was asked to (SIGUSR2, see `run/stop.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack

from megatron_async.config import RunConfig
from megatron_async.run.directory import Outcome, RunDirectory
from megatron_async.run.environment import RAY_ADDRESS_VARIABLE
from megatron_async.run.rank_exit import exit_code, leave
from megatron_async.run.stop import StopRequest


def train(directory: RunDirectory, config: RunConfig, ray_address: str, stop: StopRequest) -> None:
    """Build this rank's trainer, restore the newest checkpoint, run the loop, export."""
    from megatron_async.checkpoint.manager import CheckpointManager
    from megatron_async.rollout.manager import ResumePoint
    from megatron_async.run.link import RayLink, RolloutLink
    from megatron_async.run.loop import LoopParts, TrainLoop
    from megatron_async.run.rank_zero import RankZero, patience_seconds
    from megatron_async.run.trained import NotingLink
    from megatron_async.telemetry.metrics import MetricsWriter
    from megatron_async.trainer.offload import trainer_memory
    from megatron_async.trainer.parallel import parallel_session
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.weights.publisher import WeightPublisher
    from megatron_async.weights.save import save_hf
    from megatron_async.weights.transport import seconds_to_give_up

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
        if first:
            ray_link = RayLink(config, ray_address, stop.asked)
            stack.callback(ray_link.close)
            link = NotingLink(ray_link, directory.trained) if config.experiment.ledger else ray_link
            board = directory.tensorboard if config.telemetry.tensorboard else None
            metrics = MetricsWriter(directory.metrics_file, board, lineage=lineage)
            stack.callback(metrics.close)
        rank_zero.does(lambda: link.attach(resume) if link is not None else None)
        trainer = trainer or build()
        publisher = WeightPublisher(config, trainer.model, directory.path / "weights")
        stack.callback(publisher.close)
        parts = LoopParts(
            config,
            trainer,
            publisher,
            checkpoints,
            link,
            metrics,
            stop,
            resume,
            trainer_memory(config, trainer),
            rank_zero,
        )
        complete = TrainLoop(parts).run()
        if complete and config.checkpoint.export_hf:
            # A run that was extended by --resume exports anew.
            rank_zero.does(lambda: shutil.rmtree(directory.hf_export, ignore_errors=True))
            save_hf(trainer.model, directory.hf_export, config.model.path)
        outcome = Outcome.COMPLETE if complete else Outcome.STOPPED
        rank_zero.does(lambda: directory.report_outcome(outcome))


def main(arguments: list[str]) -> int:
    """Exit code of one rank (`run/rank_exit.py`)."""
    stop = StopRequest.from_environment()
    directory, config = RunDirectory.find(arguments[0], [])
    address = os.environ[RAY_ADDRESS_VARIABLE]
    return exit_code(directory, lambda: train(directory, config, address, stop))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
