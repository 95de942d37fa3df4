"""`megatron-async sft --from-teacher`: samples responses from a teacher and keeps those that the
reward accepts.

The teacher is the URL of an OpenAI-compatible endpoint, or the directory of a Hugging Face model,
which this command serves by an engine with the run's settings. Responses are sampled for each
training problem and scored by the run's reward. Accepted responses are written to `teacher.jsonl`
in the run directory, in the order of the problems.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import typer

from megatron_async.commands.evaluation import engine_here
from megatron_async.config import RunConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import EngineError
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.errors import ComponentFailure, UserError, short_repr
from megatron_async.files.disk import append_json_lines
from megatron_async.launcher.preflight import check_served
from megatron_async.rollout.responses import EnginePool, ResponseSpec, respond
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.scoring.rewards.sample import Unavailable
from megatron_async.scoring.rewards.services import JsonPoster, below, proxy_of
from megatron_async.tasks.base import Problem, ProblemSource
from megatron_async.tasks.build import build_task
from megatron_async.tasks.text_task import TextTask

_REPORTS = 10
# Number of concurrent requests to the teacher. An endpoint gets no more connections than this. An
# engine may process fewer at once and queues the others.
_CONCURRENCY = 64
# Number of retries of a request to an endpoint that is busy, fails or cannot be reached. After them
# the command ends with an error.
_RETRIES = 3

T = TypeVar("T")
Ask: TypeAlias = Callable[[Problem, int], Awaitable[str]]
"""Function that returns the teacher's response to a problem. The second argument is a number that
is different for every response that the command requests.

