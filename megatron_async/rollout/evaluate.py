"""Accuracy on problems that training never sees, measured on engines.

Whatever engines serve just then generate the responses; episodes are played to their ends.

Invariants
- Each set's problems come in a fixed order; the same call asks the same ones.
- What has no score (it failed, or engines refuse the prompt) counts as wrong; how many is reported.
- The sets are asked together, so that one's longest responses do not hold up another.
- Weights never change under a request: every token is of a version that has been verified
  (`EnginePool`), and each response has the versions of its tokens.
- An exact evaluation measures one version: the trainer waits, so the weights stay. So are those at
  both ends of a run, and all of them with `eval.blocking`.
- One beside training belongs to the version that it began with, and its responses name the versions
  of their tokens. It never delays an update, and its failure is reported and stops nothing.
- At most one is under way; one that is due meanwhile is left out with a warning.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.config.evaluation import HELDOUT, EvalSet
from megatron_async.engines.interface import EngineClient, EngineError
from megatron_async.environments.workers import EnvironmentWorkers, EpisodeSessions
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.episodes import EvalEpisode, play
from megatron_async.rollout.prompt_lengths import max_sequence_tokens
from megatron_async.rollout.responses import (
    IN_FLIGHT_PER_ENGINE,
    EnginePool,
    ResponseSpec,
    ResponseTokens,
    respond,
)
from megatron_async.rollout.scoring import conversation_of, with_conversations, with_turns
from megatron_async.scoring.interface import SCORE_FAILURES, Scorers
from megatron_async.tasks.answers import final_answer
from megatron_async.tasks.base import Task
from megatron_async.telemetry.metrics import sampling_name
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Prompt

T = TypeVar("T")
_Z = 1.959964  # 95 % of a normal distribution
# Requests of an evaluation beside training that one engine runs at once. The limit leaves most of
# an engine's decode batch to the requests that the trainer waits for.
REQUESTS_PER_ENGINE: Final = 16


@dataclass(frozen=True)
class EvalResponse:
    """A response to an evaluation problem; `reward` None: it could not be scored.

    `refused`: there is no response, since engines refuse the prompt.
    `versions`: how many of its tokens each policy version has made. Of an episode `text` is the
    last answer, `length` counts all, and `messages` are the conversation.
    """

    text: str
    reward: float | None
    detail: Mapping[str, float]
    length: int
    truncated: bool
    versions: Mapping[PolicyVersion, int] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class Estimate:
    """A share, and the ends of its 95 % confidence interval over problems."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of one number in [0, 1] for each problem; Wilson's interval.

        The interval is that of as many independent yes-or-no trials as have the same variance.
        """
        count, mean = len(values), float(np.mean(values))
        variance = float(np.var(values, ddof=1)) / count if count > 1 else 0.0
        trials = mean * (1 - mean) / variance if variance else float(count)
        middle = (mean + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
        half = math.sqrt(mean * (1 - mean) / trials + (_Z / (2 * trials)) ** 2)
        half *= _Z / (1 + _Z**2 / trials)
        return cls(mean, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation set.

    Attributes:
        accuracy: share of responses with a reward of at least `solved_at` (avg@k).
        refused: missing responses, since no engine takes their prompt; they count as wrong.
        reward_mean: mean reward; a response without a score counts as 0.
        reward_max: largest reward; 0 if no response has a score.
        temperature: sampling temperature; 0 for greedy responses.
        solved_at: `eval.solved_at`.
        length_mean, length_median, length_max: tokens of a response.
    """

    name: str
    accuracy: float
    responses: int
    score_failures: int
    refused: int
    reward_mean: float
    reward_max: float
    temperature: float
    solved_at: float
    length_mean: float
    length_median: float
    length_max: int
    truncated_share: float
    seconds: float
    versions: Mapping[PolicyVersion, int]
    estimates: Mapping[str, Estimate]
    samples: tuple[dict[str, Any], ...] = ()

    def metrics(self) -> dict[str, float]:
        """Scalars: `eval/...` of the held-out problems, `eval/NAME/...` of other sets."""
        prefix = "eval/" if self.name == HELDOUT else f"eval/{self.name}/"
        numbers = {name: n for name, n in vars(self).items() if isinstance(n, int | float)}
        metrics = {f"{prefix}{name}": float(number) for name, number in numbers.items()}
        if self.versions:
            versions = [version.number for version in self.versions]
            weights = list(self.versions.values())
            metrics[f"{prefix}version_oldest"] = float(min(versions))
            metrics[f"{prefix}version_newest"] = float(max(versions))
            metrics[f"{prefix}version_mean"] = float(np.average(versions, weights=weights))
        for name, estimate in self.estimates.items():
            metrics[f"{prefix}{name}"] = estimate.value
            metrics[f"{prefix}{name}_low"] = estimate.low
            metrics[f"{prefix}{name}_high"] = estimate.high
        return metrics

    def message(self) -> str:
        """The result as a line."""
        shares = ", ".join(
            f"{name.replace('_at_', '@')} {100 * e.value:.1f} % "
            f"({100 * e.low:.1f} to {100 * e.high:.1f})"
            for name, e in self.estimates.items()
        )
        text = (
            f"{self.name}: {shares}, {sampling_name(self.temperature)}; "
            f"mean reward {self.reward_mean:.3f}; {self.responses} answers, "
            f"{self.length_mean:.1f} tokens each"
        )
        if 0 < self.reward_max < self.solved_at:
            text += (
                f"; the largest reward is {self.reward_max:.3g}, below eval.solved_at "
                f"{self.solved_at:g}, so that no answer counts as right"
            )
        if self.score_failures:
            text += f", {self.score_failures} scores failed"
        if self.refused:
            text += f", {self.refused} prompts were too long for the engines"
        return text


