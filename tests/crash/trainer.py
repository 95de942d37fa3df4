"""Provides a trainer without a model: it makes the calls of `train_loop/loop.py` and sends a text
instead of weights.

Invariants
- A call of the manager continues after its caller was canceled, as a call through Ray does.
- The trainer notes each batch before it continues, so that the checks know what was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_async.checkpoint.manifest import (
    Manifest,
    SavedLayout,
    finalize,
    list_checkpoints,
    prune,
    step_directory,
)
from megatron_async.config import RunConfig
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.time_limits import AwakeDeadline
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, call
from tests.crash.checks import weights_of
from tests.crash.ledger import Account, ledger_file

_KEPT_CHECKPOINTS = 2
_CHECKPOINT_STEPS = 2
_LAST_STEPS = 2


class ManagerCalls:
    """Calls methods of a manager as Ray does: a call continues after its caller was canceled."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call `method` of the manager and return its result."""
        task = asyncio.ensure_future(getattr(self._manager, method)(*arguments))
        self._calls.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            # Without this access asyncio would warn about the error of a call without a caller.
            task.exception()


class Trainer:
    """Trainer that calls a manager as the training loop does, and pauses between calls on request.

    Attributes:
        lineage: Lineage that the trainer trains.
        step: Number of the next step.
        pause_seconds: Duration of the next pause in seconds; 0 for no pause.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        manager: RolloutManager,
        model: SimulatedEngineModel,
    ) -> None:
        """Prepare the trainer of the run in `directory`.

        Args:
            config: The run's configuration.
            directory: The run's directory.
            manager: The run's rollout manager.
            model: Model from which `weights_of` derives the tokens of each policy version.
        """
        self._config, self._directory, self._model = config, directory, model
        self._call = ManagerCalls(manager).call
        self._account = Account(ledger_file(directory.path, "trained"))
        self.lineage, self.step = 0, 0
        self.pause_seconds = 0.0
        self._unverified: PolicyVersion | None = None

    async def live(self, resume: ResumePoint, until: asyncio.Event) -> None:
        """Train until `until` is set and for `_LAST_STEPS` steps more, and save a last checkpoint.

        Args:
            resume: Position at which the trainer starts.
            until: Event that asks the trainer to end.

        Raises:
            ComponentFailure: The manager or the disk failed.
        """
        self.lineage, self.step = resume.lineage, resume.step
        self._unverified = None
        self._account.add(attach=resume.lineage, step=resume.step, parent=resume.parent)
        await self._call("attach", resume)
        await self._publish()
        end: int | None = None
        while self.step != end:
            if end is None and until.is_set():
                end = self.step + _LAST_STEPS
            batch = await self._call("next_batch", self.lineage)
            await self._pause()
            if batch is TrainerTask.SEND_WEIGHTS:
                await self._publish()
                continue
            if batch is TrainerTask.VERIFY:
                await self._verify()
                continue
            self._note(batch)
            # The weights change here, so the update before must be verified by now.
            await self._verify()
            self.step += 1
            await self._publish()
            if self.step % _CHECKPOINT_STEPS == 0 or self.step == end:
                await self._checkpoint()

    async def _pause(self) -> None:
        seconds, self.pause_seconds = self.pause_seconds, 0.0
        await asyncio.sleep(seconds)

    def _note(self, batch: TokenBatch) -> None:
        self._account.add(
            batch=batch.step,
            lineage=self.lineage,
            ids=batch.trajectory_ids_S.tolist(),
            responses=[
                batch.token_ids_T[start + prompt : end].tolist()
                for (start, end), prompt in zip(
                    pairwise(batch.cu_seqlens_S1.tolist()), batch.prompt_lengths_S, strict=True
                )
            ],
            lag=int(batch.lag_T[batch.loss_mask_T > 0].max(initial=0)),
        )

    async def _publish(self) -> None:
        lineage, number = self.lineage, self.step
        version = PolicyVersion(lineage, number)
        addresses = await self._call("begin_update", lineage, number)
        await self._pause()
        reached = await self._send(addresses, version)
        at_once = await self._call("end_update", lineage, number, reached, True)
        self._unverified = version
        await self._pause()
        if at_once:
            await self._verify()

    async def _verify(self) -> None:
        """Verify the newest update if that is not done yet."""
        version, self._unverified = self._unverified, None
        if version is None:
            return
        lineage, number = version
        samples = await self._call("verification_samples", lineage, number)
        await self._pause()
        logprobs_T = None if samples is None else self._logprobs(samples, version)
        await self._call("verify_update", lineage, number, logprobs_T, True)

    async def _send(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> list[str]:
        """Send `version` to the engines, and again without the failed engines until all succeed.

        Returns:
            IDs of the engines that received the version.
        """
        wanted = list(engines)
        while wanted:
            sent = await asyncio.gather(*(asyncio.to_thread(self._to, e, version) for e in wanted))
            if all(sent):
                break
            wanted = [engine for engine, good in zip(wanted, sent, strict=True) if good]
        return [engine.engine_id for engine in wanted]

    def _to(self, engine: EngineAddress, version: PolicyVersion) -> bool:
        deadline = AwakeDeadline(self._config.weights.timeout_seconds)
        body = {
            "serialized_named_tensors": [f"weights {version}"],
            "weight_version": str(version),
        }

        def post(path: str, content: dict[str, Any]) -> None:
            call(engine, "POST", path, content, max(deadline.left, 0.05))
            deadline.tick()

        try:
            try:
                post("begin_weight_update", {})
            except EngineCallError as error:
                if "already open" not in str(error):
                    raise
                post("end_weight_update", {})
                post("begin_weight_update", {})
            post("update_weights_from_tensor", body)
            post("end_weight_update", {})
        except EngineCallError:
            return False
        return True

    async def _checkpoint(self) -> None:
        extra = await self._call("position", self.lineage)
        await self._pause()
        kept = await asyncio.to_thread(self._save, extra)
        await self._call("checkpoint_finalized", self.lineage, self.step, kept)

    def _save(self, extra: dict[str, Any]) -> list[PolicyVersion]:
        root = self._directory.checkpoints
        temporary = root / f".saving_{self.lineage}.{self.step}"
        manifest = Manifest(self.lineage, self.step, SavedLayout(1, 1, 1), {}, extra=extra)
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            finalize(temporary, step_directory(root, self.step), manifest)
        except OSError as error:
            raise ComponentFailure(f"failed to write the checkpoint: {error}") from error
        prune(root, _KEPT_CHECKPOINTS)
        return [PolicyVersion(one.manifest.lineage, one.step) for one in list_checkpoints(root)]

    def _logprobs(self, samples: TokenBatch, version: PolicyVersion) -> FloatArray:
        """Return the log-probs that a trainer with the weights of `version` computes."""
        model = weights_of(self._model, version)
        bounds = pairwise(samples.cu_seqlens_S1.tolist())
        sequences = [samples.token_ids_T[start:end] for start, end in bounds]
        values = [model.logprob(int(t), at) for ids in sequences for at, t in enumerate(ids)]
        return np.asarray(values, np.float32) * samples.loss_mask_T
