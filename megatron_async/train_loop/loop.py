"""The training loop of a rank: get a batch, train on it, publish the weights, save a checkpoint.

Every trainer rank runs the loop in the same order. Only rank 0 calls the rollout manager; what it
receives is broadcast to the other ranks. The trainer knows only the addresses of the engines, to
which it sends weights.

Invariants
- After n steps, policy version n is published. If the batch of a step was skipped, the unchanged
  weights are published under the next number.
- A published version is verified with the weights that were published: the trainer computes the
  log-probs for it before the next optimizer update. It does so while it waits for a batch, or else
  between the first gradient computation of the batch and its application. Nothing waits for the
  verification, because no token of an engine is stored before the engine is verified.
- A checkpoint is reported to the rollout manager only after it is completely on disk (finalized).
- If engines share the trainer's devices, the trainer frees its memory on them while the engines
  generate. It saves a due checkpoint before that.
- A run that is asked to stop ends between two steps, with a finalized checkpoint of the last step.
- If the rollout manager dies, no step is lost. The trainer attaches to the restarted manager at its
  current step, with the same lineage number, and repeats the calls that got no reply. It sends the
  store position of its newest batch, so that the manager notices if its store has lost that batch.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megatron_async.checkpoint.manager import CheckpointManager, Finalized
from megatron_async.config import RunConfig
from megatron_async.rollout.evaluate import Evaluation
from megatron_async.rollout.messages import ResumePoint
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.telemetry.health import HealthWatch
from megatron_async.telemetry.learning import FAILED_SHARES, UnreachedThreshold
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.train_loop.attempt import restarts
from megatron_async.train_loop.manager_client import ManagerLost, RolloutLink
from megatron_async.train_loop.rank_zero import RankZero
from megatron_async.train_loop.step_times import StepTimes
from megatron_async.train_loop.stop import StopAsked, StopRequest
from megatron_async.trainer.capabilities import parameter_dtype
from megatron_async.trainer.offload import DeviceContents, NoOffload, TrainerMemory
from megatron_async.trainer.step import PolicyTrainer, StepReport
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import DropReason
from megatron_async.weight_sync.publisher import WeightPublisher

T = TypeVar("T")

# Number of steps between two histograms. They are not written at every step, because each takes as
# much space in a tracker's files as many scalars.
HISTOGRAMS_EVERY = 5


@dataclass(frozen=True)
class _SentUpdate:
    """A weight update that was sent to the engines and is not verified yet.

    Attributes:
        number: Number of the policy version.
        time: Time at which the engines had received it, in seconds of `time.monotonic`.
        verify: Whether the engines' log-probs are compared with the trainer's.
    """

    number: int
    time: float
    verify: bool


@dataclass(kw_only=True, eq=False)
class TrainLoop:
    """Training of one rank, from the step at which the run starts or resumes to the last step.

    Attributes:
        link: Calls to the rollout manager; on rank 0 only.
        metrics: Writer of metrics and warnings; on rank 0 only.
        resume: Step, lineage and store position at which this trainer has started.
        memory: Frees the trainer's device memory while engines that share the devices need it.
        rank_zero: Runs a call on rank 0 while the other ranks wait for its result.
        begin: Called on rank 0 once the engines have loaded the first published weights.
        scored_by: Description of the reward (see `scoring.identity`), written with each evaluation.
    """

    config: RunConfig
    trainer: PolicyTrainer
    publisher: WeightPublisher
    checkpoints: CheckpointManager
    link: RolloutLink | None
    metrics: MetricsWriter | None
    stop: StopRequest = field(default_factory=StopRequest)
    resume: ResumePoint = field(default_factory=ResumePoint)
    memory: TrainerMemory = field(default_factory=NoOffload)
    rank_zero: RankZero = field(default_factory=RankZero)
    health: HealthWatch = field(default_factory=HealthWatch)
    scored_by: str = ""
    threshold: UnreachedThreshold = field(default_factory=lambda: UnreachedThreshold(None))
    begin: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._verified_once = False
        self._saved_step = self.trainer.step
        self._store_position = self.resume.store_position
        self._colocated = not isinstance(self.memory, NoOffload)
        self._unreported: list[Finalized] = []
        self._unevaluated = False
        self._unverified: _SentUpdate | None = None
        self._update_metrics: dict[str, float] = {}
        self._times = StepTimes()

    def run(self) -> bool:
        """Train until `config.steps` batches are done and return True; return False if the run was
        asked to stop before.

        Raises:
            ComponentFailure: The rollout side failed, or training cannot continue.
        """
        self._publish(verify_at_once=True)
        self.rank_zero.run(self.begin)
        self._times.take()
        while self.trainer.step < self.config.steps:
            if self.stop.asked_anywhere():
                return self._stop()
            try:
                with self._times.measure("time/wait_for_batch"):
                    batch = self.rank_zero.run(lambda: self._link.next_batch())
                if batch is TrainerTask.VERIFY:
                    self._verify()
                elif batch is TrainerTask.SEND_WEIGHTS:
                    self._publish()
                else:
                    self._step(batch)
            except StopAsked:
                return self._stop()
            except ManagerLost:
                self._attach_again()
        if self._unevaluated:
            # A request to stop has interrupted the last evaluation. The run stops and is not
            # complete, so that a resume makes the evaluation.
            return self._stop()
        self.checkpoints.wait()
        self._ask(self._report_finalized)
        self.memory.keep_on_device(DeviceContents.ALL)  # The engines need the devices no longer.
        return True

    def _stop(self) -> bool:
        """Save a checkpoint if there were steps after the last one, wait until it is finalized, and
        return False."""
        if self.trainer.step != self._saved_step:
            self._checkpoint()
        self.checkpoints.wait()
        self._ask(self._report_finalized)
        return False

    def _ask(self, question: Callable[[], T]) -> T:
        """Run `question`, which calls the rollout manager, on rank 0 and return its result on every
        rank. If the manager dies, attach to the restarted one and repeat the call."""
        # The loop ends, because a manager is restarted at most engines.max_restarts times.
        while True:
            try:
                return self.rank_zero.run(question)
            except ManagerLost:
                self._attach_again()

    def _attach_again(self) -> None:
        """Attach to a restarted rollout manager at the current step. The manager has new engines,
        which `_publish` must give the current weights."""
        self._unverified = None
        current = replace(self.resume, step=self.trainer.step, store_position=self._store_position)
        self.rank_zero.run(lambda: self._link.attach(current))

    @property
    def _link(self) -> RolloutLink:
        assert self.link is not None
        return self.link

    def _step(self, batch: TokenBatch) -> None:
        """Train on one batch, publish the new weights, save a checkpoint if one is due, write the
        metrics."""
        self._store_position = batch.store_position
        self.memory.keep_on_device(DeviceContents.ALL)
        with self._times.measure("time/train"):
            report = self.trainer.train_batch(batch, self._verify_during_step)
            # A batch that was skipped before its first gradient has not verified the version.
            self._verify_during_step()
        if report.skipped:
            self._ask(lambda: self._link.drop_batch(batch.step, DropReason.NONFINITE.value))
        if self._colocated:
            # The weight update moves the trainer's tensors off the device, so the checkpoint must
            # be saved before.
            self._save_if_due()
        self._publish()
        if not self._colocated:
            self._save_if_due()
        self._write(batch, report)

    # ------------------------------------------------------------ weights

    def _publish(self, *, verify_at_once: bool = False) -> None:
        """Send the current weights to the engines and, as `weights.verify` requires, start to
        verify that the engines use them. If the rollout manager dies, repeat this with the
        restarted one.

        Args:
            verify_at_once: Whether to wait for the verification in any case. Otherwise it is
                waited for only if the rollout manager requires that.
        """
        # The loop ends, because a manager is restarted at most engines.max_restarts times. A lost
        # manager loses its engines too, so the whole update is repeated.
        while True:
            try:
                if self._send() or verify_at_once:
                    self._verify()
                return
            except ManagerLost:
                self._attach_again()

    def _send(self) -> bool:
        """Try once to send the current weights to the engines and let them generate; return whether
        the update must be verified at once.

        Raises:
            ManagerLost: The rollout manager died during the update.
        """
        with self._times.measure("time/publish"):
            number, began = self.trainer.step, time.monotonic()
            self.memory.keep_on_device(DeviceContents.WEIGHTS)
            engines = self.rank_zero.run(lambda: self._link.begin_update(number))
            ready = time.monotonic()
            reached = self.publisher.publish(engines, self.trainer.version)
            sent = time.monotonic()
            policy = self.config.weights.verify
            verify = policy == "every" or (policy == "first" and not self._verified_once)
            self._offload()
            at_once = self.rank_zero.run(lambda: self._link.end_update(number, reached, verify))
        self._unverified = _SentUpdate(number, sent, verify)
        self._update_metrics |= {
            "weights/ready_seconds": ready - began,
            "weights/transfer_seconds": sent - ready,
        }
        cost = self.publisher.report if reached else None
        for phase, seconds in cost.phases.items() if cost else ():
            self._update_metrics[f"weights/transfer_{phase.replace(' ', '_')}_seconds"] = seconds
        return at_once

    def _verify_during_step(self) -> None:
        """Verify the newest update if that is not done yet. If the rollout manager is lost, give up
        the verification: the restarted manager has new engines, and they get the weights of the
        next version."""
        if self._unverified is None:
            return
        try:
            self._verify()
        except ManagerLost:
            self._unverified = None

    def _verify(self) -> None:
        """Verify that the engines use the weights of the newest update, which must still be the
        trainer's weights; then evaluate the policy if the trainer must wait for an evaluation.

        Raises:
            ManagerLost: The rollout manager died during the verification.
        """
        assert self._unverified is not None
        sent, number = self._unverified, self._unverified.number
        with self._times.measure("time/verify"):
            samples = self.rank_zero.run(lambda: self._link.verification_samples(number))
            logprobs_T, float32 = None, False
            if samples is not None:
                self.memory.keep_on_device(DeviceContents.WEIGHTS)
                logprobs_T = self.trainer.compute_logprobs(samples)
                float32 = parameter_dtype(self.config.model).itemsize == 4
                self._offload()
            update = self.rank_zero.run(
                lambda: self._link.verify_update(number, logprobs_T, float32)
            )
        self._unverified = None
        self._update_metrics |= update.metrics
        self._update_metrics["weights/verify_seconds"] = time.monotonic() - sent.time
        self._verified_once = self._verified_once or (sent.verify and update.passed)
        if update.passed:
            self.publisher.settle()
        if self.metrics is not None:
            # The warnings belong to the step that produced this version.
            for name, message in update.warnings:
                self.metrics.warn(max(0, number - 1), name, message)
            self._write_evaluations(update.evaluations)
        if update.evaluation_due:
            with self._times.measure("time/evaluate"):
                self._evaluate(number)

    def _offload(self) -> None:
        """Move this rank's tensors off its device if engines share it, and wait until all ranks
        have done so."""
        self.memory.keep_on_device(DeviceContents.NOTHING)
        if self._colocated:
            self.rank_zero.barrier()

    def _evaluate(self, number: int) -> None:
        """Evaluate version `number` and write the results.

        A request to stop ends the wait for the evaluation, which may take longer than the run has
        time to stop, unless engines share the trainer's devices. The next resume then repeats the
        evaluation.
        """
        try:
            found = self.rank_zero.run(lambda: self._link.evaluate(number))
        except StopAsked:
            self._unevaluated = True
            return
        self._write_evaluations(found)

    def _write_evaluations(self, found: Iterable[Evaluation]) -> None:
        """Write the metrics, samples and warnings of each evaluation, under the number of the
        policy version with which it started."""
        if self.metrics is None:
            return
        for evaluation in found:
            numbers = evaluation.metrics()
            self.metrics.write(evaluation.number, numbers, kind="eval", scored_by=self.scored_by)
            for name, message in self.threshold.evaluated(evaluation.reward_max):
                self.metrics.warn(evaluation.number, name, message)
            for result in evaluation.results:
                self.metrics.samples(evaluation.number, result.name, result.samples)
                if result.score_failures >= max(1.0, FAILED_SHARES[0] * result.responses):
                    message = (
                        f"{result.score_failures} of {result.responses} responses to evaluation "
                        f"set {result.name} could not be scored and count as wrong. "
                        "logs/scorer-*.log has the errors; test the reward on the rows of the set "
                        "(`megatron-async reward`)"
                    )
                    self.metrics.warn(evaluation.number, "unscored_answers", message)
                if result.refused:
                    message = (
                        f"{result.refused} of {result.responses} responses to evaluation set "
                        f"{result.name} are missing and count as wrong, because every engine "
                        "refused their prompts as too long (task.long_prompts: drop)"
                    )
                    self.metrics.warn(evaluation.number, "refused_eval_prompts", message)

    # ------------------------------------------------------------ checkpoints and records

    def _save_if_due(self) -> None:
        """Save a checkpoint if one is due, and report finalized checkpoints to the rollout
        manager."""
        step = self.trainer.step
        with self._times.measure("time/checkpoint"):
            if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
                self._checkpoint()
            self._ask(self._report_finalized)

    def _checkpoint(self) -> None:
        """Start saving a checkpoint of the current step. It contains the manager's position in its
        trajectory store."""
        extra = self._ask(lambda: self._link.position())
        # If engines share the devices, the call of `position` has made them free the devices'
        # memory.
        self.memory.keep_on_device(DeviceContents.ALL)
        self.checkpoints.save(self.trainer, extra)
        self._saved_step = self.trainer.step

    def _report_finalized(self) -> None:
        """On rank 0, tell the rollout manager and the trackers which checkpoints were finalized
        since the last call.

        A checkpoint whose report fails, because the manager has died, is reported at the next call.
        """
        if self.link is not None:
            self._unreported += self.checkpoints.take_finalized()
            while self._unreported:
                done = self._unreported[0]
                self.link.checkpoint_finalized(done.step, done.kept)
                if self.metrics is not None:
                    path = self.checkpoints.path(done.step)
                    self.metrics.checkpoint(done.step, path)
                del self._unreported[0]

    def _write(self, batch: TokenBatch, report: StepReport) -> None:
        """Write the metrics, warnings and histograms of one step; write nothing on ranks other than
        0, which have no writer.

        The times and the metrics of weight updates are those since the last step was written. They
        may include the verification of the version before this step.
        """
        times = self._times.take()
        update, self._update_metrics = self._update_metrics, {}
        writer = self.metrics
        if writer is None:
            return
        metrics = {**batch.extra_metrics, **report.metrics, **times, **update}
        metrics |= {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/skipped_updates": report.skipped_updates,
            "train/restarts": restarts(self.resume.lineage),
            "train/tokens": report.num_tokens,
            "train/trained_tokens": report.num_trained_tokens,
            "train/microbatches": report.num_microbatches,
            "train/tokens_per_second": report.tokens_per_second,
        }
        warnings = self.health.step(metrics) + self.threshold.trained(metrics)
        metrics |= {f"warning/{name}": 1.0 for name in self.health.active}
        writer.write(report.step, metrics)
        for name, message in warnings:
            writer.warn(report.step, name, message)
        if report.step % HISTOGRAMS_EVERY == 0:
            trained = batch.loss_mask_T > 0
            writer.histogram(report.step, "rollout/lag", batch.lag_T[trained])
            lengths_S = batch.lengths_S() - batch.prompt_lengths_S
            writer.histogram(report.step, "rollout/response_length", lengths_S)
            writer.histogram(report.step, "rollout/reward", batch.rewards_S[batch.first_E])
            writer.histogram(report.step, "off_policy/log_weight", report.log_weights)
