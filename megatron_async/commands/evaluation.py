"""`megatron-async eval`: measures the held-out accuracy of Hugging Face checkpoints on one
engine."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from megatron_async.config import RunConfig, load_config
from megatron_async.config.files import vocabulary_of
from megatron_async.engines.interface import EngineError
from megatron_async.engines.nodes import LOOPBACK
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import append_json_lines
from megatron_async.files.private_directory import private_directory
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.preflight import check_evaluation
from megatron_async.models.model_files import SafetensorsDirectory
from megatron_async.process_backends.backend import ProcessBackend
from megatron_async.process_backends.local import local_backend
from megatron_async.rollout.evaluate import Evaluation, Evaluator
from megatron_async.rollout.responses import EnginePool
from megatron_async.scoring.interface import NoScorers, Scorers
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.tasks import build_task
from megatron_async.trajectory.types import PolicyVersion


def eval_command(
    config_file: Path, overrides: Sequence[str], models: Sequence[Path], samples: Path | None
) -> None:
    """Evaluate each checkpoint and print its accuracy.

    Args:
        config_file: YAML file with the settings.
        overrides: Settings that replace settings of the file.
        models: Checkpoints to evaluate; empty for `model.path`.
        samples: New file for the responses; None to save none.

    Raises:
        UserError: Bad input.
        ComponentFailure: The engine failed.
    """
    if samples is not None and samples.exists():
        raise UserError(f"--samples is {samples}, which already exists. Choose another file.")
    config = load_config(config_file, overrides)
    config = derive(config, Machine.here(config)).config
    paths = list(models) or [Path(config.model.path)]
    checked = [check_evaluation(config, path) for path in paths]
    config = config.model_copy(update={"eval": checked[0].config.eval})
    for notice in checked[0].notices:
        typer.echo(f"note: {notice}")

    def show(path: Path, found: Evaluation) -> None:
        with SafetensorsDirectory(path) as weights:
            exported = weights.version()
        name = f"{path} (version {exported})" if exported else f"{path}"
        for result in found.results:
            typer.echo(f"{name}: {result.message()}, {result.seconds:.1f} s")
        if samples is not None:
            # `evaluate_checkpoints` numbered the models for the engine. These numbers mean nothing
            # to a reader, so the policy version that the exported model contains replaces them.
            origin = {"model": str(path), "versions": [exported] if exported else []}
            append_json_lines(samples, [{**sample, **origin} for sample in found.samples()])

    with private_directory() as logs:
        evaluate_checkpoints(config, paths, logs, show)


def evaluate_checkpoints(
    config: RunConfig,
    checkpoints: Sequence[Path],
    log_directory: Path,
    on_result: Callable[[Path, Evaluation], None],
) -> list[Evaluation]:
    """Evaluate checkpoints of one architecture on the task's evaluation sets, one after the other.

    Args:
        config: The run's settings.
        checkpoints: Hugging Face directories.
        log_directory: Directory for the engine's log.
        on_result: Called with each checkpoint and its result.

    Returns:
        The result of each checkpoint.

    Raises:
        ComponentFailure: The engine did not start, or failed during the evaluation.
    """

    async def evaluate(url: str, backend: ProcessBackend) -> list[Evaluation]:
        task = build_task(
            config.task, str(checkpoints[0]), config.eval, has_episodes=config.has_episodes
        )
        client = await SGLangClient.connect(
            "eval", url, config.engines, vocabulary_of(str(checkpoints[0]))
        )
        pool = LocalScorerPool(config.scorers, str(checkpoints[0]))
        scorers: Scorers = pool if config.scores else NoScorers()
        workers = (
            EnvironmentWorkers(config, backend, str(checkpoints[0]))
            if config.has_episodes
            else None
        )
        evaluator = Evaluator(config, task, scorers, workers)
        engines = EnginePool(lambda: [client])
        results = []
        try:
            for number, path in enumerate(checkpoints):
                try:
                    version = PolicyVersion(0, number)
                    await client.load_from_disk(path, version)
                    result = await evaluator.evaluate(engines, version)
                except EngineError as error:
                    raise ComponentFailure(f"the evaluation of {path} failed: {error}") from error
                on_result(path, result)
                results.append(result)
        finally:
            await client.close()
            pool.close()
        return results

    engine = engine_here(checkpoints[0], config, log_directory / "eval_engine.log")
    with engine as process, local_backend(log_directory) as backend:
        return asyncio.run(evaluate(process.url, backend))


@contextmanager
def engine_here(model: Path, config: RunConfig, log_file: Path) -> Iterator[SGLangProcess]:
    """Run one engine with the model on this machine for the duration of the block. Only this
    machine can reach it.

    Raises:
        ComponentFailure: The engine did not start.
    """
    engines = config.engines.model_copy(update={"host": LOOPBACK})
    process = SGLangProcess(model, engines, log_file)
    process.start()
    try:
        yield process
    finally:
        process.stop()
