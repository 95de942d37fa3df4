"""Notes of every token that reaches the rollout manager, beside the store (`experiment.ledger`).

A crash test needs to know what there was to lose without asking what may have lost it. The notes
are one JSON line a chunk, in one `write` to a file opened for appending, made before the chunk goes
any further: they survive the death of the process, and nothing is in the store that is not in them.

    {"request": "t17-3;", "at": 9, "ids": [5, 6], "version": "0.2", "end": null}

`at` counts from the start of the prompt; a line without `ids` is the start of a request. A request
is named `t<trajectory>-<serial>;`; those of an evaluation have other names and are not noted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from megatron_async.engines.forwarding import ForwardingClient
from megatron_async.engines.interface import EngineClient, GenerationRequest, TokenChunk
from megatron_async.rollout.fleet import EngineLauncher

_TRAJECTORY = re.compile(r"t\d+-\d+;")


class NotingLauncher:
    """An `EngineLauncher` whose clients note what they deliver."""

    def __init__(self, launcher: EngineLauncher, notes: Path) -> None:
        self._launcher = launcher
        notes.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def launch(self, index: int) -> EngineClient:
        return NotingClient(await self._launcher.launch(index), self._file)

    async def alive(self, index: int) -> bool:
        return await self._launcher.alive(index)

    async def stop(self, index: int) -> None:
        await self._launcher.stop(index)


class NotingClient(ForwardingClient):
    """Another client, with notes of every chunk that it delivers to the open file `notes`."""

    def __init__(self, client: EngineClient, notes: int) -> None:
        super().__init__(client)
        self._notes = notes

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        noted = _TRAJECTORY.fullmatch(request.request_id) is not None
        at = len(request.input_ids)
        if noted:
            self._note(request.request_id, at, None)
        async for chunk in self._client.generate(request):
            if noted:
                self._note(request.request_id, at, chunk)
                at += len(chunk.token_ids)
            yield chunk

    def _note(self, request_id: str, at: int, chunk: TokenChunk | None) -> None:
        line: dict[str, object] = {"request": request_id, "at": at}
        if chunk is not None:
            line["ids"] = chunk.token_ids.tolist()
            line["version"] = str(chunk.version)
            line["end"] = chunk.end
        os.write(self._notes, (json.dumps(line) + "\n").encode())
