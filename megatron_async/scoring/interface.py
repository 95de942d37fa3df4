"""The protocol of a run's scorers, and the names of their faults.

Invariants
- A score that failed has the reward `None`, or the reward that the settings give it, and counts its
  fault in its parts: no fault is silent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.trajectory.types import Prompt

SCORE_FAILURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "scorer_error": "scorer_errors",
        "scorer_timeout": "scorer_timeouts",
        "scorer_crash": "scorer_crashes",
        "scorer_unavailable": "scorer_unavailable",
    }
)
"""How a score can fail: the part of it that counts that, the metric that adds it up."""
SCORER_FAULTS: Final = MappingProxyType({**SCORE_FAILURES, "stray_output": "scorer_stray_output"})
"""The same, and what a scorer does wrong although the score has come."""

CONVERSATIONS: Final = "conversations"
"""The key of a payload under which the messages of each response's episode are."""
COST: Final = "cost"
"""The part of a score that is money: added up in the metrics."""

# A reward, None when the scorer failed and that is not a 0, and its named parts.
Score = tuple[float | None, dict[str, float]]


@dataclass(frozen=True)
class ResponseScore:
    """The score of one response. `reward` is `None` when the scorer failed and that is not a 0.

    `detail` holds numbers for metrics: `score` (the scorer's own, 0-1), `answered` (an answer was
    found in the text), and one of `SCORER_FAULTS` where it happened. `seconds`: what it took the
    scorer, 0 = not measured. `failures`: a line for each reward that has failed.
    """

    reward: float | None
    detail: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failures: tuple[str, ...] = ()


class NoScorers:
    """Scores nothing: the environment gives all rewards (implements `Scorers`)."""

    size = ScorerCount(0)
    failures: Mapping[str, str] = MappingProxyType({})

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """A reward of 0."""
        return 0.0, {}

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """A reward of 0 for each."""
        return [(0.0, {}) for _ in responses]


class Scorers(Protocol):
    """Scores finished responses; every score is limited in time."""

    @property
    def size(self) -> ScorerCount:
        """Return the number of scorers, and the time of a score."""

    @property
    def failures(self) -> Mapping[str, str]:
        """Return the first failure of each kind, by the metric that counts it."""

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """Reward and details; `None` when it failed and that is not a 0."""

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """The same for several responses to one prompt at once."""
