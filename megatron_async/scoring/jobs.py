"""Work for a scorer, and how its replies become scores: pure functions.

Invariants
- A score that timed out, whose process died twice or whose service is unavailable follows
  `task.on_scorer_timeout`; one whose reward raised or returned no finite number is 0. Each kind
  is counted in the score's `detail` (`SCORER_FAULTS`).
- The sum of several rewards has none of its own failures: it failed when one of them did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.scoring.interface import CONVERSATIONS, SCORER_FAULTS, ResponseScore


@dataclass(frozen=True)
class ScoreJob:
    """Score these responses to one prompt by one reward (its place in the settings).

    A scorer process gets it as JSON.
    """

    part: int
    payload: Mapping[str, Any]
    texts: tuple[str, ...]


def split(
    settings: ScorerSettings, payload: Mapping[str, Any], texts: Sequence[str]
) -> list[ScoreJob]:
    """All work that the score of some responses takes, reward by reward."""
    work = []
    for number, part in enumerate(settings.parts):
        size = len(texts) if part.group else 1
        for start in range(0, len(texts), size or 1):
            piece = slice(start, start + size)
            work.append(ScoreJob(number, _of_texts(payload, piece), tuple(texts[piece])))
    return work


def _of_texts(payload: Mapping[str, Any], piece: slice) -> Mapping[str, Any]:
    """The payload with the conversations of some responses alone."""
    if CONVERSATIONS not in payload:
        return payload
    return {**payload, CONVERSATIONS: payload[CONVERSATIONS][piece]}


def scores_of(
    settings: ScorerSettings, reply: Mapping[str, Any], work: ScoreJob, seconds: float
) -> list[ResponseScore]:
    """A scorer's reply as one score for each response."""
    if "error" in reply:
        fault = "scorer_unavailable" if "unavailable" in reply else "scorer_error"
        return failed(settings, fault, work, seconds, reply["error"])
    return [ResponseScore(value, parts, seconds) for value, parts in reply["scores"]]


def failed(
    settings: ScorerSettings, fault: str, work: ScoreJob, seconds: float, why: object = None
) -> list[ResponseScore]:
    """No score, for the reason that `fault` counts."""
    zero = fault == "scorer_error" or settings.task.on_scorer_timeout == "zero"
    part = settings.parts[work.part]
    if fault == "scorer_timeout":
        why = f"no score within {settings.limit_seconds(part):g} s (its timeout_seconds)"
    reward, failures = 0.0 if zero else None, (f"reward {part.display_name}: {why}",)
    return [ResponseScore(reward, {fault: 1.0}, seconds, failures) for _ in work.texts]


def combine_scores(
    settings: ScorerSettings, work: Sequence[ScoreJob], scores: Sequence[Sequence[ResponseScore]]
) -> list[ResponseScore]:
    """The weighted sum for each response; `work` is that of `split`, `scores` what came of it."""
    parts = settings.parts
    by_part: list[list[ResponseScore]] = [[] for _ in parts]
    for piece, found in zip(work, scores, strict=True):
        by_part[piece.part] += found
    return [_sum(parts, of_response) for of_response in zip(*by_part, strict=True)]


def _sum(parts: Sequence[RewardConfig], scores: Sequence[ResponseScore]) -> ResponseScore:
    seconds = sum(score.seconds for score in scores)
    detail: dict[str, float] = {}
    total: float | None = 0.0
    for part, score in zip(parts, scores, strict=True):
        for name, value in score.detail.items():
            if name in SCORER_FAULTS:
                detail[name] = detail.get(name, 0.0) + value
            else:
                detail[f"{part.display_name}.{name}" if len(parts) > 1 else name] = value
        if score.reward is None:
            total = None
            continue
        if len(parts) > 1:
            detail[part.display_name] = score.reward
        if total is not None:
            total += part.weight * score.reward
    failures = tuple(failure for score in scores for failure in score.failures)
    return ResponseScore(total, detail, seconds, failures)
