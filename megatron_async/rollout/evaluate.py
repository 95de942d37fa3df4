"""Measures accuracy on problems that training never sees, with responses from the run's engines.

Each request of an evaluation goes to an engine that serves at that moment, in addition to the
engine's training requests. If the task has episodes, each response is an episode, which is played
to its end.

Invariants
- The problems of each set have a fixed order, so every evaluation of a run has the same problems.
- A response without a score counts as wrong: its scorer failed, engines refuse its prompt, or the
  environment of its episode failed. The number of such responses is reported.
- The problems of all sets are sent to the engines at once, so that the longest responses of one set
  do not delay another set.
- Weights never change during a request, so every token is of a verified version (`EnginePool`).
  Each response records the versions of its tokens.
- A blocking evaluation measures exactly one version, because the trainer waits for it and updates
  no weights meanwhile. The evaluations before the first and after the last training step are
  blocking, and with `eval.blocking` all evaluations are.
- An evaluation concurrent with training may span several versions and is named after the version
  with which it started. It never delays an update. If it fails, a warning is reported and training
  continues.
- At most one evaluation runs at a time. If another becomes due meanwhile, it is skipped with a
  warning.
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
_Z = 1.959964  # 95 % of a normal distribution are within this many standard deviations of the mean.
# Maximum number of requests on one engine of an evaluation that is concurrent with training. The
# limit leaves most of an engine's decode batch to the requests that the trainer waits for.
REQUESTS_PER_ENGINE: Final = 16


@dataclass(frozen=True)
class EvalResponse:
    """A scored response to an evaluation problem.

    Attributes:
        text: Text of the response; for an episode, of its last response.
        reward: Reward of the response; None if it could not be scored.
        detail: Named components of the reward.
        length: Number of tokens; for an episode, of all its responses.
        truncated: Whether the response was cut at its length limit.
        versions: Number of tokens that each policy version has made.
        messages: Conversation of an episode; otherwise empty.
        refused: Whether there is no response because engines refuse the prompt.
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
    """A share between 0 and 1 (`value`) that is estimated from the problems of a set, and its 95 %
    confidence interval from `low` to `high`."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate a share from one number in [0, 1] for each problem: its mean and Wilson's 95 %
        interval.

        Wilson's interval is defined for independent yes-or-no trials, but `values` may lie between
        0 and 1. The interval is therefore computed for the number of such trials whose mean would
        have the same variance as the mean of `values`.
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
    """Result of the evaluation of one set of problems.

    Attributes:
        name: Name of the set.
        accuracy: Share of responses with a reward of at least `solved_at` (avg@k).
        responses: Number of responses, including missing responses.
        score_failures: Number of responses whose scorer failed, including failures that count as
            reward 0, and of episodes that could not be played to their end.
        refused: Number of missing responses because no engine accepts their prompt; they count as
            wrong.
        reward_mean: Mean reward; a response without a score counts as 0.
        reward_max: Largest reward; 0 if no response has a score.
        temperature: Sampling temperature; 0 for greedy responses.
        solved_at: Smallest reward with which a response counts as right (`eval.solved_at`).
        length_mean: Mean number of tokens of a response.
        length_median: Median number of tokens of a response.
        length_max: Largest number of tokens of a response.
        truncated_share: Share of responses that were cut at their length limit.
        seconds: Time that the evaluation of the set took.
        versions: Number of tokens that each policy version has made.
        estimates: Accuracy, pass@k and maj@k with their confidence intervals, by name.
        samples: Responses of the first `eval.save_samples` problems, as rows to save.
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
        """Return this set's metrics: `eval/...` for the held-out problems, `eval/NAME/...` for
        other sets."""
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
        """Return this set's result as one line of text, for display."""
        shares = ", ".join(
            f"{name.replace('_at_', '@')} {100 * e.value:.1f} % "
            f"({100 * e.low:.1f} to {100 * e.high:.1f})"
            for name, e in self.estimates.items()
        )
        text = (
            f"{self.name}: {shares}, {sampling_name(self.temperature)}; "
            f"mean reward {self.reward_mean:.3f}; {self.responses} responses, "
            f"{self.length_mean:.1f} tokens each"
        )
        if 0 < self.reward_max < self.solved_at:
            text += (
                f"; the largest reward is {self.reward_max:.3g}, below eval.solved_at "
                f"{self.solved_at:g}, so no response counts as right"
            )
        if self.score_failures:
            text += f", {self.score_failures} scores failed"
        if self.refused:
            text += f", {self.refused} prompts were too long for the engines"
        return text


