"""Defines the protocol of an object that scores responses, and the names of scoring failures.

Invariants
- A failed score has the reward 0 or, if the settings choose so for its kind of failure, `None` to
  drop the trajectory (see `jobs`). The details of the score contain the kind of failure, which
  metrics count, so that no failure goes unnoticed.
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
"""Kinds of failed scores. Maps the key of a kind, which counts it in a score's details, to the name
of the metric that sums these counts."""
SCORER_FAULTS: Final = MappingProxyType({**SCORE_FAILURES, "stray_output": "scorer_stray_output"})
"""`SCORE_FAILURES` and, in the same form, `stray_output`, a fault that leaves the score valid.

`stray_output` counts packets on the scorer process's reply socket that were not replies."""

CONVERSATIONS: Final = "conversations"
"""Key of a prompt's payload; its value has, for each response, its episode's list of messages."""
COST: Final = "cost"
"""Name of the score component with the price paid to a service for a score; metrics sum it."""

# (reward, components). The reward is None if the scorer failed and the trajectory is to be dropped.
# The components are named numbers for metrics.
Score = tuple[float | None, dict[str, float]]


@dataclass(frozen=True)
class ResponseScore:
    """The score of one response.

    Attributes:
        reward: The reward; None if the scorer failed and the trajectory is to be dropped.
        detail: Named numbers for metrics: the components that the reward returned (the built-in
            rewards for text return `score`, 0 to 1, and `answered`, 1 if the text contains an
            answer), and a count for each fault in `SCORER_FAULTS` that occurred.
        seconds: Time that the scorer took; 0 if it was not measured.
        failures: One error message for each reward that failed.
    """

    reward: float | None
    detail: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failures: tuple[str, ...] = ()


class NoScorers:
    """Gives every response the score 0, for runs whose environment gives all rewards.

    It implements `Scorers` without any process.
    """

    size = ScorerCount(0)
    failures: Mapping[str, str] = MappingProxyType({})

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """Return a reward of 0 without details, whatever the response."""
        return 0.0, {}

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """Return a reward of 0 without details for each of the responses."""
        return [(0.0, {}) for _ in responses]


class Scorers(Protocol):
    """Scores finished responses; every score has a time limit."""

    @property
    def size(self) -> ScorerCount:
        """Number of scorers, and mean time of one score."""

    @property
    def failures(self) -> Mapping[str, str]:
        """First error message of each kind of failure, by the metric that counts the kind."""

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """Score one response to `prompt`, given as token IDs; return its reward and details.

        The reward is None if scoring failed and the trajectory is to be dropped.
        """

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """Score several responses to one prompt together; return reward and details of each.

        Rewards with the setting `group: true` see all responses of the group in one call.
        """