@dataclass(frozen=True)
class Evaluation:
    """All sets, in the order of the settings; `number`: that of the version it began with."""

    results: tuple[EvalResult, ...]
    number: int = 0

    @property
    def accuracy(self) -> float:
        """The accuracy of the first set."""
        return self.results[0].accuracy

    @property
    def reward_max(self) -> float:
        """The largest reward of all sets."""
        return max(result.reward_max for result in self.results)

    def metrics(self) -> dict[str, float]:
        """The scalars of all sets."""
        return {name: v for result in self.results for name, v in result.metrics().items()}

    def samples(self) -> list[dict[str, Any]]:
        """The saved responses of all sets."""
        return [sample for result in self.results for sample in result.samples]


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The chance that one of `k` responses drawn from `samples`, of which `solved` are right, is
    right: unbiased (Chen et al. 2021, arXiv 2107.03374)."""
    if samples - solved < k:
        return 1.0
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def majority_is_right(answers: Sequence[str | None], solved: Sequence[bool]) -> bool:
    """True when the most frequent answer is right; of equally frequent ones the first counts."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return False
    winner = counts.most_common(1)[0][0]
    return solved[list(answers).index(winner)]


def estimates(
    answered: Sequence[Sequence[EvalResponse]], solved_at: float, marker: str
) -> dict[str, Estimate]:
    """`accuracy` and, of several responses a problem, pass@k for powers of two and maj@k."""
    solved = [[a.reward is not None and a.reward >= solved_at for a in one] for one in answered]
    count = len(answered[0])
    found = {"accuracy": Estimate.of([sum(one) / count for one in solved])}
    if count == 1:
        return found
    for k in sorted({*(2**i for i in range(1, count.bit_length()) if 2**i < count), count}):
        found[f"pass_at_{k}"] = Estimate.of([pass_at_k(count, sum(one), k) for one in solved])
    votes = [
        majority_is_right([_vote(a.text, marker) for a in one], right)
        for one, right in zip(answered, solved, strict=True)
    ]
    found[f"maj_at_{count}"] = Estimate.of([float(vote) for vote in votes])
    return found


def _vote(text: str, marker: str) -> str | None:
    answer = final_answer(text, marker)
    return None if answer is None else " ".join(answer.split())


