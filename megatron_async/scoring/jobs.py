"""Splits the scoring of responses into jobs for single rewards, and adds up the resulting scores.

All functions are pure.

Invariants
- The setting `task.on_scorer_timeout` (reward 0, or drop the trajectory) applies to a score that
  timed out, whose process died on every try, or whose service is unavailable. If the reward
  function raised an exception or did not return a finite number, the score is 0. Each kind of
  failure is counted in the score's `detail` (`SCORER_FAULTS`).
- If any reward gives a response the score `None` (drop the trajectory), the sum is `None` too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.scoring.interface import CONVERSATIONS, SCORER_FAULTS, ResponseScore


@dataclass(frozen=True)
class ScoreJob:
    """A request to score responses to one prompt by one reward; sent to a scorer process as JSON.

    Attributes:
        part: Index of the reward in `ScorerSettings.parts`.
        payload: The prompt's payload: its question, reference answer and other columns.
        texts: The responses, as text.
    """

    part: int
    payload: Mapping[str, Any]
    texts: tuple[str, ...]


def split(
    settings: ScorerSettings, payload: Mapping[str, Any], texts: Sequence[str]
) -> list[ScoreJob]:
    """Return the jobs that score the responses `texts` to one prompt, ordered by reward.

    A reward with `group: true` gets one job for all responses; any other reward gets one job for
    each response.
    """
    work = []
    for number, reward in enumerate(settings.parts):
        size = len(texts) if reward.group else 1
        for start in range(0, len(texts), size or 1):
            span = slice(start, start + size)
            work.append(ScoreJob(number, _of_texts(payload, span), tuple(texts[span])))
    return work


def _of_texts(payload: Mapping[str, Any], span: slice) -> Mapping[str, Any]:
    """Return `payload` for only the responses in `span`: leave out the others' conversations.

    Other parts of the payload belong to the prompt and stay.
    """
    if CONVERSATIONS not in payload:
        return payload
    return {**payload, CONVERSATIONS: payload[CONVERSATIONS][span]}


def scores_of(
    settings: ScorerSettings, reply: Mapping[str, Any], job: ScoreJob, seconds: float
) -> list[ResponseScore]:
    """Convert a scorer process's reply to `job` to one score for each response of the job.

    If the reply reports an error, the scores are failed. `seconds` is the time that the job took.
    """
    if "error" in reply:
        fault = "scorer_unavailable" if "unavailable" in reply else "scorer_error"
        return failed(settings, fault, job, seconds, reply["error"])
    return [ResponseScore(value, parts, seconds) for value, parts in reply["scores"]]


def failed(
    settings: ScorerSettings, fault: str, job: ScoreJob, seconds: float, why: object = None
) -> list[ResponseScore]:
    """Return one failed score for each response of `job`, with `fault` counted in its details.

    Args:
        settings: The settings; they decide whether the reward is 0 or None.
        fault: A key of `SCORE_FAILURES`.
        job: The job that failed.
        seconds: Time that the job took.
        why: Cause, for the error message; not used for a timeout, whose cause is always its limit.
    """
    zero = fault == "scorer_error" or settings.task.on_scorer_timeout == "zero"
    config = settings.parts[job.part]
    if fault == "scorer_timeout":
        why = f"no score within {settings.limit_seconds(config):g} s (its timeout_seconds)"
    reward, failures = 0.0 if zero else None, (f"reward {config.display_name}: {why}",)
    return [ResponseScore(reward, {fault: 1.0}, seconds, failures) for _ in job.texts]


def combine_scores(
    settings: ScorerSettings, work: Sequence[ScoreJob], scores: Sequence[Sequence[ResponseScore]]
) -> list[ResponseScore]:
    """Return the total score of each response: the weighted sum over its rewards.

    Args:
        settings: The settings with the rewards and their weights.
        work: The jobs that `split` returned for the responses.
        scores: For each job, the scores of its responses.
    """
    rewards = settings.parts
    by_reward: list[list[ResponseScore]] = [[] for _ in rewards]
    for job, of_job in zip(work, scores, strict=True):
        by_reward[job.part] += of_job
    return [_sum(rewards, of_response) for of_response in zip(*by_reward, strict=True)]


def _sum(rewards: Sequence[RewardConfig], scores: Sequence[ResponseScore]) -> ResponseScore:
    """Add up the scores that one response got from the rewards, each times its weight.

    The total is None if one of the scores is None. With several rewards, the names of components
    start with the name of their reward, and the details also have the score of each reward. Counts
    of faults are summed over the rewards.
    """
    seconds = sum(score.seconds for score in scores)
    detail: dict[str, float] = {}
    total: float | None = 0.0
    for config, score in zip(rewards, scores, strict=True):
        for name, value in score.detail.items():
            if name in SCORER_FAULTS:
                detail[name] = detail.get(name, 0.0) + value
            else:
                detail[f"{config.display_name}.{name}" if len(rewards) > 1 else name] = value
        if score.reward is None:
            total = None
            continue
        if len(rewards) > 1:
            detail[config.display_name] = score.reward
        if total is not None:
            total += config.weight * score.reward
    failures = tuple(failure for score in scores for failure in score.failures)
    return ResponseScore(total, detail, seconds, failures)
