"""`megatron-async gateway`: serves a model by the chat API that agents use, without training.

The gateway replies as in a run. In a run, however, each call becomes a turn of an agent's episode.
Here each call is independent: nothing is stored, and calls run concurrently.
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
    """Start an engine and serve a model to agents until the user presses Ctrl-C.

    Args:
        config_file: YAML file with the settings.
        overrides: Settings that replace settings of the file.
        model: Model to serve; None for `model.path`.
        port: Port to listen on; 0 for any free port.

    Raises:
        UserError: Bad input, or the port is in use.
        ComponentFailure: The engine failed.
    """
    config = load_config(config_file, overrides)
    config = derive(config, Machine.here(config)).config
    path = model or Path(config.model.path)
    check_model(path)
    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UserError(
            f"--port is {port}, on which this process cannot listen: {error}"
        ) from error
    typer.echo("starting an engine; the gateway's address and key follow", err=True)
    with (
        listener,
        private_directory() as logs,
        engine_here(path, config, logs / "engine.log") as process,
        suppress(KeyboardInterrupt),
    ):
        asyncio.run(_serve(config, path, process.url, listener))


async def _serve(config: RunConfig, model: Path, engine_url: str, listener: socket.socket) -> None:
    """Load the model into the engine at `engine_url`. Then serve chat calls on the socket
    `listener` until this coroutine is canceled."""
    vocabulary = vocabulary_of(str(model))
    try:
        client = await SGLangClient.connect("gateway", engine_url, config.engines, vocabulary)
        try:
            await client.load_from_disk(model, PolicyVersion(0, 0))
            gateway = Gateway(config.sampling)
            address = await gateway.start(listener)
            key = gateway.open(ServedPolicy(config, str(model), EnginePool(lambda: [client])))
            typer.echo(instructions(address, key))
            await asyncio.Event().wait()
        finally:
            await client.close()
    except EngineError as error:
        raise ComponentFailure(f"the gateway's engine failed: {error}") from error


def instructions(address: str, key: str) -> str:
    """Return shell commands that send a request to the gateway."""
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"export OPENAI_BASE_URL={address} OPENAI_API_KEY={key}\n"
        "curl $OPENAI_BASE_URL/chat/completions -H 'Content-Type: application/json' "
        f"-H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}'\n"
        "Press Ctrl-C to end the gateway."
    )


class ServedPolicy:
    """Handles the gateway's chat calls by generating a response to each call independently."""

    def __init__(self, config: RunConfig, model: str, engines: EnginePool) -> None:
        tokenizer = load_tokenizer(model)
        stops = stop_tokens(model, tokenizer)
        parser, vocabulary = config.episode.tool_parser, vocabulary_of(model)
        self._codecs = ChatCodecs(config.task, tokenizer, stops, parser, vocabulary)
        self._spec = ResponseSpec(config.sampling, config.sampling.max_new_tokens, tuple(stops))
        self._engines = engines
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._printed: set[str] = set()

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Start generating the reply to the chat call `asked`; return the call that will get the
        reply.

        A client's retry (`retry`) is generated like a new call, because nothing is stored.
        """
        for notice in set(asked.notices) - self._printed:
            self._printed.add(notice)
            typer.echo(f"note: {notice}", err=True)
        call = Call(asked)
        task = asyncio.ensure_future(self._generate(call, asked, next(self._numbers)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def _generate(self, call: Call, request: ChatCall, number: int) -> None:
        """Generate a response to `request` and set it, or the error, as the reply of `call`.

        Args:
            number: Serial number of the call, used as the name of the engine's request.
        """
        name = f"gateway-{number}"
        try:
            codec = self._codecs.of(request.tools)
            ids = codec.opening(request.messages)
            response = await respond(self._spec, ids, name, self._engines)
            if response is None:
                message = f"the engine refused the prompt of {len(ids)} tokens as too long"
                raise CallRefused(message, "messages", code=TOO_LONG)
            tokens, end = (response.token_ids, response.logprobs), response.end
            stored = codec.stored(request, *tokens, len(ids), ended=end is FinishReason.STOP)
            call.answer.set_result(codec.answer(name, stored))
        except CallRefused as refused:
            call.answer.set_exception(refused)
        except EngineError as error:
            call.answer.set_exception(CallRefused(f"the engine failed: {error}", status=503))
