"""`PolicyTrainer` trains the policy and its optimizer on one batch after another.

Invariants
- Every rank calls every method with the same `TokenBatch`, in the same order.
- Loss terms are normalized by global token counts, so the gradient does not depend on how the batch
  is split over data-parallel ranks and microbatches.
- Log-probs are computed at the batch's sampling temperature.
- `step` counts all batches, including skipped ones, and is the number of the policy version of the
  current weights. The learning rate depends on `step` and on the index of the update within the
  step, so a skipped update does not delay the learning-rate schedule. The number of applied updates
  is counted separately, because Adam needs it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron_async_kernels.loss_types import Denominators, LossMetrics, NonFiniteError

from megatron_async.algorithms.algorithm import Algorithm, build_algorithm, build_sft_algorithm
from megatron_async.algorithms.device_batch import DeviceBatch, to_host
from megatron_async.algorithms.metrics import finalize, mean_of
from megatron_async.checkpoint.checksum import dtype_name
from megatron_async.checkpoint.state import load_checkpoint_weights
from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure
from megatron_async.models.load import load_hf_weights
from megatron_async.runtime.host_buffers import HostBuffers
from megatron_async.trainer.capabilities import parameter_dtype
from megatron_async.trainer.device import current_device
from megatron_async.trainer.forward import PolicyRunner
from megatron_async.trainer.optimizer import (
    build_optimizer,
    guarded_step,
    learning_rate,
    set_applied_updates,
    wrap_data_parallel,
    zero_gradients,
)
from megatron_async.trainer.parallel import rank_layout
from megatron_async.trainer.policy_model import PolicyModel, build_policy
from megatron_async.trainer.replicas import ReplicaCheck
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion

logger = logging.getLogger(__name__)

# Number of skipped updates in a row after which the run fails. A single one may be caused by an
# unusual batch. Three mean that the weights or the learning rate are at fault, and further batches
# would be skipped too.
MAX_NONFINITE_STEPS = 3


@dataclass(frozen=True, eq=False)
class PolicyUpdate:
    """One optimizer update. `reason` is why it was skipped; None if it was applied.

    The defaults of the other fields describe an update that was skipped before a gradient was
    computed.
    """

    reason: str | None
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    num_microbatches: int = 0
    metrics: LossMetrics = field(default_factory=LossMetrics.empty)
    logprobs_T: torch.Tensor | None = None

    @property
    def applied(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class StepReport:
    """Results of one batch, which may have several optimizer updates; the same on every rank.

    Attributes:
        step: Number of the batch, which is also the number of the policy version before it. After
            the batch, even a skipped one, the trainer's step is `step + 1`.
        loss: Mean loss of the updates that were applied; 0 if none was.
        grad_norm: Gradient norm, before clipping, of the last update that was applied; of the last
            update if none was.
        learning_rate: Learning rate of the last update; 0 if it was skipped before its gradient was
            computed.
        updates: Number of updates that were applied.
        skipped_updates: Number of updates that were skipped.
        skipped: Whether no update was applied. The weights are then unchanged, and the caller must
            mark the batch as dropped with the reason nonfinite.
        skip_reason: Reason why the last skipped update was skipped; None if none was.
        num_tokens: Tokens of the batch, prompts included.
        num_trained_tokens: Tokens of the batch that have a loss.
        num_microbatches: Number of microbatches of all updates, on this rank.
        seconds: Wall time on this rank.
        metrics: Metrics of the algorithm. Those that are computed for each update are means over
            the applied updates.
        log_weights: Logarithms of the importance weights, before any truncation, of the trained
            tokens of all applied updates, one update after the other.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    updates: int
    skipped_updates: int
    skipped: bool
    skip_reason: str | None
    num_tokens: int
    num_trained_tokens: int
    num_microbatches: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    log_weights: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the batch (prompts included) per second of the step, on all ranks together."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class ReferencePolicy:
    """The frozen reference policy: a copy in host memory of the weights that a model has when this
    object is created."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own = HostBuffers()
        self._frozen = self._snapshot(HostBuffers())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the reference weights inside this context. At its end,
        restore the model's own weights bit for bit."""
        own = self._snapshot(self._own)
        try:
            self._install(self._frozen)
            yield
        finally:
            self._install(own)

    def _snapshot(self, buffers: HostBuffers) -> list[torch.Tensor]:
        return [
            buffers.copy(index, parameter.detach())
            for index, parameter in enumerate(self._model.parameters())
        ]

    @torch.no_grad()
    def _install(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def load_policy(config: RunConfig) -> list[PolicyModel]:
    """Build this rank's part of the model and load its weights from `config.model`.

    Returns:
        A list with one model chunk, as Megatron's functions expect.

    Raises:
        UserError: The model directory is not valid, or the parallel layout does not fit the model.
    """
    model = build_policy(config.model, config.parallel, trainer=config.trainer, seed=config.seed)
    if config.model.checkpoint:
        load_checkpoint_weights(model[0], Path(config.model.checkpoint))
    else:
        load_hf_weights(model, Path(config.model.path))
    return model


class PolicyTrainer:
    """One rank's policy, optimizer and algorithm, trained on one batch at a time.

    Create it on every rank, inside `device_adapter()` and after `init_parallel`.
    """

    def __init__(
        self, config: RunConfig, *, lineage: int = 0, purpose: Literal["rl", "sft"] = "rl"
    ) -> None:
        """Load the weights of `config.model` and build the optimizer and the algorithm.

        Args:
            config: The run's settings.
            lineage: Number that is different for every start of the trainer. It is a part of the
                policy versions that this trainer creates.
            purpose: "rl" uses the settings `optimizer` and `steps`; "sft" (fine-tuning) uses
                `sft.optimizer` and `sft.batches`.

        Raises:
            UserError: The model directory is not valid, or the parallel layout does not fit the
                model.
        """
        self._config = config
        self._lineage = lineage
        self._settings = config.sft.optimizer if purpose == "sft" else config.optimizer
        self._updates_per_step = 1 if purpose == "sft" else config.updates_per_step
        steps = config.sft.batches if purpose == "sft" else config.steps
        self._total_updates = steps * self._updates_per_step
        self.step = 0
        self._applied = 0
        self._nonfinite_in_a_row = 0
        self._dtype = parameter_dtype(config.model)
        bf16 = self._dtype.itemsize == 2
        self.model: list[PolicyModel] = load_policy(config)
        self.layout = rank_layout(current_device())
        self.wrapped = wrap_data_parallel(self.model[0], self._settings, bf16=bf16)
        self.optimizer = build_optimizer(self.wrapped, self._settings, bf16=bf16)
        inner = type(self.optimizer.chained_optimizers[0].optimizer)
        logger.info("optimizer: %s.%s", inner.__module__, inner.__name__)
        self._replicas = ReplicaCheck(
            self.model[0], self.optimizer, config.trainer.compare_replicas_every_steps
        )
        self.algorithm = build_algorithm(config)
        self._reference: ReferencePolicy | None = None
        if purpose == "rl" and self.algorithm.needs_ref_logprobs:
            self._reference = ReferencePolicy(self.wrapped)
        self._runner = PolicyRunner(
            self.wrapped,
            self.layout,
            token_budget=config.trainer.microbatch_tokens,
            hidden_size=self.model[0].architecture.hidden_size,
        )

    # ------------------------------------------------------------ state

    @property
    def version(self) -> PolicyVersion:
        """Policy version of the current weights, which consists of the number of this start of the
        trainer (lineage) and the trainer's step."""
        return PolicyVersion(self._lineage, self.step)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, without padding for tensor parallelism."""
        return self.model[0].architecture.vocab_size

    def progress(self) -> Mapping[str, Any]:
        """Return the trainer's counters, to be saved in a checkpoint."""
        return {
            "step": self.step,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "applied_updates": self._applied,
            "parameter_dtype": dtype_name(self._dtype),
        }

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Set the trainer's counters to `progress`, which the method of this name returned before a
        checkpoint. The lineage does not change."""
        self.step = int(progress["step"])
        self._nonfinite_in_a_row = int(progress["nonfinite_in_a_row"])
        self._applied = int(progress["applied_updates"])
        set_applied_updates(self.optimizer, self._applied)

    # ------------------------------------------------------------ training

    def compute_logprobs(self, batch: TokenBatch) -> FloatArray:
        """Return the log-prob of every trained token (`loss_mask_T` != 0) under the current
        weights, and 0 for other tokens, [T].

        The result is the same on every rank. No gradient is computed.
        """
        return to_host(self._runner.logprobs(self._upload(batch)))

    def train_batch(
        self, batch: TokenBatch, before_update: Callable[[], None] = lambda: None
    ) -> StepReport:
        """Train on a batch: compute advantages and correction, then apply all optimizer updates.

        There are `schedule.updates_per_batch` updates in each of `algorithm.epochs` epochs. An
        update whose loss or gradient is not finite is skipped, counted and reported. If the rewards
        of the batch, or the log-probs from which rewards and correction are computed, are not
        finite, the whole batch is skipped.

        Args:
            batch: The batch.
            before_update: Called on every rank before each optimizer update, when its gradient is
                complete and no pass of the model is running. It may call `compute_logprobs`, which
                then uses the weights that the update is about to change. Its time is not counted in
                `StepReport.seconds`.

        Raises:
            ComponentFailure: `MAX_NONFINITE_STEPS` updates in a row were skipped, or copies of the
                weights that must be equal on several ranks differ.
        """
        began = time.monotonic()
        elsewhere = 0.0

        def call_before_update() -> None:
            nonlocal elsewhere
            called = time.monotonic()
            before_update()
            elsewhere += time.monotonic() - called

        try:
            prepared, metrics = self._prepare(self._upload(batch))
        except NonFiniteError as error:
            # Every rank computes the same values from the same batch, so all ranks raise this error
            # and skip the batch together.
            self._nonfinite_in_a_row += 1
            return self._report(batch, [PolicyUpdate(str(error))], {}, began)
        updates: list[PolicyUpdate] = []
        found: list[dict[str, float]] = []
        log_weights: list[torch.Tensor] = []
        for _ in range(self._config.algorithm.epochs):
            for minibatch in prepared.minibatches(self._config.schedule.updates_per_batch):
                update = self._policy_update(minibatch, len(updates), call_before_update)
                updates.append(update)
                if update.applied and (seen_T := update.logprobs_T) is not None:
                    correction = self.algorithm.correction_metrics(minibatch, seen_T)
                    found.append({**finalize(update.metrics), **correction})
                    log_weights.append(self.algorithm.log_weights(minibatch, seen_T))
        report = self._report(batch, updates, {**metrics, **mean_of(found)}, began + elsewhere)
        return replace(report, log_weights=to_host(torch.cat(log_weights))) if found else report

    def _upload(self, batch: TokenBatch) -> DeviceBatch:
        return DeviceBatch.of(batch, self.layout.device)

    def _prepare(self, batch: DeviceBatch) -> tuple[DeviceBatch, dict[str, float]]:
        """Compute the log-probs of the policy before this step and of the reference policy, if the
        algorithm needs them; then compute advantages and correction.

        Returns:
            The prepared batch, and metrics.
        """
        if self.algorithm.needs_old_logprobs:
            batch = replace(batch, old_logprobs_T=self._runner.logprobs(batch))
        if self._reference is not None:
            with self._reference.in_place():
                batch = replace(batch, ref_logprobs_T=self._runner.logprobs(batch))
        return self.algorithm.prepare(batch)

    def _policy_update(
        self, minibatch: DeviceBatch, number: int, before_update: Callable[[], None]
    ) -> PolicyUpdate:
        """Prepare one minibatch and make one optimizer update; `number` is its index within the
        step."""
        try:
            current_T = None
            if self.algorithm.needs_minibatch_pass:
                current_T = self._runner.logprobs(minibatch)
            minibatch, denominators = self.algorithm.prepare_minibatch(minibatch, current_T)
        except NonFiniteError as error:
            self._nonfinite_in_a_row += 1
            return PolicyUpdate(str(error))
        # Entropy is always reported, even if the loss does not use it, because its measured cost is
        # small.
        return self._update(
            minibatch, self.algorithm, denominators, number, before_update, entropy=True
        )

    def train_sft(self, batch: TokenBatch) -> StepReport:
        """Make one optimizer update with the cross-entropy of the batch's trained tokens as
        loss."""
        began = time.monotonic()
        sft = build_sft_algorithm()
        prepared, denominators = sft.prepare_minibatch(sft.prepare(self._upload(batch))[0])
        update = self._update(prepared, sft, denominators, 0, entropy=False)
        return self._report(batch, [update], {}, began)

    # ------------------------------------------------------------ implementation

    def _update(
        self,
        batch: DeviceBatch,
        algorithm: Algorithm,
        denominators: Denominators,
        number: int,
        before_update: Callable[[], None] = lambda: None,
        *,
        entropy: bool,
    ) -> PolicyUpdate:
        """Compute the gradient of a whole batch or minibatch, and apply it if it is finite.

        Args:
            batch: The prepared batch.
            algorithm: Computes the loss.
            denominators: Global counts by which the loss is divided.
            number: Index of the update within this step.
            before_update: Called between the computation of the gradient and its application.
            entropy: Whether the entropy of each token's distribution is reported.
        """
        zero_gradients(self.wrapped, self.optimizer)
        found = self._runner.gradients(batch, algorithm, denominators, entropy=entropy)
        before_update()
        before = self.step * self._updates_per_step + number
        rate = learning_rate(self._settings, before, self._total_updates)
        applied, grad_norm = guarded_step(
            self.optimizer, rate=rate, loss_is_finite=found.reason is None
        )
        if applied:
            self._applied += 1
            self._nonfinite_in_a_row = 0
        else:
            self._nonfinite_in_a_row += 1
        return PolicyUpdate(
            reason=None if applied else self._explain(found.reason, grad_norm),
            loss=found.metrics.sums()["loss"],
            grad_norm=grad_norm,
            learning_rate=rate,
            num_microbatches=found.num_microbatches,
            metrics=found.metrics,
            logprobs_T=found.logprobs_T,
        )

    def _explain(self, mine: str | None, grad_norm: float) -> str:
        """Return why an update was skipped: the reason `mine` of the first rank that has one or, if
        no rank has one, a text with the gradient norm. All ranks must call this together."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, mine)
        known = next((reason for reason in reasons if reason is not None), None)
        return known if known is not None else f"the gradient norm is {grad_norm}"

    def _report(
        self,
        batch: TokenBatch,
        updates: list[PolicyUpdate],
        metrics: Mapping[str, float],
        began: float,
    ) -> StepReport:
        """Count the step, log skipped updates, and return the report.

        Raises:
            ComponentFailure: Too many updates in a row were skipped, or copies of the weights
                differ.
        """
        applied = [update for update in updates if update.applied]
        skipped = [update for update in updates if not update.applied]
        for update in skipped:
            logger.warning("batch %d: skipped an optimizer update: %s", self.step, update.reason)
        if self._nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise ComponentFailure(
                f"{self._nonfinite_in_a_row} optimizer updates in a row were not finite (the last "
                f"one: {skipped[-1].reason})"
            )
        self._replicas.after_step(self.step + 1)
        report = StepReport(
            step=self.step,
            loss=sum(update.loss for update in applied) / max(1, len(applied)),
            grad_norm=(applied or updates)[-1].grad_norm,
            learning_rate=updates[-1].learning_rate,
            updates=len(applied),
            skipped_updates=len(skipped),
            skipped=not applied,
            skip_reason=skipped[-1].reason if skipped else None,
            num_tokens=batch.num_tokens,
            num_trained_tokens=batch.num_trained_tokens,
            num_microbatches=sum(update.num_microbatches for update in updates),
            seconds=time.monotonic() - began,
            metrics=metrics,
        )
        self.step += 1
        return report
