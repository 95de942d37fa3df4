"""Verifies the weights of engines after an update: whether each engine has the new version, the
checksum that other engines have, and log-probs close to the trainer's. The module
`weight_sync.verify` has the rules for these comparisons.

There are two steps, because the trainer computes between them: `check_checksums` and
`sample_tokens` call the engines, and `check_ratios` compares the engines' log-probs of the sampled
tokens with the trainer's.

Invariants
- The checks do not change an engine or take it out of service. Each check returns which engines
  passed, which have wrong weights or samples, and which failed to reply; the caller acts on it.
- `WeightChecks` remembers two things across updates: the checksum on which engines agreed for the
  newest version, and how much log-probs of engines and trainer usually differ in half precision.
- If two checksums are equally common, the comparison with the trainer's log-probs decides. The
  engines that pass it are right if they have one checksum; if they still have different checksums,
  all of them count as wrong.
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
from megatron_async.weight_sync.verify import (
    LoadedVersion,
    RatioCheck,
    agreed_checksum,
    disagreement,
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CheckOutcome:
    """Outcome of a check of engines: which engines passed, which are wrong, and which failed to
    reply.

    Attributes:
        good: Engines that passed.
        wrong: Reason for each engine that has wrong weights or samples, by engine id.
        failed: Error of each engine that failed to reply, by engine id.
    """

    good: list[EngineClient] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class WeightChecks:
    """Checks of the weights of one manager's engines. It remembers, across updates, the checksum on
    which engines agreed, and how much their log-probs usually differ from the trainer's."""

    def __init__(self, config: RunConfig, prompts: Callable[[], Sequence[IntArray]]) -> None:
        """Set up the checks of a run.

        Args:
            prompts: Function that returns a few prompts of the task.
        """
        self._config = config
        self._prompts = prompts
        self._agreed: tuple[PolicyVersion, str] | None = None
        # Reports of engines of which it is undecided whether their checksum is right.
        self._undecided: list[LoadedVersion] = []
        self._rule = RatioCheck(
            tolerance=config.weights.probe_tolerance, temperature=config.sampling.temperature
        )
        # Whether engines get exactly the trainer's weights. A delta transport and quantized engines
        # round them, whatever data type the engine computes with.
        self._sent_exactly = (
            config.weights.transport != "delta" and config.engines.quantization == "none"
        )

    async def check_checksums(
        self, engines: Sequence[EngineClient], version: PolicyVersion
    ) -> CheckOutcome:
        """Ask engines for their version and checksum; an engine passes if it has `version` and the
        common checksum.

        The common checksum is the one that most engines with `version` have. If engines agreed on a
        checksum for this version in an earlier call, it is that checksum. If two checksums are
        equally common, all engines with `version` pass here, and `check_ratios` decides.
        """

        async def ask(engine: EngineClient) -> LoadedVersion:
            checksum = await engine.checksum()
            return LoadedVersion(engine.engine_id, await engine.version(), checksum)

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
        """After the comparison of log-probs, decide which of two equally common checksums is right;
        return the new outcome. Without such a tie, return `outcome` unchanged.

        If all engines that passed the comparison have the same checksum, it is right. If they still
        differ, all of them are wrong.
        """
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

    async def sample_tokens(
        self, engines: Sequence[EngineClient], version: PolicyVersion
    ) -> tuple[CheckOutcome, list[probe.ProbeSample]]:
        """Sample tokens from each engine with the run's sampling settings; return which engines
        replied, and the samples."""
        weights, sampling = self._config.weights, self._config.sampling
        prompts = probe.probe_prompts(self._prompts())

        async def ask(engine: EngineClient) -> list[probe.ProbeSample]:
            return await probe.sample(
                engine, prompts, sampling, version, probe.TOKENS, weights.timeout_seconds
            )

        found, failed = await _ask_all(engines, ask)
        good = [engine for engine, _ in found]
        return CheckOutcome(good, failed=failed), [one for _, samples in found for one in samples]

    def check_ratios(
        self,
        engines: Sequence[EngineClient],
        samples: Sequence[probe.ProbeSample],
        logprobs_T: FloatArray | None,
        version: PolicyVersion,
        *,
        float32: bool,
    ) -> tuple[CheckOutcome, dict[str, float]]:
        """Compare log-probs of the engines' sampled tokens with the trainer's; return which engines
        pass, and metrics.

        Args:
            engines: Engines to judge; either each of them has samples, or there are no samples and
                all pass.
            logprobs_T: Trainer's log-probs of `probe.packed(samples)`; None if there are no
                samples.
            float32: Whether the trainer computed the log-probs in float32.

        Returns:
            The outcome by engine, and metrics of the differences over all engines.

        Raises:
            ValueError: There are samples but no log-probs.
        """
        if logprobs_T is None:
            if samples:
                raise ValueError(f"engines sampled with {version}, but there are no log-probs")
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
                f"{version}: log-probs of its own tokens differ by {error.mean:.2e} on average; "
                f"the limit is {self._rule.limit(exact=exact):.2e} {self._limit_note(exact)}"
            )
        # If no engine passes, the engines agreed on a checksum of wrong weights, so forget it.
        if not outcome.good:
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

    def _limit_note(self, exact: bool) -> str:
        if self._config.weights.probe_tolerance is not None:
            return "(weights.probe_tolerance)"
        return "in float32" if exact else "for a gross error in half precision"


async def _ask_all(
    engines: Sequence[EngineClient], what: Callable[[EngineClient], Awaitable[T]]
) -> tuple[list[tuple[EngineClient, T]], dict[str, str]]:
    """Call `what` on all engines concurrently; return the replies, and the error of each engine
    that failed, by engine id."""
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
