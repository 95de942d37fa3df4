"""The trainer's calls to the rollout manager, each with a time limit.

`RolloutLink` defines the calls and their limits; `RemoteLink` sends them to the manager's process.
Only trainer rank 0 has a link. A failure of the rollout side arrives as `ComponentFailure` with the
manager's own message. If the manager dies and will be restarted, calls raise `ManagerLost`; the
trainer then attaches to the new manager and continues. Every call carries the trainer's lineage, so
that the manager can refuse calls by a trainer that has been superseded by a newer start.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineError
from megatron_async.errors import ComponentFailure
from megatron_async.process_backends.backend import (
    ProcessBackend,
    R,
    RemoteObjectDead,
    RemoteObjectLost,
    recorded,
)
from megatron_async.rollout.evaluate import Evaluation
from megatron_async.rollout.manager_host import MANAGER_NAME, ManagerHost
from megatron_async.rollout.messages import NotAttached, ResumePoint, UpdateReport
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.train_loop.stop import StopAsked
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion
from megatron_async.weight_sync.http import EngineAddress

if TYPE_CHECKING:
    from megatron_async.rollout.manager import RolloutManager

_SLACK_SECONDS = 30.0
_CALL_SECONDS = 60.0
_RETRY_SECONDS = 0.2


class ManagerLost(ComponentFailure):
    """Raised if the rollout manager has died. The restarted manager does not know its trainer,
    which must call `attach` again."""


class RolloutLink(ABC):
    """Calls of the training loop to the rollout manager; each call has a time limit."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._lineage = 0

    @abstractmethod
    def attach(self, resume: ResumePoint) -> None:
        """Register this trainer with the rollout manager, at the step and store position of
        `resume`, and wait until the engines have started."""

    @abstractmethod
    def _call(
        self,
        call: "Callable[[RolloutManager, int], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        """Run `call` on the rollout manager and return its result.

        The call carries this trainer's lineage, a number that grows by one with every start of the
        trainer. The manager refuses the call if no trainer of this lineage is attached, so that a
        trainer that was replaced by a newer one cannot change the run.

        Args:
            call: Function that makes the call; it gets the manager and the lineage.
            limit: Seconds after which the call fails.
            unless_stopped: Whether the call raises StopAsked if the run is asked to stop while it
                waits.
        """

    def next_batch(self) -> TokenBatch | TrainerTask:
        """Wait for the next batch and return it, or return the task that the trainer must do before
        it asks again.

        Raises:
            StopAsked: The run was asked to stop before a batch was ready.
        """
        limit = self._config.trainer.wait_for_batch_seconds + _SLACK_SECONDS
        return self._call(
            lambda manager, lineage: manager.next_batch(lineage), limit, unless_stopped=True
        )

    def drop_batch(self, step: int, reason: str) -> None:
        """Tell the manager that the trainer skipped the batch of `step`, so that it is recorded as
        dropped."""
        self._call(
            lambda manager, lineage: manager.drop_batch(lineage, step, reason), _CALL_SECONDS
        )

    def begin_update(self, number: int) -> list[EngineAddress]:
        """Prepare the engines for the update to version `number`; return the addresses of the
        engines to which the trainer must send it."""
        settings = self._config
        limit = max(settings.trainer.wait_for_batch_seconds, settings.weights.timeout_seconds)
        limit += _SLACK_SECONDS
        return self._call(lambda manager, lineage: manager.begin_update(lineage, number), limit)

    def end_update(self, number: int, engine_ids: Sequence[str], verify: bool) -> bool:
        """Report to which engines version `number` was sent, and let them generate. With `verify`,
        they also sample tokens, which `verification_samples` returns.

        Returns:
            Whether the trainer must call `verification_samples` and `verify_update` before it asks
            for a batch. Otherwise it must do so before it changes its weights.
        """
        engines = list(engine_ids)
        return self._call(
            lambda manager, lineage: manager.end_update(lineage, number, engines, verify),
            self._sampling_limit,
        )

    def verification_samples(self, number: int) -> TokenBatch | None:
        """Wait for the tokens that engines sample with version `number`.

        Returns:
            A batch of these tokens, whose log-probs the trainer must pass to `verify_update`; None
            if the version is not verified, or if no engine has sampled tokens.
        """
        return self._call(
            lambda manager, lineage: manager.verification_samples(lineage, number),
            self._sampling_limit,
        )

    @property
    def _sampling_limit(self) -> float:
        # Twice the limit, because sampling may take as long as the transfer of the weights.
        return 2 * self._config.weights.timeout_seconds + _SLACK_SECONDS

    def verify_update(
        self, number: int, logprobs_T: FloatArray | None, float32: bool
    ) -> UpdateReport:
        """Finish the update to version `number`, in which the manager compares the engines'
        log-probs of the sampled tokens with the trainer's.

        Args:
            number: Version that was published.
            logprobs_T: The trainer's log-probs of the batch that `verification_samples` returned;
                None if it returned None.
            float32: Whether the trainer computes in float32; otherwise it computes in half
                precision.
        """
        limit = self._config.weights.timeout_seconds + _SLACK_SECONDS
        return self._call(
            lambda manager, lineage: manager.verify_update(lineage, number, logprobs_T, float32),
            limit,
        )

    def evaluate(self, number: int) -> tuple[Evaluation, ...]:
        """Evaluate the published version `number`; return its results, after the results of earlier
        evaluations that have finished meanwhile.

        Raises:
            StopAsked: The run was asked to stop during the evaluation.
        """
        # Twice the limit of one evaluation, because an earlier evaluation may still run.
        limit = 2 * self._config.eval.timeout_seconds + _SLACK_SECONDS
        # On shared devices, a request to stop does not end the wait: the engines must be idle
        # before the trainer uses the devices to save a checkpoint.
        colocated = self._config.engines.placement == "colocated"
        return self._call(
            lambda manager, lineage: manager.evaluate(lineage, number),
            limit,
            unless_stopped=not colocated,
        )

    def position(self) -> dict[str, Any]:
        """Return the manager's position in its trajectory store, to be saved in a checkpoint."""
        return self._call(lambda manager, lineage: manager.position(lineage), _CALL_SECONDS)

    def checkpoint_finalized(self, step: int, kept: Sequence[PolicyVersion]) -> None:
        """Tell the manager that the checkpoint of `step` is completely on disk, and that the
        checkpoints of the versions `kept` still exist."""
        self._call(
            lambda manager, lineage: manager.checkpoint_finalized(lineage, step, kept),
            _CALL_SECONDS,
        )


class RemoteLink(RolloutLink):
    """Makes blocking calls to a rollout manager that runs in another process."""

    def __init__(
        self,
        config: RunConfig,
        backend: ProcessBackend,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Find the rollout manager through `backend`.

        Args:
            config: The run's settings, from which the time limits come.
            backend: Process backend that runs the manager.
            stop_asked: Function that is called repeatedly while the trainer waits for a batch or an
                evaluation. If it returns True, the wait ends.
        """
        super().__init__(config)
        self._manager = backend.find(MANAGER_NAME, ManagerHost)
        self._stop_asked = stop_asked

    def attach(self, resume: ResumePoint) -> None:
        """Attach to the rollout manager, retrying while the manager is being restarted.

        Raises:
            ComponentFailure: The manager has died and is not restarted again, or it did not reply
                within the time limit.
        """
        self._lineage = resume.lineage
        limit = self._config.engines.start_timeout_seconds + _CALL_SECONDS
        began = time.monotonic()
        while True:
            remaining = began + limit - time.monotonic()
            try:
                self._ask(lambda manager: manager.attach(resume), max(remaining, _RETRY_SECONDS))
                return
            # The manager has died during the call, which can be repeated.
            except ManagerLost as lost:
                if remaining <= 0 or isinstance(lost.__cause__, RemoteObjectDead):
                    raise ComponentFailure(
                        "the rollout manager did not restart within "
                        f"{time.monotonic() - began:.0f} s: {lost}. The log of the rollout side "
                        "has the reason."
                    ) from lost
            time.sleep(_RETRY_SECONDS)

    def _call(
        self,
        call: "Callable[[RolloutManager, int], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        return self._ask(lambda manager: call(manager, self._lineage), limit, unless_stopped)

    def _ask(
        self,
        call: "Callable[[RolloutManager], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        """Run `call` in the manager's process and return its result; block for at most `limit`
        seconds.

        Raises:
            ManagerLost: The manager died or does not know this trainer.
            ComponentFailure: An engine failed, or the time limit passed.
            StopAsked: The run was asked to stop, with `unless_stopped`.
        """

        def while_waiting() -> None:
            if unless_stopped and self._stop_asked():
                raise StopAsked

        try:
            recording = recorded(call)
            result: R = self._manager.call_blocking(
                lambda host: host.on_manager(recording), limit=limit, while_waiting=while_waiting
            )
            return result
        except (NotAttached, RemoteObjectLost) as error:
            raise ManagerLost(str(error)) from error
        except EngineError as error:
            raise ComponentFailure(str(error)) from error
