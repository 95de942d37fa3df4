"""The training loop of a rank: get a batch, train on it, publish the weights, save a checkpoint.

Every trainer rank runs the loop in the same order. Only rank 0 calls the rollout manager; what it
receives is broadcast to the other ranks. The trainer knows only the addresses of the engines, to
which it sends weights.

Invariants
- After n steps, policy version n is published. If the batch of a step was skipped, the unchanged
  weights are published under the next number.
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
from megatron_async.rollout.messages import ResumePoint, UpdateReport
from megatron_async.telemetry.health import HealthWatch
from megatron_async.telemetry.learning import FAILED_SHARES, UnreachedThreshold
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.train_loop.attempt import restarts
from megatron_async.train_loop.manager_client import ManagerLost, RolloutLink
from megatron_async.train_loop.rank_zero import RankZero
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
        self._update_seconds: dict[str, float] = {}
        self._evaluation_seconds = 0.0

    def run(self) -> bool:
        """Train until `config.steps` batches are done and return True; return False if the run was
        asked to stop before.

        Raises:
            ComponentFailure: The rollout side failed, or training cannot continue.
        """
        self._publish()
        self.rank_zero.run(self.begin)
        while self.trainer.step < self.config.steps:
            if self.stop.asked_anywhere():
                return self._stop()
            began = time.monotonic()
            try:
                batch = self.rank_zero.run(lambda: self._link.next_batch())
            except StopAsked:
                return self._stop()
            except ManagerLost:
                self._attach_again()
                continue
            waited = time.monotonic() - began
            if batch is None:
                # An engine waits for the current weights, because it is new or has loaded wrong
                # ones.
                self._publish()
                continue
            self._step(batch, waited)
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
        current = replace(self.resume, step=self.trainer.step, store_position=self._store_position)
        self.rank_zero.run(lambda: self._link.attach(current))

    @property
    def _link(self) -> RolloutLink:
        assert self.link is not None
        return self.link

    def _step(self, batch: TokenBatch, waited: float) -> None:
        """Train on one batch, publish the new weights, save a checkpoint if one is due, write the
        metrics.

        Args:
            batch: The batch.
            waited: Seconds for which the trainer waited for the batch.
        """
        self._store_position = batch.store_position
        began = time.monotonic()
        self.memory.keep_on_device(DeviceContents.ALL)
        report = self.trainer.train_batch(batch)
        trained = time.monotonic() - began
        if report.skipped:
            self._ask(lambda: self._link.drop_batch(batch.step, DropReason.NONFINITE.value))
        saved = 0.0
        if self._colocated:
            # The weight update moves the trainer's tensors off the device, so the checkpoint must
            # be saved before.
            saved = self._save_if_due()
        began = time.monotonic()
        update = self._publish()
        published = time.monotonic() - began
        if not self._colocated:
            saved = self._save_if_due()
        times = {
            "time/wait_for_batch": waited,
            "time/train": trained,
            "time/publish": published - self._evaluation_seconds,
            "time/evaluate": self._evaluation_seconds,
            "time/checkpoint": saved,
        }
        times["time/step"] = sum(times.values())
        self._write(batch, report, update, times)

    # ------------------------------------------------------------ weights

    def _publish(self) -> UpdateReport:
        """Send the current weights to the engines and, as `weights.verify` requires, verify that
        the engines use them. If the rollout manager dies, repeat this with the restarted one."""
        # The loop ends, because a manager is restarted at most engines.max_restarts times. A lost
        # manager loses its engines too, so the whole update is repeated.
        while True:
            try:
                return self._publish_once()
            except ManagerLost:
                self._attach_again()

    def _publish_once(self) -> UpdateReport:
        """Try once to send the current weights to the engines; then, if due, verify that the
        engines use these weights, and evaluate the policy.

        Raises:
            ManagerLost: The rollout manager died during the update.
        """
        number, began = self.trainer.step, time.monotonic()
        self._evaluation_seconds = 0.0
        self.memory.keep_on_device(DeviceContents.WEIGHTS)
        engines = self.rank_zero.run(lambda: self._link.begin_update(number))
        ready = time.monotonic()
        reached = self.publisher.publish(engines, self.trainer.version)
        sent = time.monotonic()
        policy = self.config.weights.verify
        verify = policy == "every" or (policy == "first" and not self._verified_once)
        self._offload()
        samples = self.rank_zero.run(lambda: self._link.end_update(number, reached, verify))
        logprobs_T, float32 = None, False
        if samples is not None:
            self.memory.keep_on_device(DeviceContents.WEIGHTS)
            logprobs_T = self.trainer.compute_logprobs(samples)
            float32 = parameter_dtype(self.config.model).itemsize == 4
            self._offload()
        update = self.rank_zero.run(lambda: self._link.verify_update(number, logprobs_T, float32))
        self._update_seconds = {
            "weights/ready_seconds": ready - began,
            "weights/transfer_seconds": sent - ready,
            "weights/verify_seconds": time.monotonic() - sent,
        }
        cost = self.publisher.report if reached else None
        for phase, seconds in cost.phases.items() if cost else ():
            self._update_seconds[f"weights/transfer_{phase.replace(' ', '_')}_seconds"] = seconds
        self._verified_once = self._verified_once or (verify and update.passed)
        if update.passed:
            self.publisher.settle()
        if self.metrics is not None:
            # The warnings belong to the step that produced this version.
            for name, message in update.warnings:
                self.metrics.warn(max(0, number - 1), name, message)
            self._write_evaluations(update.evaluations)
        if update.evaluation_due:
            began = time.monotonic()
            self._evaluate(number)
            self._evaluation_seconds = time.monotonic() - began
        return update

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

    def _save_if_due(self) -> float:
        """Save a checkpoint if one is due, and report finalized checkpoints to the rollout manager;
        return how many seconds this took."""
        began, step = time.monotonic(), self.trainer.step
        if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
            self._checkpoint()
        self._ask(self._report_finalized)
        return time.monotonic() - began

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

    def _write(
        self, batch: TokenBatch, report: StepReport, update: UpdateReport, times: dict[str, float]
    ) -> None:
        """Write the metrics, warnings and histograms of one step; do nothing on ranks other than 0,
        which have no writer."""
        writer = self.metrics
        if writer is None:
            return
        metrics = {**batch.extra_metrics, **report.metrics, **times}
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
        metrics |= {**update.metrics, **self._update_seconds}
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
