"""Notes of every batch that reaches the trainer, beside the store (`experiment.ledger`).

What was trained, and along which line, as the trainer saw it: a crash test compares this with what
the store says. One JSON line each, in one `write`:

    {"attach": 3, "step": 12, "parent": 2}
    {"batch": 12, "lineage": 3, "ids": [96, 97, ...], "responses": [[5, 6], ...], "lag": 1}
    {"dropped": 12, "lineage": 3}
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_async.rollout.evaluate import EvalResult
from megatron_async.rollout.manager import ResumePoint, UpdateReport
from megatron_async.train_loop.manager_client import RolloutLink
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray
from megatron_async.weight_sync.http import EngineAddress


class NotingLink:
    """Another link, with notes of what goes through it."""

    def __init__(self, link: RolloutLink, notes: Path) -> None:
        self._link = link
        self._lineage = 0
        notes.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def attach(self, resume: ResumePoint) -> None:
        self._lineage = resume.lineage
        self._note(attach=resume.lineage, step=resume.step, parent=resume.parent)
        self._link.attach(resume)

    def next_batch(self) -> TokenBatch | None:
        batch = self._link.next_batch()
        if batch is not None:
            starts_S, ends_S = batch.cu_seqlens_S1[:-1], batch.cu_seqlens_S1[1:]
            self._note(
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

    def drop_batch(self, step: int, reason: str) -> None:
        self._note(dropped=step, lineage=self._lineage)
        self._link.drop_batch(step, reason)

    def begin_update(self, number: int) -> list[EngineAddress]:
        return self._link.begin_update(number)

    def end_update(self, number: int, engine_ids: Sequence[str], verify: bool) -> TokenBatch | None:
        return self._link.end_update(number, engine_ids, verify)

    def verify_update(
        self, number: int, logprobs_T: FloatArray | None, float32: bool
    ) -> UpdateReport:
        return self._link.verify_update(number, logprobs_T, float32)

    def evaluate(self, number: int) -> EvalResult:
        return self._link.evaluate(number)

    def position(self) -> dict[str, Any]:
        return self._link.position()

    def checkpoint_finalised(self, step: int, kept_steps: Sequence[int]) -> None:
        self._link.checkpoint_finalised(step, kept_steps)

    def _note(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())
