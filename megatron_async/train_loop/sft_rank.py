"""Entry point of one rank of supervised fine-tuning, which torchrun starts.

The command is `-m megatron_async.train_loop.sft_rank RUN_DIR DESTINATION`. Every rank builds
the same batches from the same seed, so no batch has to be sent between ranks.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_async.config import RunConfig
from megatron_async.config.run import SFTConfig
from megatron_async.process_backends.child_process import follow_parent
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.base import WorkedExample
from megatron_async.train_loop.attempt import exit_code, leave
from megatron_async.trainer.step import StepReport
from megatron_async.trajectory.batch import TokenBatch

# Steps between two progress lines. Steps of small models are so short that a line for every step
# would fill the terminal.
_LOG_EVERY = 10


def batches_of(count: int, settings: SFTConfig, seed: int) -> list[npt.NDArray[np.int64]]:
    """Return the indices of the examples of each training step.

    Each epoch has its own random order, and every example is used once per epoch. If the setting
    `epochs` is used, the last batch may be smaller than the others.

    Args:
        count: Number of examples.
        settings: Number of steps or epochs, and the batch size.
        seed: Seed of the order.
    """
    size = settings.batch_sequences
    wanted = settings.epochs * count if settings.epochs else settings.batches * size
    order = np.random.default_rng(seed)
    epochs = [order.permutation(count) for _ in range(-(-wanted // count))]
    return np.split(np.concatenate(epochs)[:wanted], range(size, wanted, size))


def example_batch(examples: Sequence[WorkedExample], step: int) -> TokenBatch:
    """Pack worked examples into one batch, in which the tokens of the responses are trained,
    including the end-of-text token. If an example has `trained`, only the tokens that it marks are
    trained. `step` is the number of the batch."""
    lengths = [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    cu_S1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    trained = [np.ones(len(e.response_ids)) if e.trained is None else e.trained for e in examples]
    untrained = [np.zeros(len(e.prompt_ids)) for e in examples]
    mask = [side for pair in zip(untrained, trained, strict=True) for side in pair]
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
    """Run one rank of fine-tuning: all steps, then the export of the model to `destination`."""
    from megatron_async.trainer.device import import_megatron

    import_megatron()
    from megatron_async.models.save import save_hf
    from megatron_async.tasks import build_task
    from megatron_async.train_loop.assembly import writer
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
            metrics = writer(directory, config, stack, lineage=0, stage="sft")
        for step, chosen in enumerate(batches):
            report = trainer.train_sft(example_batch([examples[i] for i in chosen], step))
            due = step % _LOG_EVERY == 0 or step == len(batches) - 1
            if metrics is not None and due:
                metrics.write(step, _sft_metrics(report), kind="sft")
        save_hf(trainer.model, destination, config.model.path)


def _sft_metrics(report: StepReport) -> dict[str, float]:
    """Return the metrics of a fine-tuning step by name."""
    return {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/learning_rate": report.learning_rate,
        "train/tokens_per_second": report.tokens_per_second,
        "train/tokens": report.num_tokens,
    }


def main(arguments: list[str]) -> int:
    """Run one rank of fine-tuning and return its exit code: 0, 1 if a component failed, 2 for bad
    input."""
    follow_parent()
    directory, config = RunDirectory.find(arguments[0], [])
    return exit_code(directory, lambda: train(config, directory, Path(arguments[1])))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
