"""The trainer's connection to the rollout manager: its calls, every one with a time limit.

`RolloutLink` has the calls and their limits, `RemoteLink` makes them to the process of the manager.
Only trainer rank 0 holds one. A failure of the rollout side arrives as `ComponentFailure` with the
manager's own sentence, the loss of a manager that is started again as `ManagerLost`, after which
the trainer attaches anew and goes on. Every call carries the trainer's lineage: the manager
refuses one that is superseded.
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
    """The rollout manager died, and with it all that it knew of its trainer; `attach` again."""


class RolloutLink(ABC):
    """Calls of the trainer's loop to the rollout side; each has a time limit."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._lineage = 0

    @abstractmethod
    def attach(self, resume: ResumePoint) -> None:
        """This trainer begins at `resume`; waits for the engines to have started."""

    @abstractmethod
    def _call(
        self,
        what: "Callable[[RolloutManager, int], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        """Make a call of the manager for the trainer of this lineage, for `limit` seconds at most.

        `unless_stopped`: given up with StopAsked as soon as the run is asked to stop.
        """

    def next_batch(self) -> TokenBatch | None:
        """The next batch, or None when stale engines want weights first.

        Raises StopAsked when the run was asked to stop before there was one.
        """
        limit = self._config.trainer.wait_for_batch_seconds + _SLACK_SECONDS
        return self._call(
            lambda manager, lineage: manager.next_batch(lineage), limit, unless_stopped=True
        )

    def drop_batch(self, step: int, reason: str) -> None:
        """The batch of `step` could not be trained on."""
        self._call(
            lambda manager, lineage: manager.drop_batch(lineage, step, reason), _CALL_SECONDS
        )

    def begin_update(self, number: int) -> list[EngineAddress]:
        """Engines that must receive version `number`, ready for it."""
        settings = self._config
        limit = max(settings.trainer.wait_for_batch_seconds, settings.weights.timeout_seconds)
        limit += _SLACK_SECONDS
        return self._call(lambda manager, lineage: manager.begin_update(lineage, number), limit)

    def end_update(self, number: int, engine_ids: Sequence[str], verify: bool) -> TokenBatch | None:
        """Report engines that were sent version `number`; `verify`: return what they sampled."""
        # What engines sample has as long as the transfer had.
        limit = 2 * self._config.weights.timeout_seconds + _SLACK_SECONDS
        engines = list(engine_ids)
        return self._call(
            lambda manager, lineage: manager.end_update(lineage, number, engines, verify), limit
        )

    def verify_update(
        self, number: int, logprobs_T: FloatArray | None, float32: bool
    ) -> UpdateReport:
        """The trainer's log-probs of what `end_update` returned, computed in `float32` or less."""
        limit = self._config.weights.timeout_seconds + _SLACK_SECONDS
        return self._call(
            lambda manager, lineage: manager.verify_update(lineage, number, logprobs_T, float32),
            limit,
        )

    def evaluate(self, number: int) -> tuple[Evaluation, ...]:
        """The evaluation of the version that has just been published, after those under way.

        Raises StopAsked when the run was asked to stop meanwhile.
        """
        limit = 2 * self._config.eval.timeout_seconds + _SLACK_SECONDS  # one may be under way
        # Colocated engines must have come to rest before the trainer has their memory.
        colocated = self._config.engines.placement == "colocated"
        return self._call(
            lambda manager, lineage: manager.evaluate(lineage, number),
            limit,
            unless_stopped=not colocated,
        )

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the rollout side."""
        return self._call(lambda manager, lineage: manager.position(lineage), _CALL_SECONDS)

    def checkpoint_finalized(self, step: int, kept: Sequence[PolicyVersion]) -> None:
        """The manifest of `step` exists now."""
        self._call(
            lambda manager, lineage: manager.checkpoint_finalized(lineage, step, kept),
            _CALL_SECONDS,
        )


class RemoteLink(RolloutLink):
    """Synchronous calls to the manager in its process."""

    def __init__(
        self,
        config: RunConfig,
        backend: ProcessBackend,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stop_asked` is looked at during waits for batches and evaluations."""
        super().__init__(config)
        self._manager = backend.find(MANAGER_NAME, ManagerHost)
        self._stop_asked = stop_asked

    def attach(self, resume: ResumePoint) -> None:
        self._lineage = resume.lineage
        limit = self._config.engines.start_timeout_seconds + _CALL_SECONDS
        began = time.monotonic()
        while True:
            left = began + limit - time.monotonic()
            try:
                self._ask(lambda manager: manager.attach(resume), max(left, _RETRY_SECONDS))
                return
            except ManagerLost as lost:  # an attach that was lost half-way is simply repeated
                if left <= 0 or isinstance(lost.__cause__, RemoteObjectDead):
                    raise ComponentFailure(
                        "the rollout manager did not come back within "
                        f"{time.monotonic() - began:.0f} s: {lost}; the log of the rollout side "
                        "has the reason"
                    ) from lost
            time.sleep(_RETRY_SECONDS)

    def _call(
        self,
        what: "Callable[[RolloutManager, int], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        return self._ask(lambda manager: what(manager, self._lineage), limit, unless_stopped)

    def _ask(
        self,
        what: "Callable[[RolloutManager], Awaitable[R]]",
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        """The answer, for which this process waits `limit` seconds of its life at most."""

        def while_waiting() -> None:
            if unless_stopped and self._stop_asked():
                raise StopAsked

        try:
            call = recorded(what)
            found: R = self._manager.call_blocking(
                lambda host: host.on_manager(call), limit=limit, while_waiting=while_waiting
            )
            return found
        except (NotAttached, RemoteObjectLost) as error:
            raise ManagerLost(str(error)) from error
        except EngineError as error:
            raise ComponentFailure(str(error)) from error
