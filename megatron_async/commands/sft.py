"""Supervised fine-tuning: the same Megatron trainer on worked answers.

`run_sft` is the supervisor's side on one machine, `run_sft_on_nodes` on each of several, `main`
one rank under torchrun (`-m megatron_async.commands.sft RUN_DIR DESTINATION`). Every rank makes
the same batches from the same seed; nothing is sent between them but gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import typer

from megatron_async.config import RunConfig, load_config
from megatron_async.config.run import SFTConfig
from megatron_async.engines.nodes import node_address
from megatron_async.errors import UserError
from megatron_async.launcher.claim import new_run
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import check_trainer_here
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.preflight import check_one_machine, check_run
from megatron_async.launcher.processes import start_torchrun
from megatron_async.launcher.session import RENDEZVOUS_SECONDS, Session, TrainerNode, check_name
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.base import WorkedExample
from megatron_async.telemetry.progress import Progress
from megatron_async.train_loop.rank_exit import exit_code, leave
from megatron_async.trainer.report import StepReport
from megatron_async.trajectory.batch import TokenBatch

SFT: Final = "megatron-async sft"


def sft_command(
    config_file: Path,
    overrides: Sequence[str],
    out: Path | None,
    session: str | None,
    index: int,
    teacher: str | None = None,
) -> None:
    """Fine-tune here, or as node `index` of `session`. Raises UserError or ComponentFailure."""
    from megatron_async.commands.teacher import check_teacher, taught  # not for every rank

    config = load_config(config_file, overrides)
    if session is None:
        if index:
            raise UserError(f"--index is {index}, and there is no --session for it to be part of")
        check_one_machine(config)
    elif teacher is not None:
        raise UserError(
            f"--from-teacher {teacher} cannot be combined with --session: sample on one machine, "
            "then set sft.data to the teacher.jsonl of its run directory"
        )
    if teacher is not None:
        check_teacher(config, teacher)
        config = derive(config, Machine.here(config)).config
    checked = check_run(config, generates=teacher is not None)
    if index == 0:
        typer.echo(checked.summary)
    config = own_name(checked.config)
    check_trainer_here(config)
    out = out or RunDirectory.of(config).hf_export
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} exists and is not empty")
    if session is None:
        with new_run(config, SFT, resumable=False) as directory:
            if teacher is not None:
                config = taught(config, directory, teacher)
                typer.echo(check_run(config, generates=False).summary)
                directory.save_config(config)
            run_sft(config, directory, out)
    else:
        run_sft_on_nodes(config, out, session, index)
    if index == 0:
        typer.echo(f"checkpoint in {out}; to go on from it: train with model.path={out}")


def own_name(config: RunConfig) -> RunConfig:
    """The settings under NAME-sft, so that `train` with the same file finds its name free."""
    name = config.name
    return config.model_copy(update={"name": name if name.endswith("sft") else f"{name}-sft"})


def run_sft(
    config: RunConfig, directory: RunDirectory, destination: Path, node: TrainerNode | None = None
) -> None:
    """Train in torchrun ranks, show progress, leave a Hugging Face directory at `destination`.

    `node`: this one of several, of which the first shows the progress. Raises UserError or
    ComponentFailure with the sentence of the rank that failed.
    """
    first = node is None or node.index == 0
    if first:
        directory.take_failure()
    child = start_torchrun(
        config.parallel.ranks // (1 if node is None else node.count),
        "megatron_async.commands.sft",
        *(str(directory.path), str(destination)),
        log_file=directory.logs / ("sft.log" if node is None else f"sft-{node.index}.log"),
        environment=trainer_environment(os.environ, one_machine=node is None),
        rendezvous=("--standalone",) if node is None else node.rendezvous(),
    )
    try:
        shown = config.telemetry.progress if first else "off"
        progress = Progress(directory.metrics_file, config.sft.steps, shown)
        code = progress.follow(child.exit_code, lambda: None)
    finally:
        child.stop()
    if code != 0:
        if first:
            directory.raise_failure(child.log_file)
        raise child.failure("sft")


def run_sft_on_nodes(config: RunConfig, destination: Path, session_name: str, index: int) -> None:
    """`run_sft` on one of `parallel.nodes` nodes, each of which calls this with its `index`.

    Node 0 makes the run directory, which all see. Raises UserError or ComponentFailure.
    """
    count = config.parallel.nodes
    if not 0 <= index < count:
        raise UserError(f"--index is {index}; parallel.nodes is {count}, so it is 0 to {count - 1}")
    check_name(session_name)
    directory = RunDirectory.of(config)
    with ExitStack() as stack:
        if index == 0:
            what = f"{SFT}, session {session_name}"
            stack.enter_context(new_run(config, what, resumable=False))
            session = Session.join(directory, session_name)
            stack.callback(session.close)
            session.begin()
        else:  # the directory may be another run's, and only the first node finds out
            session = Session.begun(directory, session_name, RENDEZVOUS_SECONDS)
        run_sft(config, directory, destination, TrainerNode(session, index, count, node_address()))


def batches_of(count: int, settings: SFTConfig, seed: int) -> list[npt.NDArray[np.int64]]:
    """Examples of each step: epoch by epoch in a new order, so that none is learned once more than
    another before all were. With `epochs`, the last batch may be smaller."""
    size, wanted = settings.batch_sequences, settings.steps * settings.batch_sequences
    if settings.epochs:
        wanted = min(wanted, settings.epochs * count)
    order = np.random.default_rng(seed)
    epochs = [order.permutation(count) for _ in range(-(-wanted // count))]
    return np.split(np.concatenate(epochs)[:wanted], range(size, wanted, size))


def example_batch(examples: Sequence[WorkedExample], step: int) -> TokenBatch:
    """Pack worked examples; the response (end of text included) is what is trained."""
    lengths = [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    cu_S1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    trained = [np.ones(len(e.response_ids)) if e.trained is None else e.trained for e in examples]
    untrained = [np.zeros(len(e.prompt_ids)) for e in examples]
    mask = [part for pair in zip(untrained, trained, strict=True) for part in pair]
    count, total = len(examples), int(cu_S1[-1])
    tokens = [np.concatenate([e.prompt_ids, e.response_ids]) for e in examples]
    return TokenBatch(
        step=step,
        token_ids_T=np.concatenate(tokens).astype(np.int32),
        loss_mask_T=np.concatenate(mask).astype(np.float32),
        rollout_logprobs_T=np.zeros(total, np.float32),
        version_T=np.full(total, -1, np.int32),
        lag_T=np.zeros(total, np.int32),
        cu_seqlens_S1=cu_S1,
        rewards_S=np.zeros(count, np.float32),
        group_ids_S=np.arange(count, dtype=np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=np.array([len(e.prompt_ids) for e in examples], np.int32),
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=np.zeros(count, np.bool_),
    )


def train(config: RunConfig, directory: RunDirectory, destination: Path) -> None:
    """Run a rank: all steps, then the export."""
    from megatron_async.trainer.device import import_megatron

    import_megatron()
    from megatron_async.models.save import save_hf
    from megatron_async.tasks import build_task
    from megatron_async.telemetry.metrics import MetricsWriter
    from megatron_async.telemetry.trackers.base import TrackedRun
    from megatron_async.telemetry.trackers.build import start_trackers
    from megatron_async.trainer.parallel import parallel_session
    from megatron_async.trainer.step import PolicyTrainer

    with ExitStack() as stack:
        layout = stack.enter_context(parallel_session(config.parallel, config.trainer, config.seed))
        task = build_task(config.task, config.model.path, config.eval)
        trainer = PolicyTrainer(config, purpose="sft")
        examples = task.worked_examples(config.sft.examples, config.sft.file())
        batches = batches_of(len(examples), config.sft, config.seed)
        metrics = None
        if layout.rank == 0:
            run = TrackedRun(
                config.name, directory.path, config.model_dump(mode="json"), stage="sft"
            )
            trackers = start_trackers(config.telemetry, run)
            metrics = MetricsWriter(directory.metrics_file, trackers, lineage=0)
            stack.callback(metrics.close)
        for step, chosen in enumerate(batches):
            report = trainer.train_sft(example_batch([examples[i] for i in chosen], step))
            due = step % config.sft.log_every == 0 or step == len(batches) - 1
            if metrics is not None and due:
                metrics.write(step, _sft_metrics(report), kind="sft")
        save_hf(trainer.model, destination, config.model.path)


def _sft_metrics(report: StepReport) -> dict[str, float]:
    return {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/learning_rate": report.learning_rate,
        "train/tokens_per_second": report.tokens_per_second,
        "train/tokens": report.num_tokens,
    }


def main(arguments: list[str]) -> int:
    """Exit code of one rank (`train_loop.rank_exit.py`)."""
    directory, config = RunDirectory.find(arguments[0], [])
    return exit_code(directory, lambda: train(config, directory, Path(arguments[1])))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
