"""Writes the ledger: a record, independent of the store, of what reached the manager and trainer.

A crash test must know which tokens existed without asking the store, which may have lost them.
`LEDGER` puts `NotingLauncher` and `NotingLink` into a run's processes (`injection.py`). Each note
is one JSON line, which one `write` call appends to a file before the noted object is passed on.
Notes therefore survive the death of the process, and everything in the store is also in the notes.

arrivals.jsonl: every chunk of tokens that an engine delivered for a trajectory. `at` counts from
the start of the prompt. A line without `ids` is the start of a request, with its `input`:

    {"request": "t17-3;", "at": 9, "input": [3, 12, ...]}
    {"request": "t17-3;", "at": 9, "ids": [5, 6], "version": "0.2", "end": null}

trained.jsonl: every attach, batch and drop as the trainer saw it:

    {"attach": 3, "step": 12, "parent": 2}
    {"batch": 12, "lineage": 3, "ids": [96, 97, ...], "responses": [[5, 6], ...], "lag": 1}
    {"dropped": 12, "lineage": 3}

verifications.jsonl: start and end of every verification of weights for which the trainer does not
wait:

    {"unverified": 12, "lineage": 3}
    {"verified": 12, "lineage": 3}

calls.jsonl: every call that an environment received; the environment itself writes it
(`noted_environment.py`).

engines.jsonl: every engine that a manager started. `life` identifies the manager's process. A
second engine with the same `index` and `life` replaces an engine that was taken out of service:

    {"life": "5f0c...", "index": 0, "launched": "engine0.1", "url": "http://127.0.0.1:40123"}

faults.jsonl: every fault that a test injects (`fault_program.py`, `run.py`):

    {"kind": "engine hangs", "engine": "http://127.0.0.1:40123", "count": 1, "at": 7.31}
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from megatron_async.engines.interface import (
    EngineClient,
    ForwardingClient,
    GenerationRequest,
    TokenChunk,
)

if TYPE_CHECKING:  # These modules import this module while they are imported themselves.
    from megatron_async.rollout.fleet import EngineLauncher
    from megatron_async.rollout.messages import ResumePoint
    from megatron_async.rollout.trainer_task import TrainerTask
    from megatron_async.train_loop.manager_client import RolloutLink
    from megatron_async.trajectory.batch import TokenBatch

# Matches requests of trajectories. Requests of an evaluation have other names and are not noted.
_TRAJECTORY = re.compile(r"t\d+-\d+;")


def ledger_file(run: Path, name: str) -> Path:
    """Return the path of the file `name`.jsonl in the ledger of a run."""
    return run / "ledger" / f"{name}.jsonl"


LEDGER: Final = {
    "megatron_async.engines.host": f"{__name__}:note_engines",
    "megatron_async.train_loop.manager_client": f"{__name__}:note_batches",
}
"""Changes for `injection.injected`; the processes also need the variable `RUN_VARIABLE`."""
RUN_VARIABLE: Final = "CRASH_TEST_RUN"
"""Name of the environment variable that contains the path of the run's directory."""


def note_engines(module: ModuleType) -> None:
    """Let the rollout manager note the starts of its engines and the tokens that they deliver."""
    hosted_engines = module.HostedEngines

    def noting_engines(*arguments: Any) -> NotingLauncher:
        return NotingLauncher(hosted_engines(*arguments), Path(os.environ[RUN_VARIABLE]))

    module.HostedEngines = noting_engines  # type: ignore[attr-defined]


def note_batches(module: ModuleType) -> None:
    """Let the trainer note its attaches, batches and drops."""
    placed_link = module.RemoteLink

    def noting_link(*arguments: Any) -> NotingLink:
        return NotingLink(placed_link(*arguments), Path(os.environ[RUN_VARIABLE]))

    module.RemoteLink = noting_link  # type: ignore[attr-defined]


SLOW_VARIABLE: Final = "CRASH_TEST_VERIFICATION_SECONDS"
"""Name of the environment variable that contains the seconds by which each of these verifications
is delayed."""


class Account:
    """File to which notes are appended as JSON lines."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


class NotingLauncher:
    """Wrapper of a launcher that notes every start; its clients note the tokens they deliver."""

    def __init__(self, launcher: EngineLauncher, run: Path) -> None:
        self._launcher = launcher
        self._arrivals = Account(ledger_file(run, "arrivals"))
        self._engines = Account(ledger_file(run, "engines"))
        self._life = uuid.uuid4().hex

    async def launch(self, index: int) -> EngineClient:
        client = await self._launcher.launch(index)
        self._engines.add(life=self._life, index=index, launched=client.engine_id, url=client.url)
        return NotingClient(client, self._arrivals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


class NotingClient(ForwardingClient):
    """Wrapper of a client that notes every chunk of a trajectory's request."""

    def __init__(self, client: EngineClient, account: Account) -> None:
        super().__init__(client)
        self._account = account

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        noted = _TRAJECTORY.fullmatch(request.request_id) is not None
        at = len(request.input_ids)
        if noted:
            self._account.add(request=request.request_id, at=at, input=request.input_ids.tolist())
        async for chunk in self._client.generate(request):
            if noted:
                self._account.add(
                    request=request.request_id,
                    at=at,
                    ids=chunk.token_ids.tolist(),
                    version=str(chunk.version),
                    end=chunk.end,
                )
                at += len(chunk.token_ids)
            yield chunk


class NotingLink:
    """Wrapper of a trainer's link to the manager that notes every attach, batch and drop."""

    def __init__(self, link: RolloutLink, run: Path) -> None:
        self._link = link
        self._lineage = 0
        self._account = Account(ledger_file(run, "trained"))
        self._verifications = Account(ledger_file(run, "verifications"))
        self._delay_seconds = float(os.environ.get(SLOW_VARIABLE, "0"))

    def attach(self, resume: ResumePoint) -> None:
        self._lineage = resume.lineage
        self._account.add(attach=resume.lineage, step=resume.step, parent=resume.parent)
        self._link.attach(resume)

    def next_batch(self) -> TokenBatch | TrainerTask:
        from megatron_async.trajectory.batch import TokenBatch

        batch = self._link.next_batch()
        if isinstance(batch, TokenBatch):
            starts_S, ends_S = batch.cu_seqlens_S1[:-1], batch.cu_seqlens_S1[1:]
            self._account.add(
                batch=batch.step,
                lineage=self._lineage,
                ids=batch.trajectory_ids_S.tolist(),
                responses=[
                    batch.token_ids_T[start + prompt : end].tolist()
                    for start, prompt, end in zip(
                        starts_S, batch.prompt_lengths_S, ends_S, strict=True
                    )
                ],
                lag=int(batch.lag_T[batch.loss_mask_T > 0].max(initial=0)),
            )
        return batch

    def end_update(self, number: int, engine_ids: list[str], verify: bool) -> bool:
        at_once = self._link.end_update(number, engine_ids, verify)
        if not at_once:
            self._verifications.add(unverified=number, lineage=self._lineage)
        return at_once

    def verification_samples(self, number: int) -> TokenBatch | None:
        time.sleep(self._delay_seconds)
        return self._link.verification_samples(number)

    def verify_update(self, number: int, *rest: Any) -> Any:
        report = self._link.verify_update(number, *rest)
        self._verifications.add(verified=number, lineage=self._lineage)
        return report

    def drop_batch(self, step: int, reason: str) -> None:
        self._account.add(dropped=step, lineage=self._lineage)
        self._link.drop_batch(step, reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)
