"""Evaluations of a run: when one is due, what it runs on, whether the trainer waits for it.

Invariants
- An exact evaluation measures one version: the trainer waits, so the weights stay. So are those at
  both ends of a run, and all of them with `eval.exact`.
- One beside training belongs to the version that it began with, and its responses name the versions
  of their tokens. It never delays an update, and its failure is reported and stops nothing.
- At most one is under way; one that is due meanwhile is left out with a warning.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineClient, EngineError
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.evaluate import Evaluation, Evaluator
from megatron_async.rollout.respond import IN_FLIGHT_PER_ENGINE, SharedEngines
from megatron_async.trajectory.types import PolicyVersion

# Requests of an evaluation beside training that one engine runs at once. The limit leaves most of
# an engine's decode batch to the requests that the trainer waits for.
REQUESTS_PER_ENGINE: Final = 16


class Evaluations:
    """The evaluations of one session of a trainer."""

    def __init__(self, config: RunConfig, evaluator: Evaluator, driver: RolloutDriver) -> None:
        self._config = config
        self._evaluator = evaluator
        self._driver = driver
        self._begun: PolicyVersion | None = None
        self._beside: asyncio.Task[None] | None = None
        self._done: list[Evaluation] = []
        self._engines = SharedEngines(driver.serving, REQUESTS_PER_ENGINE, self._failed)

    async def hold(self) -> None:
        """Let no request of an evaluation run from before an update until `updated`."""
        await self._engines.hold()

    def updated(self, version: PolicyVersion, *, held: bool) -> bool:
        """Version `version` serves. True when the trainer must ask for its evaluation.

        `held`: an engine holds it.
        """
        self._engines.release()
        if not held or version == self._begun or not self._due(version.number):
            return False
        if self._config.evaluates_exactly or version.number in (0, self._config.steps):
            return True
        if self._beside is not None and not self._beside.done():
            self._driver.statistics.warned(
                "evaluation_skipped",
                f"version {version} is not evaluated: the evaluation of {self._begun} still runs "
                "(raise eval.every_steps)",
            )
            return False
        self._begun = version
        self._beside = self._driver.background.spawn(self._evaluate_beside(version))
        return False

    def _due(self, number: int) -> bool:
        every = self._config.eval.every_steps
        at_an_end = number in (0, self._config.steps)
        return bool(self._config.eval_sets()) and (at_an_end or (every > 0 and number % every == 0))

    def take(self) -> tuple[Evaluation, ...]:
        """Return evaluations that have ended since the last call."""
        done, self._done = self._done, []
        return tuple(done)

    async def exact(self, version: PolicyVersion, holders: Sequence[EngineClient]) -> None:
        """Evaluate `version` on `holders`, after the one that is under way.

        Raises ComponentFailure when none of them is left, or past the limit.
        """

        def living() -> list[EngineClient]:
            left = [engine for engine in self._driver.engines() if engine in holders]
            if not left:
                raise ComponentFailure(f"no engine that holds {version} is left to evaluate it")
            return left

        if self._beside is not None:
            self._engines.slots = IN_FLIGHT_PER_ENGINE  # nothing else is waited for
            await asyncio.wait([self._beside])
            self._engines.slots = REQUESTS_PER_ENGINE
        engines = SharedEngines(living, failed=self._failed)
        await self._evaluate(engines, version)
        self._begun = version

    async def _evaluate_beside(self, version: PolicyVersion) -> None:
        try:
            await self._evaluate(self._engines, version)
        except ComponentFailure as failure:
            self._driver.statistics.warned("evaluation_failed", str(failure))

    async def _evaluate(self, engines: SharedEngines, version: PolicyVersion) -> None:
        limit = self._config.eval.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                found = await self._evaluator.evaluate(engines, version)
            self._done.append(found)
        except TimeoutError as error:
            raise ComponentFailure(
                f"the evaluation of {version} did not end within {limit:g} s, eval.timeout_seconds"
            ) from error
        except EngineError as error:
            raise ComponentFailure(f"the evaluation of {version} failed: {error}") from error

    async def _failed(self, engine: EngineClient, error: EngineError) -> None:
        """Give up an engine that does not answer at all."""
        if not await engine.healthy() and engine in self._driver.engines():
            self._driver.engine_failed(engine.engine_id, str(error))
