"""Worked answers from a teacher: sampled for each training problem, scored, the right ones kept.

`megatron-async sft --from-teacher URL|MODEL`. A URL is an OpenAI-compatible endpoint, a MODEL a
Hugging Face directory that one of the run's engines serves meanwhile. What is kept stands in
`teacher.jsonl` of the run directory, in the order of the problems.
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
# Answers asked for at once. The limit bounds the connections to an address; an engine of the run
# queues what it cannot generate yet.
_CONCURRENCY = 64
# Further attempts where the address is busy. An address that stays busy ends the command instead of
# leaving it waiting.
_RETRIES = 3

T = TypeVar("T")
Ask: TypeAlias = Callable[[Problem, int], Awaitable[str]]
"""Returns an answer to a problem; the number differs for each. Raises ComponentFailure."""


def check_teacher(config: RunConfig, teacher: str) -> None:
    """Refuse a teacher that cannot be asked, before anything starts. Raises UserError."""
    if _is_address(teacher):
        if not config.sft.teacher.model:
            raise UserError(
                f"--from-teacher {teacher} is an address: sft.teacher.model must name the model "
                "there"
            )
        JsonPoster(config.sft.teacher.api_key_env, 0)
        proxy_of(teacher)
    elif (Path(teacher) / "config.json").is_file():
        check_served(teacher)
    else:
        raise UserError(
            f"--from-teacher {teacher} is neither an address (http://...) nor a Hugging Face model"
        )
    refused = {"data": config.sft.data, "steps": config.sft.steps, "epochs": config.sft.epochs}
    for name, value in refused.items():
        if value:
            raise UserError(
                f"sft.{name} is {short_repr(value)}, and --from-teacher learns what the reward "
                "accepts, sft.teacher.epochs times: leave it out"
            )


def _is_address(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


def sample_from_teacher(config: RunConfig, directory: RunDirectory, teacher: str) -> RunConfig:
    """Sample from `teacher`; the settings of a fine-tuning on what the reward accepts.

    Raises UserError when it accepts nothing, ComponentFailure when the teacher fails.
    """
    kept = directory.path / "teacher.jsonl"
    asked = build_task(config.task, config.model.path, config.eval)  # no problem of a set
    assert isinstance(asked, TextTask)
    known, _ = asked.counts(0)
    wanted = config.sft.teacher.prompts
    if known is None and not wanted:
        raise UserError(
            "sft.teacher.prompts is 0, all there are, and the task has no end: set their number"
        )
    total = wanted if known is None else min(known, wanted or known)
    with ExitStack() as stack:
        if _is_address(teacher):
            start = _endpoint(config, teacher, asked)
        else:
            log_file = directory.logs / "teacher_engine.log"
            process = stack.enter_context(engine_here(Path(teacher), config, log_file))
            start = _engine(config, teacher, process)
        count, template = asyncio.run(_teach(config, asked.source, total, start, kept))
    if not count:
        raise UserError(
            f"--from-teacher {teacher}: the reward accepted none of its answers "
            f"(sft.teacher.min_reward {config.sft.teacher.min_reward:g}); see {kept.parent}"
        )
    data: dict[str, Any] = {"data": str(kept), "examples": count, "layout": "rows"}
    config = config.with_section("sft", **data, epochs=config.sft.teacher.epochs)
    return config.with_section("task", prompt_template=template)


async def _teach(
    config: RunConfig,
    source: ProblemSource,
    total: int,
    start: AbstractAsyncContextManager[Ask],
    kept: Path,
) -> tuple[int, str]:
    """Write what the reward accepts; how many, and how their prompts are put."""
    settings = config.sft.teacher
    pool = LocalScorerPool(config.scorers.logging_to(kept.parent / "logs"), config.model.path)
    gate = asyncio.Semaphore(_CONCURRENCY)
    count, templates = 0, set()

    async def rows(ask: Ask, place: int) -> tuple[Problem, list[dict[str, Any]]]:
        problem = source.train(place)

        async def sample(number: int) -> str:
            async with gate:
                return await ask(problem, place * settings.samples + number)

        texts = await asyncio.gather(*(sample(number) for number in range(settings.samples)))
        scores = await pool.score_texts(problem.payload, texts)
        pairs = zip(texts, scores, strict=True)
        right = [text for text, score in pairs if (score.reward or 0.0) >= settings.min_reward]
        return problem, [_row(problem, text) for text in dict.fromkeys(right)]

    try:
        async with start as ask, _tasks(rows(ask, place) for place in range(total)) as work:
            for place, task in enumerate(work, start=1):
                problem, found = await task
                append_json_lines(kept, found)
                count += len(found)
                templates.add(config.task.prompt_template or problem.template)
                if place == total or place % max(1, total // _REPORTS) == 0:
                    typer.echo(f"teacher: {place} of {total} prompts, {count} answers kept")
    finally:
        pool.close()
    if len(templates) > 1:
        raise UserError(
            f"--from-teacher: the files of task.sources put their prompts in {len(templates)} "
            "ways; set task.prompt_template for all of them"
        )
    return count, templates.pop()


@asynccontextmanager
async def _tasks(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run `work` at once; what is not awaited by the end is canceled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _row(problem: Problem, response: str) -> dict[str, Any]:
    """A line of an SFT file."""
    if problem.messages:
        return {"messages": [*problem.messages, {"role": "assistant", "content": response}]}
    return {**problem.fields, "prompt": problem.question, "response": response}


@asynccontextmanager
async def _endpoint(config: RunConfig, url: str, task: TextTask) -> AsyncIterator[Ask]:
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
        wanted = ResponseSpec(sampling, sampling.max_new_tokens, tuple(task.stop_token_ids))
        yield partial(ask_engine, EnginePool(lambda: [client]), task, wanted)
    finally:
        await client.close()


async def ask_engine(
    engines: EnginePool, task: TextTask, wanted: ResponseSpec, problem: Problem, number: int
) -> str:
    """Return the text that an engine generates for a problem. Raises ComponentFailure."""
    try:
        found = await respond(wanted, task.prompt_ids(problem), f"teacher-{number}", engines)
    except EngineError as error:
        raise ComponentFailure(f"the teacher's engine failed: {error}") from error
    if found is None:
        raise ComponentFailure(f"the teacher's engine refuses the prompt {problem.question!r:.200}")
    return task.text(found.token_ids)
