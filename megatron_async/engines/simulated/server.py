"""Serves a simulated engine over SGLang's HTTP endpoints (`engines.kind: simulated`).

    python -m megatron_async.engines.simulated.server --model-path DIR --port P --settings JSON ...

It implements the endpoints that `sglang/client.py` and the weight transports call, so that a whole
process tree (manager, hosts, HTTP, torchrun) starts, dies and restarts in seconds.
`SimulatedEngine` makes the tokens. They depend only on the prompt and the settings, so a test can
see in the tokens whether any were lost, duplicated or mixed up.

Invariants
- Neither torch nor SGLang is imported, so a start takes as long as importing aiohttp.
- Weights are received but not used. The reported checksum is computed from the received bytes, a
  new version labels tokens from the next token on, and the reported parameter names are read from
  the model directory.
- The server ends when the process that started it ends: it holds one end of a pipe (a lifeline),
  which closes with that process.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors import safe_open

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import (
    EngineError,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from megatron_async.engines.sglang.queue import URGENT
from megatron_async.engines.sglang.server import take_key
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.process_backends.child_process import hold_lifeline
from megatron_async.trajectory.types import PolicyVersion

_MAX_BODY_BYTES = 4 << 30
# Idle connections are closed after this time, as by SGLang's server.
_KEEP_ALIVE_SECONDS = 5.0
_EVENTS = {"Content-Type": "text/event-stream"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def engine_model(settings: EngineConfig, model_path: Path) -> SimulatedEngineModel:
    """Return the simulated engine that `engines.simulated` describes, with the vocabulary of this
    model."""
    vocabulary = int(json.loads((model_path / "config.json").read_text())["vocab_size"])
    return SimulatedEngineModel(
        vocab_size=vocabulary,
        stream_interval=settings.stream_interval,
        max_running_requests=settings.max_running_requests or 1024,
        kv_capacity_tokens=settings.max_total_tokens or 1 << 20,
        max_sequence_tokens=settings.max_sequence_tokens(None),
        **settings.simulated.model_dump(),
    )


def parameter_names(model_path: Path) -> list[str]:
    """Return the names of all tensors in a directory of safetensors files, read from the files'
    headers."""
    names: list[str] = []
    for shard in model_path.glob("*.safetensors"):
        with safe_open(shard, "numpy") as file:
            names += file.keys()
    return sorted(names)


def digest_of_files(directory: Path) -> str:
    """Return the SHA-256 of all safetensors files of a directory.

    Raises:
        OSError: If a file cannot be read.
    """
    digest = hashlib.sha256()
    for shard in sorted(directory.glob("*.safetensors")):
        digest.update(shard.read_bytes())
    return digest.hexdigest()


class SimulatedServer:
    """HTTP endpoints of a simulated engine. `application` returns an aiohttp application with
    them."""

    def __init__(
        self, engine: SimulatedEngine, names: Iterable[str], version: PolicyVersion, api_key: str
    ) -> None:
        self._engine = engine
        self._names = list(names)
        self._version = version
        self._checksum = "initial"
        self._arriving = hashlib.sha256()
        self._session_open = False
        self._api_key = api_key
        self._running: set[str] = set()

    def application(self) -> web.Application:
        """Return an aiohttp application with all endpoints. They require the API key if the
        settings have one."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[guard])
        app.add_routes(
            [
                web.get("/health", self._ok),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.get("/server_info", self._server_info),
                web.get("/metrics", self._metrics),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._ok),
                web.post("/weights_checker", self._weights_checker),
                web.post("/begin_weight_update", self._begin_update),
                web.post("/end_weight_update", self._end_update),
                web.post("/update_weights_from_tensor", self._from_tensor),
                web.post("/update_weights_from_disk", self._from_disk),
            ]
        )
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = f"Bearer {self._api_key}"
        if self._api_key and request.headers.get("Authorization") != wanted:
            return _refusal(401, "the key is missing or wrong")
        try:
            return await handler(request)
        except EngineError as error:
            return _refusal(400, str(error))

    # ------------------------------------------------------------ state

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self._version)})

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {"max_req_input_len": engine.max_sequence_tokens, "dtype": engine.dtype}
        )

    async def _loads(self, request: web.Request) -> web.Response:
        status = await self._engine.status()
        load = {
            "max_total_num_tokens": self._engine.kv_capacity_tokens,
            "num_running_reqs": status.running_requests,
            "num_waiting_reqs": status.queued_requests,
            "token_usage": status.kv_usage,
        }
        return web.json_response({"loads": [load]})

    async def _metrics(self, request: web.Request) -> web.Response:
        status = await self._engine.status()
        return web.Response(
            text=f"sglang:num_retracted_requests_total {status.preemptions_total}\n"
        )

    # ------------------------------------------------------------ generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, web.StreamResponse(headers=_EVENTS))

    async def _stream(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        wanted = _generation_request(await request.json())
        await response.prepare(request)
        sent = 0
        self._running.add(wanted.request_id)
        try:
            async for chunk in self._engine.generate(wanted):
                report = _report(wanted, chunk, sent)
                sent += len(chunk.token_ids)
                await response.write(_event(report))
        except RequestRefused as refusal:
            error = {"message": str(refusal), "code": 400, "retryable": False}
            await response.write(_event({"error": error}))
        finally:
            self._running.discard(wanted.request_id)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all"):
            await self._engine.abort([*self._running])
        # Like SGLang, ignore an unknown id; with a known id, abort all that start with it.
        elif body["rid"] in self._running:
            prefix = str(body["rid"])
            await self._engine.abort([name for name in self._running if name.startswith(prefix)])
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause((await request.json())["mode"])
        return web.json_response({})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return web.json_response({})

    # ------------------------------------------------------------ weights

    async def _weights_checker(self, request: web.Request) -> web.Response:
        checksums = dict.fromkeys(self._names, self._checksum)
        return web.json_response(
            {"ranks": [{"checksums": checksums}], "per_engine_checksum": self._checksum}
        )

    async def _begin_update(self, request: web.Request) -> web.Response:
        if self._session_open:
            return _refusal(400, "a weight-update session is already open")
        self._session_open = True
        self._arriving = hashlib.sha256()
        return web.json_response({})

    async def _end_update(self, request: web.Request) -> web.Response:
        if not self._session_open:
            return _refusal(400, "no weight-update session is open")
        self._session_open = False
        return web.json_response({})

    async def _from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._arriving.update(body["serialized_named_tensors"][0].encode())
        if "weight_version" in body:
            self._take(body["weight_version"], self._arriving.hexdigest())
        return web.json_response({})

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            digest = digest_of_files(Path(body["model_path"]))
        except OSError as error:
            return _refusal(400, f"{body['model_path']}: {error.strerror}")
        self._take(body["weight_version"], digest)
        return web.json_response({})

    def _take(self, version: str, checksum: str) -> None:
        self._version = PolicyVersion.parse(version)
        self._checksum = checksum
        self._engine.set_weights(self._version, checksum)


def _generation_request(body: dict[str, Any]) -> GenerationRequest:
    params = body["sampling_params"]
    return GenerationRequest(
        request_id=str(body["rid"]),
        input_ids=np.asarray(body["input_ids"], dtype=np.int32),
        max_new_tokens=int(params["max_new_tokens"]),
        sampling=SamplingConfig(),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
        ignore_eos=bool(params.get("ignore_eos", False)),
        urgent=body.get("priority") == URGENT,
    )


def _report(request: GenerationRequest, chunk: TokenChunk, before: int) -> dict[str, Any]:
    """Return the report for a chunk in the JSON form of SGLang with
    `--incremental-streaming-output`: only the new tokens. `before` is the number of earlier tokens
    of the response."""
    total = before + len(chunk.token_ids)
    ids = chunk.token_ids.tolist()
    logprobs = chunk.logprobs.tolist()
    return {
        "output_ids": ids,
        "meta_info": {
            "id": request.request_id,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": total,
            "output_token_logprobs": [[v, t, None] for v, t in zip(logprobs, ids, strict=True)],
            "finish_reason": None if chunk.end is None else {"type": chunk.end},
            "weight_version": str(chunk.version),
            "weight_versions": [{"version": str(chunk.version), "start": before, "end": total}],
        },
    }


def _event(report: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(report)}\n\n".encode()


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


def main(arguments: list[str]) -> None:
    """Run the server until it is killed."""
    hold_lifeline()
    key = take_key()
    parser = argparse.ArgumentParser(prog="simulated_server", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--settings", required=True, help="`engines` of the run, as JSON")
    parsed = parser.parse_args(arguments)
    settings = EngineConfig.model_validate_json(parsed.settings)
    version = PolicyVersion.parse(parsed.weight_version)
    engine = SimulatedEngine("server", engine_model(settings, parsed.model_path), version)
    engine.dtype = "float32" if settings.dtype == "auto" else settings.dtype
    names = parameter_names(parsed.model_path)
    server = SimulatedServer(engine, names, version, key)
    web.run_app(
        server.application(),
        host=settings.host,
        port=parsed.port,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        print=None,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