@dataclass(frozen=True)
class Evaluation:
    """Results of all evaluation sets, in the order of the settings.

    Attributes:
        number: Number of the policy version with which the evaluation started.
    """

    results: tuple[EvalResult, ...]
    number: int = 0

    @property
    def accuracy(self) -> float:
        """Accuracy of the first set, as a share between 0 and 1."""
        return self.results[0].accuracy

    @property
    def reward_max(self) -> float:
        """Largest reward in all sets."""
        return max(result.reward_max for result in self.results)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all sets, by metric name."""
        return {name: v for result in self.results for name, v in result.metrics().items()}

    def samples(self) -> list[dict[str, Any]]:
        """Return the saved responses of all sets, one row for each response."""
        return [sample for result in self.results for sample in result.samples]


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate pass@k of one problem: the probability that at least one of `k` responses is right.

    The estimate is unbiased (Chen et al. 2021, arXiv 2107.03374). It is 1 - C(samples - solved, k)
    / C(samples, k), where C(n, k) is the number of ways to choose k of n. This is the probability
    that at least one of `k` responses is right if they are drawn without replacement from `samples`
    responses, of which `solved` are right.
    """
    if samples - solved < k:
        return 1.0
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def majority_is_right(answers: Sequence[str | None], solved: Sequence[bool]) -> bool:
    """Return whether the most frequent answer to one problem is right; among equally frequent
    answers the first counts.

    Args:
        answers: Answer in each response; None if the response has no answer.
        solved: Whether each response is right.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return False
    winner = counts.most_common(1)[0][0]
    return solved[list(answers).index(winner)]


def estimates(
    answered: Sequence[Sequence[EvalResponse]], solved_at: float, marker: str
) -> dict[str, Estimate]:
    """Return the estimates of one set by name: `accuracy`, and with several responses per problem
    pass@k and maj@k.

    pass@k is estimated for powers of two and for the number of responses per problem.

    Args:
        answered: Responses to each problem; every problem has the same number.
        solved_at: Smallest reward with which a response counts as right.
        marker: Text before the answer in a response (`task.answer_marker`).
    """
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
    """Generates and scores responses to the evaluation sets in a run's settings."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        scorers: Scorers,
        environments: EnvironmentWorkers | None = None,
    ) -> None:
        """Set up an evaluator; nothing is generated yet.

        Args:
            environments: Workers that run the environments; None if responses are not episodes.
        """
        self._sessions = None if environments is None else EpisodeSessions(environments)
        self._longest = None if environments is None else max_sequence_tokens(config)
        self._numbers = itertools.count()
        self._config = config
        self._task = task
        self._scorers = scorers
        self._prompts: dict[str, list[Prompt]] = {}

    async def evaluate(self, engines: EnginePool, version: PolicyVersion) -> Evaluation:
        """Generate and score as many responses to every problem of every set as the settings say;
        return the results.

        Args:
            engines: Engines that generate the responses.
            version: Policy version with which the evaluation starts.

        Raises:
            EngineError: Three requests for one response failed.
        """
        sets = (
            self._evaluate_set(eval_set, engines, f"eval-{version}")
            for eval_set in self._config.eval_sets()
        )
        return Evaluation(tuple(await _all(sets)), version.number)

    def _prompts_of(self, eval_set: EvalSet) -> list[Prompt]:
        if eval_set.name not in self._prompts:
            self._prompts[eval_set.name] = self._task.eval_prompts(eval_set.prompts, eval_set.name)
        return self._prompts[eval_set.name]

    async def _evaluate_set(self, eval_set: EvalSet, engines: EnginePool, tag: str) -> EvalResult:
        stops = tuple(self._task.stop_token_ids)
        wanted = ResponseSpec(eval_set.sampling, eval_set.sampling.max_new_tokens, stops)

        async def response(number: int) -> ResponseTokens | EvalEpisode | None:
            prompt, name = prompts[number // eval_set.samples], f"{tag}-{eval_set.name}-{number}"
            if self._sessions is None:
                return await respond(wanted, prompt.token_ids, name, engines)
            return await play(
                self._sessions,
                next(self._numbers),
                prompt.payload,
                wanted,
                name,
                engines,
                self._config.episode,
                self._longest,
            )

        async def scored_response(number: int) -> EvalResponse:
            prompt = prompts[number // eval_set.samples]
            return (await self._scored(prompt, [await response(number)]))[0]

        async def problem(number: int) -> list[EvalResponse]:
            asked = range(number * eval_set.samples, (number + 1) * eval_set.samples)
            if not self._config.scorers.of_groups:
                return await _all(map(scored_response, asked))
            return await self._scored(prompts[number], await _all(map(response, asked)))

        began = time.monotonic()
        prompts = self._prompts_of(eval_set)
        grouped = await _all(problem(number) for number in range(len(prompts)))
        return self._result(eval_set, prompts, grouped, time.monotonic() - began)

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
                *with_turns(*score, episode_turns),
                length=sum(r.versions.values()) if episode_turns else len(r.token_ids),
                truncated=r.end is FinishReason.LENGTH,
                versions=r.versions,
                messages=tuple(conversation_of(episode_turns)),
            )
            for r, score, episode_turns in zip(whole, scores, turns, strict=True)
        )
        # `None` means that engines refused the prompt. For an episode it may also mean that its
        # environment failed, so a missing episode is not counted as refused.
        refused = EvalResponse("", None, {}, 0, False, refused=self._sessions is None)
        return [refused if response is None else next(found) for response in responses]

    def _result(
        self,
        eval_set: EvalSet,
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
            name=eval_set.name,
            accuracy=found["accuracy"].value,
            responses=len(answers),
            score_failures=sum(
                not a.refused and (a.reward is None or bool(SCORE_FAILURES & a.detail.keys()))
                for a in answers
            ),
            refused=sum(answered.refused for answered in answers),
            reward_mean=math.fsum(rewards) / len(answers),
            reward_max=max(rewards, default=0.0),
            temperature=eval_set.temperature,
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
                for sample in _samples(eval_set.name, prompt, problem)
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
    """Decides when evaluations of one trainer's session are due, runs them, and keeps finished ones
    until the trainer fetches them."""

    def __init__(self, config: RunConfig, evaluator: Evaluator, driver: RolloutDriver) -> None:
        self._config = config
        self._evaluator = evaluator
        self._driver = driver
        self._last_version: PolicyVersion | None = None
        self._concurrent: asyncio.Task[None] | None = None
        self._done: list[Evaluation] = []
        self._engines = EnginePool(driver.serving, REQUESTS_PER_ENGINE, self._failed)

    async def suspend(self) -> None:
        """Interrupt all requests of evaluations before a weight update; none runs until `updated`
        is called."""
        await self._engines.suspend()

    def updated(self, version: PolicyVersion, *, loaded: bool) -> bool:
        """Let a running evaluation continue after a weight update, and start an evaluation of
        `version` if one is due.

        A due evaluation that runs concurrently with training is started here. If a blocking
        evaluation is due, return True: the trainer must then request it (`evaluate_blocking`).

        Args:
            loaded: Whether any engine has loaded `version`.
        """
        self._engines.release()
        if not loaded or not self._due(version):
            return False
        if self.blocks(version):
            return True
        if self._concurrent is not None and not self._concurrent.done():
            self._driver.statistics.warned(
                "evaluation_skipped",
                f"version {version} is not evaluated: the evaluation of {self._last_version} is "
                "still running. Raise eval.every_steps.",
            )
            return False
        self._last_version = version
        self._concurrent = self._driver.background.spawn(self._evaluate_concurrently(version))
        return False

    def blocks(self, version: PolicyVersion) -> bool:
        """Return whether an evaluation of `version` is due for which the trainer must wait."""
        blocking = self._config.evaluates_blocking or self._at_an_end(version.number)
        return blocking and self._due(version)

    def _due(self, version: PolicyVersion) -> bool:
        if version == self._last_version or not self._config.eval_sets():
            return False
        every = self._config.eval.every_steps
        return self._at_an_end(version.number) or (every > 0 and version.number % every == 0)

    def _at_an_end(self, number: int) -> bool:
        return number in (0, self._config.steps)

    def take(self) -> tuple[Evaluation, ...]:
        """Return the evaluations that have finished since the last call."""
        done, self._done = self._done, []
        return tuple(done)

    async def evaluate_blocking(
        self, version: PolicyVersion, loaded: Sequence[EngineClient]
    ) -> None:
        """Wait for a running evaluation to end, then evaluate `version` on the engines in `loaded`,
        all of which have loaded this version.

        Raises:
            ComponentFailure: None of these engines is in service any longer, or the evaluation
                failed or exceeded `eval.timeout_seconds`.
        """

        def living() -> list[EngineClient]:
            remaining = [engine for engine in self._driver.engines() if engine in loaded]
            if not remaining:
                raise ComponentFailure(
                    f"failed to evaluate {version}: no engine that has loaded it is left"
                )
            return remaining

        if self._concurrent is not None:
            # The trainer waits for this evaluation only, so the evaluation may fill the engines'
            # decode batches.
            self._engines.slots = IN_FLIGHT_PER_ENGINE
            await asyncio.wait([self._concurrent])
            self._engines.slots = REQUESTS_PER_ENGINE
        engines = EnginePool(living, failed=self._failed)
        await self._evaluate(engines, version)
        self._last_version = version

    async def _evaluate_concurrently(self, version: PolicyVersion) -> None:
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
    """Run all `work` concurrently and return the results in order; if one fails, cancel the others
    and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
