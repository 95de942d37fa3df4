"""Provides one real SGLang server for a test session, and small models for the server.

A test must start with `engine.reset_to("a")`. After this call, the server has the weights of model
`a`, runs no request and is not paused, regardless of earlier tests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, call
from tests.hf_models import save_hf_model

VOCAB = 128
SETTINGS = EngineConfig(device="cpu", max_total_tokens=16384, stream_interval=16)
_CALL_SECONDS = 20.0
_Result = TypeVar("_Result")


@dataclass
class EngineUnderTest:
    """The server, and the models `a` and `b` in float32 with their directories."""

    process: SGLangProcess
    directories: dict[str, Path]
    models: dict[str, Any]

    @property
    def address(self) -> EngineAddress:
        return EngineAddress("engine", self.process.url)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return call(self.address, "POST", path, body, _CALL_SECONDS)

    def reset_to(self, model: str, version: PolicyVersion = PolicyVersion(0, 0)) -> None:  # noqa: B008
        """Make the server idle and not paused, with the weights of `model` as policy version
        `version`."""
        self.post("abort_request", {"abort_all": True})
        self.post("continue_generation", {"torch_empty_cache": False})
        deadline = time.monotonic() + _CALL_SECONDS
        while True:
            try:
                return self.load(model, version)
            except EngineCallError as error:  # Aborted requests end a moment later.
                if "still running" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def load(self, model: str, version: PolicyVersion, flush_cache: bool = True) -> None:
        """Load weights by SGLang's own method, with which all other methods are compared."""
        self.post(
            "update_weights_from_disk",
            {
                "model_path": str(self.directories[model]),
                "weight_version": str(version),
                "flush_cache": flush_cache,
            },
        )

    def checksum(self) -> str:
        reply = self.post("weights_checker", {"action": "checksum"})
        return str(reply["per_engine_checksum"])

    def tensors(self, model: str) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors as in the Hugging Face checkpoint of `model`."""
        return [(name, tensor.clone()) for name, tensor in self.models[model].state_dict().items()]

    def run(self, check: Callable[[SGLangClient], Awaitable[_Result]], limit: float = 60.0) -> Any:
        """Run `check(client)` on a separate event loop and return its result."""

        async def body() -> _Result:
            client = await SGLangClient.connect("engine", self.process.url, SETTINGS)
            try:
                return await asyncio.wait_for(check(client), limit)
            finally:
                await client.close()

        return asyncio.run(body())


def start_engine(folder: Path, settings: EngineConfig = SETTINGS) -> EngineUnderTest:
    """Save the models and start the server with model `a`."""
    directories = {name: folder / name for name in ("a", "b")}
    models = {
        name: save_hf_model(
            "qwen3", path, seed=seed, vocab_size=VOCAB, max_position_embeddings=2048
        )
        for seed, (name, path) in enumerate(directories.items())
    }
    process = SGLangProcess(directories["a"], settings, folder / "engine.log")
    # The server reserves the tokens of a complete response, so that a few requests fill the engine.
    with mock.patch.dict(os.environ, {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "4096"}):
        process.start()
    return EngineUnderTest(process, directories, models)


def make_request(
    name: str, prompt: list[int], length: int, forced: bool = True, **changes: Any
) -> GenerationRequest:
    """Return a request for `length` tokens: exactly as many if `forced`, otherwise at most as
    many."""
    return GenerationRequest(
        request_id=name,
        input_ids=np.asarray(prompt, dtype=np.int32),
        max_new_tokens=length,
        sampling=changes.pop("sampling", SamplingConfig()),
        ignore_eos=forced,
        **changes,
    )


def crash_after(engine: SimulatedEngine, tokens: int) -> None:
    """Make the engine crash when it has generated `tokens` more tokens."""
    last, advance = engine.tokens_generated + tokens, engine._advance

    def counted(running: Any) -> Any:
        end = advance(running)
        if engine.tokens_generated == last:
            engine.crash("injected crash")
        return end

    engine._advance = counted  # type: ignore[method-assign]


async def collect(
    client: Any, request: GenerationRequest, into: list[TokenChunk] | None = None
) -> list[TokenChunk]:
    """Return all chunks of a response; chunks are added to `into` as they arrive."""
    chunks = into if into is not None else []
    async for chunk in client.generate(request):
        chunks.append(chunk)
    return chunks


async def until_streaming(responses: Sequence[list[TokenChunk]], chunks: int = 2) -> None:
    """Wait until at least `chunks` chunks of each response have arrived."""
    deadline = time.monotonic() + 30.0
    while any(len(response) < chunks for response in responses):
        assert time.monotonic() < deadline, "the engine has not streamed enough chunks after 30 s"
        await asyncio.sleep(0.002)


def tokens_of(chunks: list[TokenChunk]) -> IntArray:
    return np.concatenate([chunk.token_ids for chunk in chunks])


def logprobs_of(chunks: list[TokenChunk]) -> FloatArray:
    return np.concatenate([chunk.logprobs for chunk in chunks])


def reference_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> FloatArray:
    """Return log p(ids[t] | ids[:t]) for t = 1..n-1 by transformers in float32, [n - 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
    return np.asarray(picked[:, 0].numpy())
