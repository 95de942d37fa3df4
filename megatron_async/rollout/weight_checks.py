"""Verifies engines after an update: asks them, and compares by the rules of `weight_sync.verify`.

In two steps, since the trainer computes in between: `held` and `sampled` ask the engines, `ratios`
compares what they sampled with the trainer's log-probs of it.

Invariants
- Nothing here changes an engine or gives one up: each step names the engines that passed, those
  that hold or sample something else, and those that failed to answer.
- The rules remember across updates: the checksum that a version was published with, and what
  difference to the trainer is usual in half precision.
- Where two checksums are equally common none is taken for wrong before the trainer has compared:
  its log-probs decide. Only if they do not is every engine taken for wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineClient, EngineError
from megatron_async.rollout import probe
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion
from megatron_async.weight_sync.verify import HeldVersion, RatioCheck, agreed_checksum, disagreement

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CheckOutcome:
    """Engines that passed; by id, why others are `wrong` or have `failed` to answer."""

    good: list[EngineClient] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class WeightChecks:
    """The checks of one manager's engines."""

    def __init__(self, config: RunConfig, prompts: Callable[[], Sequence[IntArray]]) -> None:
        """`prompts` gives some of the task's."""
        self._config = config
        self._prompts = prompts
        self._agreed: tuple[PolicyVersion, str] | None = None
        self._undecided: list[HeldVersion] = []  # engines whose checksums are equally common
        self._rule = RatioCheck(
            tolerance=config.weights.probe_tolerance, temperature=config.sampling.temperature
        )
        # Fewer bits on the way to the engine, whatever it computes with.
        self._sent_exactly = (
            config.weights.transport != "delta" and config.engines.quantization == "none"
        )

    async def held(self, engines: Sequence[EngineClient], version: PolicyVersion) -> CheckOutcome:
        """Return whether they hold `version` under one checksum.

        Engines that come to a version later must have the checksum of those that serve it. Where
        two checksums are equally common all engines pass, and `ratios` decides.
        """

        async def ask(engine: EngineClient) -> HeldVersion:
            checksum = await engine.checksum()
            return HeldVersion(engine.engine_id, await engine.version(), checksum)

        found, failed = await _ask_all(engines, ask)
        reports = [report for _, report in found]
        agreed = agreed_checksum(reports, version)
        if self._agreed is not None and self._agreed[0] == version:
            agreed = self._agreed[1]
        self._agreed = None if agreed is None else (version, agreed)
        self._undecided = []
        if agreed is None:
            self._undecided = [report for report in reports if report.version == version]
        outcome = CheckOutcome(failed=failed)
        for engine, report in found:
            why = disagreement(report, reports, version, agreed or report.checksum)
            if why is None:
                outcome.good.append(engine)
            else:
                outcome.wrong[engine.engine_id] = why
        return outcome

    def _decide(self, outcome: CheckOutcome, version: PolicyVersion) -> CheckOutcome:
        """Settle which checksum is right: that of all engines which passed, if they have one."""
        passed = {engine.engine_id for engine in outcome.good}
        reports = [report for report in self._undecided if report.engine_id in passed]
        self._undecided = []
        if not reports:
            return outcome
        checksums = {report.checksum for report in reports}
        if len(checksums) == 1:
            self._agreed = (version, reports[0].checksum)
            return outcome
        disagree = {r.engine_id: disagreement(r, reports, version, None) or "" for r in reports}
        return CheckOutcome(wrong=outcome.wrong | disagree, failed=outcome.failed)

    async def sampled(
        self, engines: Sequence[EngineClient], version: PolicyVersion
    ) -> tuple[CheckOutcome, list[probe.ProbeSample]]:
        """Tokens of each engine as the run samples them."""
        weights, sampling = self._config.weights, self._config.sampling
        prompts = probe.probe_prompts(self._prompts())

        async def ask(engine: EngineClient) -> list[probe.ProbeSample]:
            return await probe.sample(
                engine, prompts, sampling, version, probe.TOKENS, weights.timeout_seconds
            )

        found, failed = await _ask_all(engines, ask)
        good = [engine for engine, _ in found]
        return CheckOutcome(good, failed=failed), [one for _, samples in found for one in samples]

    def ratios(
        self,
        engines: Sequence[EngineClient],
        samples: Sequence[probe.ProbeSample],
        logprobs_T: FloatArray | None,
        version: PolicyVersion,
        *,
        float32: bool,
    ) -> tuple[CheckOutcome, dict[str, float]]:
        """Compare with the trainer; the metrics of that are over all engines.

        `logprobs_T` are the trainer's of `probe.packed(samples)`, computed in `float32` or less.

        Every one of `engines` has samples, or none has, and then they pass.
        """
        if logprobs_T is None:
            if samples:
                raise ValueError(f"engines sampled with {version}, and no log-probs came of it")
            return self._decide(CheckOutcome(list(engines)), version), {}
        exact = float32 and self._sent_exactly and all(e.dtype == "float32" for e in engines)
        errors = probe.errors(samples, logprobs_T)
        outcome = CheckOutcome()
        for engine in engines:
            error = errors[engine.engine_id]
            if self._rule.passes(error, exact=exact):
                outcome.good.append(engine)
                continue
            outcome.wrong[engine.engine_id] = (
                f"engine {engine.engine_id} does not sample from the trainer's weights of "
                f"{version}: log-probs of its own tokens differ by {error.mean:.2e} on average, "
                f"and {self._rule.limit(exact=exact):.2e} is the limit {self._limit_is(exact)}"
            )
        if not outcome.good:  # they agreed on other weights: that is ignored
            self._agreed = None
        means = [error.mean for error in errors.values()]
        largest = [error.largest for error in errors.values()]
        metrics = {
            "weights/probe_mean_error": float(np.max(means, initial=0.0)),
            "weights/probe_max_error": float(np.max(largest, initial=0.0)),
        }
        if not exact:
            drift = self._rule.drift(errors.values())
            if drift is not None:
                metrics["weights/probe_drift"] = drift
            self._rule.learn(errors[engine.engine_id] for engine in outcome.good)
        return self._decide(outcome, version), metrics

    def _limit_is(self, exact: bool) -> str:
        if self._config.weights.probe_tolerance is not None:
            return "(weights.probe_tolerance)"
        return "in float32" if exact else "of a gross error in half precision"


async def _ask_all(
    engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[T]]
) -> tuple[list[tuple[EngineClient, T]], dict[str, str]]:
    """Ask engines, all at once: the answers, and by id why others did not answer."""
    answers = await asyncio.gather(*map(what, engines), return_exceptions=True)
    found: list[tuple[EngineClient, T]] = []
    failed: dict[str, str] = {}
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, EngineError):
            failed[engine.engine_id] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append((engine, answer))
    return found, failed