Raises ComponentFailure if the teacher fails.
"""


def check_teacher(config: RunConfig, teacher: str) -> None:
    """Raise UserError if `teacher` is not an address or model that can be used, or if other
    settings of `sft` contradict it. This starts no process."""
    if _is_address(teacher):
        if not config.sft.teacher.model:
            raise UserError(
                f"--from-teacher is the address {teacher}, which requires the name of the model "
                "there. Set sft.teacher.model."
            )
        JsonPoster(config.sft.teacher.api_key_env, 0)
        proxy_of(teacher)
    elif (Path(teacher) / "config.json").is_file():
        check_served(teacher)
    else:
        raise UserError(
            f"--from-teacher is {teacher}, which is neither an address (http://...) nor the "
            "directory of a Hugging Face model"
        )
    refused = {"data": config.sft.data, "steps": config.sft.steps, "epochs": config.sft.epochs}
    for name, value in refused.items():
        if value:
            raise UserError(
                f"sft.{name} is {short_repr(value)}, but --from-teacher trains on the responses "
                f"that the reward accepts, for sft.teacher.epochs epochs. Remove sft.{name}."
            )


def _is_address(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


def sample_from_teacher(config: RunConfig, directory: RunDirectory, teacher: str) -> RunConfig:
    """Sample responses from `teacher` and return the settings for fine-tuning on accepted
    responses.

    Raises:
        UserError: The reward accepts no response, or the settings do not fit together.
        ComponentFailure: The teacher failed.
    """
    accepted = directory.path / "teacher.jsonl"
    # The task without the problems that are held out for evaluation.
    task = build_task(config.task, config.model.path, config.eval)
    assert isinstance(task, TextTask)
    available, _ = task.counts(0)
    limit = config.sft.teacher.prompts
    if available is None and not limit:
        raise UserError(
            "sft.teacher.prompts is 0 (all), but this task generates problems endlessly. Set a "
            "positive number."
        )
    total = limit if available is None else min(available, limit or available)
    with ExitStack() as stack:
        if _is_address(teacher):
            start = _endpoint(config, teacher, task)
        else:
            log_file = directory.logs / "teacher_engine.log"
            process = stack.enter_context(engine_here(Path(teacher), config, log_file))
            start = _engine(config, teacher, process)
        count, template = asyncio.run(_teach(config, task.source, total, start, accepted))
    if not count:
        raise UserError(
            f"the reward accepted no response of the teacher {teacher} (sft.teacher.min_reward is "
            f"{config.sft.teacher.min_reward:g}); {accepted.parent} has the logs"
        )
    data: dict[str, Any] = {"data": str(accepted), "examples": count, "layout": "rows"}
    config = config.with_section("sft", **data, epochs=config.sft.teacher.epochs)
    return config.with_section("task", prompt_template=template)


async def _teach(
    config: RunConfig,
    source: ProblemSource,
    total: int,
    start: AbstractAsyncContextManager[Ask],
    accepted: Path,
) -> tuple[int, str]:
    """Request responses to `total` problems from the teacher, score them, and append the responses
    that the reward accepts to the file `accepted`.

    Returns:
        The number of accepted responses, and the prompt template of the problems.
    """
    settings = config.sft.teacher
    pool = LocalScorerPool(config.scorers.logging_to(accepted.parent / "logs"), config.model.path)
    gate = asyncio.Semaphore(_CONCURRENCY)
    count, templates = 0, set()

    async def rows(ask: Ask, index: int) -> tuple[Problem, list[dict[str, Any]]]:
        problem = source.train(index)

        async def sample(number: int) -> str:
            async with gate:
                return await ask(problem, index * settings.samples + number)

        texts = await asyncio.gather(*(sample(number) for number in range(settings.samples)))
        scores = await pool.score_texts(problem.payload, texts)
        pairs = zip(texts, scores, strict=True)
        right = [text for text, score in pairs if (score.reward or 0.0) >= settings.min_reward]
        return problem, [_row(problem, text) for text in dict.fromkeys(right)]

    try:
        async with start as ask, _tasks(rows(ask, index) for index in range(total)) as work:
            for done, task in enumerate(work, start=1):
                problem, found = await task
                append_json_lines(accepted, found)
                count += len(found)
                templates.add(config.task.prompt_template or problem.template)
                if done == total or done % max(1, total // _REPORTS) == 0:
                    typer.echo(f"teacher: {done} of {total} prompts, {count} responses accepted")
    finally:
        pool.close()
    if len(templates) > 1:
        raise UserError(
            f"the files of task.sources use {len(templates)} different prompt templates, but "
            "--from-teacher needs a single one. Set task.prompt_template."
        )
    return count, templates.pop()


@asynccontextmanager
async def _tasks(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run the coroutines in `work` concurrently as tasks; cancel unfinished tasks when the block
    ends."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _row(problem: Problem, response: str) -> dict[str, Any]:
    """Return the accepted `response` to `problem` as a row of a fine-tuning file."""
    if problem.messages:
        return {"messages": [*problem.messages, {"role": "assistant", "content": response}]}
    return {**problem.fields, "prompt": problem.question, "response": response}


@asynccontextmanager
async def _endpoint(config: RunConfig, url: str, task: TextTask) -> AsyncIterator[Ask]:
    """Yield a function that requests a response from the OpenAI-compatible endpoint at `url`."""
    settings, address = config.sft.teacher, below(url, "chat/completions")
    poster = JsonPoster(settings.api_key_env, _RETRIES)
    body = {
        "model": settings.model,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": config.sampling.max_new_tokens,
    }

    async def ask(problem: Problem, _number: int) -> str:
        messages = task.messages(problem)
        try:
            reply = await poster.post(address, {**body, "messages": messages})
            return str(reply["choices"][0]["message"]["content"] or "")
        except (Unavailable, LookupError, TypeError) as error:
            raise ComponentFailure(f"the teacher at {address} failed: {error}") from error

    try:
        yield ask
    finally:
        await poster.close()


@asynccontextmanager
async def _engine(config: RunConfig, path: str, process: SGLangProcess) -> AsyncIterator[Ask]:
    """Yield a function that requests a response from the engine of `process`, which serves the
    model at `path`."""
    client = await SGLangClient.connect("teacher", process.url, config.engines, vocabulary_of(path))
    try:
        task = build_task(config.task, path)
        assert isinstance(task, TextTask)
        sampling = SamplingConfig(
            temperature=config.sft.teacher.temperature,
            top_p=config.sft.teacher.top_p,
            max_new_tokens=config.sampling.max_new_tokens,
            allow_biased_behavior=True,
        )
        spec = ResponseSpec(sampling, sampling.max_new_tokens, tuple(task.stop_token_ids))
        yield partial(ask_engine, EnginePool(lambda: [client]), task, spec)
    finally:
        await client.close()


async def ask_engine(
    engines: EnginePool, task: TextTask, spec: ResponseSpec, problem: Problem, number: int
) -> str:
    """Generate a response to a problem on the engines and return its text.

    Raises:
        ComponentFailure: The engine failed or refused the prompt.
    """
    try:
        found = await respond(spec, task.prompt_ids(problem), f"teacher-{number}", engines)
    except EngineError as error:
        raise ComponentFailure(f"the teacher's engine failed: {error}") from error
    if found is None:
        raise ComponentFailure(f"the teacher's engine refused the prompt {problem.question!r:.200}")
    return task.text(found.token_ids)