class Evaluator:
    """Asks and scores the evaluation sets of a run's settings."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        scorers: Scorers,
        environments: EnvironmentWorkers | None = None,
    ) -> None:
        """`environments`: what episodes are played against; None where there is none."""
        self._held = None if environments is None else EpisodeSessions(environments)
        self._longest = None if environments is None else max_sequence_tokens(config)
        self._numbers = itertools.count()
        self._config = config
        self._task = task
        self._scorers = scorers
        self._prompts: dict[str, list[Prompt]] = {}

    async def evaluate(self, engines: EnginePool, version: PolicyVersion) -> Evaluation:
        """Every prompt of every set as often as its settings ask for, begun with `version`.

        Raises EngineError when engines fail again and again.
        """
        sets = (
            self._evaluate_set(one, engines, f"eval-{version}") for one in self._config.eval_sets()
        )
        return Evaluation(tuple(await _all(sets)), version.number)

    def _prompts_of(self, one: EvalSet) -> list[Prompt]:
        if one.name not in self._prompts:
            self._prompts[one.name] = self._task.eval_prompts(one.prompts, one.name)
        return self._prompts[one.name]

    async def _evaluate_set(self, one: EvalSet, engines: EnginePool, tag: str) -> EvalResult:
        stops = tuple(self._task.stop_token_ids)
        wanted = ResponseSpec(one.sampling, one.sampling.max_new_tokens, stops)

        async def response(number: int) -> ResponseTokens | EvalEpisode | None:
            prompt, name = prompts[number // one.samples], f"{tag}-{one.name}-{number}"
            if self._held is None:
                return await respond(wanted, prompt.token_ids, name, engines)
            return await play(
                self._held,
                next(self._numbers),
                prompt.payload,
                wanted,
                name,
                engines,
                self._config.episode,
                self._longest,
            )

        async def alone(number: int) -> EvalResponse:
            prompt = prompts[number // one.samples]
            return (await self._scored(prompt, [await response(number)]))[0]

        async def problem(number: int) -> list[EvalResponse]:
            asked = range(number * one.samples, (number + 1) * one.samples)
            if not self._config.scorers.of_groups:
                return await _all(map(alone, asked))
            return await self._scored(prompts[number], await _all(map(response, asked)))

        began = time.monotonic()
        prompts = self._prompts_of(one)
        grouped = await _all(problem(number) for number in range(len(prompts)))
        return self._result(one, prompts, grouped, time.monotonic() - began)

    async def _scored(
        self, prompt: Prompt, responses: Sequence[ResponseTokens | EvalEpisode | None]
    ) -> list[EvalResponse]:
        whole = [response for response in responses if response is not None]
        turns = [r.turns if isinstance(r, EvalEpisode) else [] for r in whole]
        if any(turns):
            prompt = with_conversations(prompt, list(map(conversation_of, turns)))
        if self._config.scorers.of_groups and whole:
            scores = await self._scorers.score_group(prompt, [r.token_ids for r in whole])
        else:
            scores = [await self._scorers.score(prompt, r.token_ids) for r in whole]
        found = iter(
            EvalResponse(
                self._task.text(r.token_ids),
                *with_turns(*score, of_it),
                length=sum(r.versions.values()) if of_it else len(r.token_ids),
                truncated=r.end is FinishReason.LENGTH,
                versions=r.versions,
                messages=tuple(conversation_of(of_it)),
            )
            for r, score, of_it in zip(whole, scores, turns, strict=True)
        )
        # An episode is also without a response where its environment has failed.
        refused = EvalResponse("", None, {}, 0, False, refused=self._held is None)
        return [refused if response is None else next(found) for response in responses]

    def _result(
        self,
        one: EvalSet,
        prompts: Sequence[Prompt],
        grouped: Sequence[Sequence[EvalResponse]],
        seconds: float,
    ) -> EvalResult:
        answers = [answered for problem in grouped for answered in problem]
        rewards = [answered.reward for answered in answers if answered.reward is not None]
        lengths = np.array([answered.length for answered in answers])
        marker = self._config.task.answer_marker
        found = estimates(grouped, self._config.eval.solved_at, marker)
        return EvalResult(
            name=one.name,
            accuracy=found["accuracy"].value,
            responses=len(answers),
            score_failures=sum(
                not a.refused and (a.reward is None or bool(SCORE_FAILURES & a.detail.keys()))
                for a in answers
            ),
            refused=sum(answered.refused for answered in answers),
            reward_mean=math.fsum(rewards) / len(answers),
            reward_max=max(rewards, default=0.0),
            temperature=one.temperature,
            solved_at=self._config.eval.solved_at,
            length_mean=float(lengths.mean()),
            length_median=float(np.median(lengths)),
            length_max=int(lengths.max()),
            truncated_share=float(np.mean([answered.truncated for answered in answers])),
            seconds=seconds,
            versions=sum((Counter(answered.versions) for answered in answers), Counter()),
            estimates=found,
            samples=tuple(
                {"prompt": self._task.text(prompt.token_ids.tolist()), **sample}
                for prompt, problem in zip(
                    prompts[: self._config.eval.save_samples], grouped, strict=False
                )
                for sample in _samples(one.name, prompt, problem)
            ),
        )


def _samples(
    name: str, prompt: Prompt, answered: Sequence[EvalResponse]
) -> Iterator[dict[str, Any]]:
    for one in answered:
        yield {
            "set": name,
            "question": prompt.payload.get("question", ""),
            "answer": prompt.payload.get("answer", ""),
            "response": one.text,
            "reward": one.reward,
            "parts": dict(one.detail),
            "tokens": one.length,
            "truncated": one.truncated,
            "versions": [str(version) for version in one.versions],
            **({"messages": list(one.messages)} if one.messages else {}),
        }


class Evaluations:
    """The evaluations of one session of a trainer."""

    def __init__(self, config: RunConfig, evaluator: Evaluator, driver: RolloutDriver) -> None:
        self._config = config
        self._evaluator = evaluator
        self._driver = driver
        self._begun: PolicyVersion | None = None
        self._beside: asyncio.Task[None] | None = None
        self._done: list[Evaluation] = []
        self._engines = EnginePool(driver.serving, REQUESTS_PER_ENGINE, self._failed)

    async def suspend(self) -> None:
        """Let no request of an evaluation run from before an update until `updated`."""
        await self._engines.suspend()

    def updated(self, version: PolicyVersion, *, held: bool) -> bool:
        """Version `version` serves. True when the trainer must ask for its evaluation.

        `held`: an engine holds it.
        """
        self._engines.release()
        if not held or version == self._begun or not self._due(version.number):
            return False
        if self._config.evaluates_blocking or version.number in (0, self._config.steps):
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

    async def evaluate_blocking(
        self, version: PolicyVersion, holders: Sequence[EngineClient]
    ) -> None:
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
        engines = EnginePool(living, failed=self._failed)
        await self._evaluate(engines, version)
        self._begun = version

    async def _evaluate_beside(self, version: PolicyVersion) -> None:
        try:
            await self._evaluate(self._engines, version)
        except ComponentFailure as failure:
            self._driver.statistics.warned("evaluation_failed", str(failure))

    async def _evaluate(self, engines: EnginePool, version: PolicyVersion) -> None:
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
        await self._driver.suspect(engine, str(error))


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. When one fails, the others are canceled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
