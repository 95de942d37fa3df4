"""`megatron-async gateway`: the chat API of agents over a model, without training.

It answers as a run does, but each call alone: nothing is stored, and calls run side by side.
"""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from megatron_async.commands.evaluation import engine_here
from megatron_async.config import RunConfig, load_config
from megatron_async.config.files import vocabulary_of
from megatron_async.engines.interface import EngineError
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.environments.calls import Call
from megatron_async.environments.chat import TOO_LONG, CallRefused, ChatCall
from megatron_async.environments.chat_codec import ChatCodecs
from megatron_async.environments.gateway import LOOPBACK, MODEL, Gateway
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.private_directory import private_directory
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.preflight import check_model
from megatron_async.rollout.responses import EnginePool, ResponseSpec, respond
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.trajectory.types import FinishReason, PolicyVersion


def gateway_command(
    config_file: Path, overrides: Sequence[str], model: Path | None, port: int
) -> None:
    """Serve until it is interrupted. Raises UserError or ComponentFailure."""
    config = load_config(config_file, overrides)
    config = derive(config, Machine.here(config)).config
    path = model or Path(config.model.path)
    check_model(path)
    try:
        bound = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UserError(f"--port {port} cannot be listened on: {error}") from error
    typer.echo("an engine starts; its address and key follow", err=True)
    with (
        bound,
        private_directory() as logs,
        engine_here(path, config, logs / "engine.log") as process,
        suppress(KeyboardInterrupt),
    ):
        asyncio.run(_serve(config, path, process.url, bound))


async def _serve(config: RunConfig, model: Path, engine_url: str, bound: socket.socket) -> None:
    vocabulary = vocabulary_of(str(model))
    try:
        client = await SGLangClient.connect("gateway", engine_url, config.engines, vocabulary)
        try:
            await client.load_from_disk(model, PolicyVersion(0, 0))
            gateway = Gateway(config.sampling)
            address = await gateway.start(bound)
            key = gateway.open(ServedPolicy(config, str(model), EnginePool(lambda: [client])))
            typer.echo(instructions(address, key))
            await asyncio.Event().wait()
        finally:
            await client.close()
    except EngineError as error:
        raise ComponentFailure(f"the engine of the gateway failed: {error}") from error


def instructions(address: str, key: str) -> str:
    """Return the commands that use the gateway."""
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"export OPENAI_BASE_URL={address} OPENAI_API_KEY={key}\n"
        "curl $OPENAI_BASE_URL/chat/completions -H 'Content-Type: application/json' "
        f"-H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}'\n"
        "Ctrl-C ends it."
    )


class ServedPolicy:
    """The owner of the key: every call is answered by itself."""

    def __init__(self, config: RunConfig, model: str, engines: EnginePool) -> None:
        tokenizer = load_tokenizer(model)
        stops = stop_tokens(model, tokenizer)
        parser, vocabulary = config.episode.tool_parser, vocabulary_of(model)
        self._texts = ChatCodecs(config.task, tokenizer, stops, parser, vocabulary)
        self._wanted = ResponseSpec(config.sampling, config.sampling.max_new_tokens, tuple(stops))
        self._engines = engines
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._noted: set[str] = set()

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Take a call; one that is asked again is another one."""
        for notice in set(asked.notices) - self._noted:
            self._noted.add(notice)
            typer.echo(f"note: {notice}", err=True)
        call = Call(asked)
        task = asyncio.ensure_future(self._answer(call, asked, next(self._numbers)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def _answer(self, call: Call, asked: ChatCall, number: int) -> None:
        name = f"gateway-{number}"
        try:
            texts = self._texts.of(asked.tools)
            ids = texts.opening(asked.messages)
            response = await respond(self._wanted, ids, name, self._engines)
            if response is None:
                why = f"an engine refuses a prompt of {len(ids)} tokens: too long"
                raise CallRefused(why, "messages", code=TOO_LONG)
            answer, ended = (response.token_ids, response.logprobs), response.end
            stored = texts.stored(asked, *answer, len(ids), ended=ended is FinishReason.STOP)
            call.answer.set_result(texts.answer(name, stored))
        except CallRefused as refused:
            call.answer.set_exception(refused)
        except EngineError as error:
            call.answer.set_exception(CallRefused(f"the engine failed: {error}", status=503))
