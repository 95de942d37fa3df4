"""Provides rules that detect, from the metrics of a step, that a run learns nothing or the wrong
thing.

The rules in `GUIDE` are those of verl's guide to rollout correction (docs/algo/rollout_corr.md,
"conditional alerting"). `telemetry.health` emits a warning once when the condition of its rule
starts to hold.

Invariants
- A rule is not evaluated at a step that lacks one of its metrics.
- Every message ends with what to do.
- The thresholds of the other rules are assumed, because no source gives them.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatron_async.scoring.interface import SCORE_FAILURES
from megatron_async.weight_sync.verify import GROSS_FACTOR

ZERO_REWARD_STEPS: Final = 5
"""Number of consecutive steps without a reward above 0 after which the warning is emitted."""
ESS_STEPS: Final = 3
"""Number of consecutive steps with a low effective sample size after which the warning is
emitted."""
ESS_FLOOR: Final = 0.3
"""Raw effective sample size per token, as a share of the tokens, below which it counts as low."""
AT_BOUND_STEPS: Final = 3
"""Number of consecutive steps at the staleness bound after which the warning is emitted."""
AT_BOUND_SHARE: Final = 0.8
"""Smallest mean lag, as a share of the staleness bound, with which a step counts as being at the
bound."""
UNREACHED_STEPS: Final = 5
"""Number of trained steps without a reward of at least `eval.solved_at` after which the warning is
emitted. With an evaluation, one step is enough."""
NEWEST_SCORES: Final = 200
"""Number of newest scores among which failures are counted."""
FAILED_SHARES: Final = (0.01, 0.1)
"""Shares of failures of one kind among the newest scores. A warning is emitted at the first share,
and another one at the second."""
_REMEDIES: Final = {
    "scorer_errors": "try the reward separately (`megatron-async reward`) and repair it",
    "scorer_timeouts": "make the reward faster, or raise task.scorer_timeout_seconds",
    "scorer_crashes": "find out why its process ends, or raise scoring.memory_mib",
    "scorer_unavailable": "check the service, or lower the reward's concurrency",
}

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class LearningRule:
    """A rule: if a condition on the metrics holds for several steps in a row, a warning is emitted.

    Attributes:
        name: Name of the warning.
        needs: Metrics without which the rule is not evaluated.
        holds: Function that returns whether the condition holds for the metrics of a step.
        message: Function that returns the text of the warning for the metrics of a step.
        streak: Number of consecutive steps at which the condition must hold.
    """

    name: str
    needs: tuple[str, ...]
    holds: Callable[[Metrics], bool]
    message: Callable[[Metrics], str]
    streak: int = 1


PROBE: Final = "weights/probe_mean_error"
_TOO_FAR: Final = (
    "the data are too far off-policy; lower schedule.max_async_level, schedule.concurrency or "
    f"optimizer.lr (if {PROBE} is large too, engines and trainer differ: see docs/weights.md)"
)


def _guided(name: str, metric: str, low: float, high: float) -> LearningRule:
    """Return a rule of verl's guide. Its condition is that `metric` is below `low`, above `high`,
    or NaN."""
    healthy = f"between {low:g} and {high:g}"
    if math.isinf(low) or math.isinf(high):
        healthy = f"at least {low:g}" if math.isinf(high) else f"at most {high:g}"
    return LearningRule(
        name,
        (metric,),
        lambda m: not low <= m[metric] <= high,
        lambda m: f"{metric} is {m[metric]:.4g}, healthy is {healthy}: {_TOO_FAR}",
    )


GUIDE: Final = (
    _guided("mean_weight", "rollout_corr/rollout_is_mean", 0.5, 2.0),
    _guided("low_ess", "rollout_corr/rollout_is_eff_sample_size", 0.3, math.inf),
    _guided("weight_std", "rollout_corr/rollout_is_std", -math.inf, 1.0),
    _guided("kl", "rollout_corr/kl", -0.1, 0.1),
    _guided("chi2", "rollout_corr/chi2_token", -math.inf, 1.0),
)


def _equal_rewards(m: Metrics) -> bool:
    """Return whether all rewards of the batch are equal."""
    return m["reward/max"] == m["reward/min"]


_LOOK = "`megatron-async trajectories RUN_DIR --show ID` prints a response with its reward"

RULES: Final = (
    *GUIDE,
    LearningRule(
        "ess_collapse",
        ("off_policy/ess",),
        lambda m: not m["off_policy/ess"] >= ESS_FLOOR,
        lambda m: (
            f"the effective sample size is {m['off_policy/ess']:.2f} of the tokens, and was below "
            f"{ESS_FLOOR:g} for {ESS_STEPS} steps: {_TOO_FAR}"
        ),
        ESS_STEPS,
    ),
    LearningRule(
        "equal_rewards",
        ("reward/max", "reward/min"),
        _equal_rewards,
        lambda m: (
            f"all rewards of the batch are {m['reward/max']:g}, so no response is better than "
            f"another: check the scorer ({_LOOK}), or choose harder or easier problems"
        ),
    ),
    LearningRule(
        "no_informative_group",
        ("reward/max", "reward/min", "reward/uninformative_groups"),
        lambda m: m["reward/uninformative_groups"] == 1 and not _equal_rewards(m),
        lambda m: (
            "the rewards within every group of the batch are equal, so no group shows which "
            "response to its prompt is better: raise schedule.group_size or sampling.temperature, "
            "or choose problems that are solved sometimes"
        ),
    ),
    LearningRule(
        "zero_reward",
        ("reward/max",),
        lambda m: m["reward/max"] <= 0,
        lambda m: (
            f"no response of the last {ZERO_REWARD_STEPS} steps has a reward above 0: fine-tune "
            "first (`megatron-async sft`), choose easier problems, or check the scorer and what "
            "marks an answer: task.answer_marker, or `answer_marker` in the arguments of a "
            f"built-in reward ({_LOOK})"
        ),
        ZERO_REWARD_STEPS,
    ),
    LearningRule(
        "all_truncated",
        ("rollout/truncated_share", "rollout/response_length_max"),
        lambda m: m["rollout/truncated_share"] == 1,
        lambda m: (
            "every response of the batch was cut off at sampling.max_new_tokens "
            f"({m['rollout/response_length_max']:.0f} tokens): raise it, or find out why the model "
            "does not end its responses (task.chat_template, the tokenizer's end-of-text token)"
        ),
    ),
    LearningRule(
        "no_answer_found",
        ("rollout/answered_share",),
        lambda m: m["rollout/answered_share"] == 0,
        lambda m: (
            "the scorer found an answer in none of the responses: check task.answer_marker and "
            f"what task.prompt_template asks for ({_LOOK})"
        ),
    ),
    LearningRule(
        "ratio_drift",
        ("weights/probe_drift", PROBE),
        lambda m: m["weights/probe_drift"] > GROSS_FACTOR,
        lambda m: (
            "log-probs of tokens that an engine has just sampled differ from the trainer's by "
            f"{m[PROBE]:.2g} on average, {m['weights/probe_drift']:.0f} times "
            "what was usual: an engine with other settings or a numerical fault looks like this; "
            "look at its log, and set weights.probe_tolerance to stop at such an error"
        ),
    ),
)


def lag_at_bound(bound: int) -> LearningRule:
    """Return the rule that warns if the data are nearly as stale as the staleness bound permits,
    because generation is too far ahead of training.

    It holds if the largest lag has reached the staleness bound and, in addition, the mean lag is
    near the bound or data were dropped or masked because of the bound.

    Args:
        bound: The setting schedule.max_async_level.
    """

    def holds(m: Metrics) -> bool:
        lost = sum(m.get(f"rollout/{name}", 0) for name in ("dropped_stale", "stale_masked_tokens"))
        mean_is_near = m["rollout/lag_mean"] >= AT_BOUND_SHARE * bound
        return m["rollout/lag_max"] >= bound and (mean_is_near or lost > 0)

    return LearningRule(
        "lag_at_bound",
        ("rollout/lag_mean", "rollout/lag_max"),
        holds,
        lambda m: (
            f"for {AT_BOUND_STEPS} steps the mean lag was {m['rollout/lag_mean']:.2f} with "
            f"schedule.max_async_level {bound}, or data were dropped as stale: generation runs too "
            "far ahead; lower schedule.concurrency or schedule.max_waiting_batches, or give the "
            "trainer more of the machine"
        ),
        AT_BOUND_STEPS,
    )


def batch_size_changed(before: float) -> LearningRule:
    """Return the rule that warns if batches have another number of trajectories than `before`, the
    number before the resume."""
    return LearningRule(
        "batch_size_changed",
        ("rollout/trajectories",),
        lambda m: m["rollout/trajectories"] != before,
        lambda m: (
            f"the batch has {m['rollout/trajectories']:.0f} trajectories; batches before the "
            f"resume had {before:.0f}, for which the learning rate was chosen. Scale optimizer.lr, "
            "or set schedule.groups_per_batch and schedule.group_size as they were"
        ),
    )


class LearningWatch:
    """Checks the metrics of every step against the rules, and counts for how many steps in a row
    each rule has held."""

    def __init__(self, bound: int | None = None, before: Metrics | None = None) -> None:
        """Choose the rules that apply to the run; none of them has held at any step yet.

        Args:
            bound: The setting schedule.max_async_level; None or 0 means no staleness bound.
            before: Metrics of the last step before a resume; None at a new run.
        """
        rules = list(RULES)
        if bound:
            rules.append(lag_at_bound(bound))
        if before and "rollout/trajectories" in before:
            rules.append(batch_size_changed(before["rollout/trajectories"]))
        self._rules = rules
        self._streaks = dict.fromkeys((rule.name for rule in rules), 0)

    def step(self, metrics: Metrics) -> list[tuple[str, str]]:
        """Check a step's metrics; return name and message of each rule that holds and has held for
        at least `LearningRule.streak` steps in a row."""
        found = []
        for rule in self._rules:
            if not all(name in metrics for name in rule.needs):
                continue
            holds_now = rule.holds(metrics)
            self._streaks[rule.name] = self._streaks[rule.name] + 1 if holds_now else 0
            if holds_now and self._streaks[rule.name] >= rule.streak:
                found.append((rule.name, rule.message(metrics)))
        return found

    def unmeasured(self, metrics: Metrics) -> frozenset[str]:
        """Return the names of the rules that cannot be evaluated, because `metrics` lacks a
        metric."""
        return frozenset(
            rule.name for rule in self._rules if not all(name in metrics for name in rule.needs)
        )


class UnreachedThreshold:
    """Emits one warning if no reward of the run has reached `eval.solved_at`, the reward from which
    a response counts as right.

    Rewards of training and of evaluations count. A run without any positive reward gets the warning
    `zero_reward` instead.

    Args:
        solved_at: The setting `eval.solved_at`; None if the run does not use it, because it has
            neither evaluations nor difficulty pools.
        before: Metrics of the steps that were trained before a resume.
        evaluated: Largest rewards of the evaluations before a resume.
    """

    def __init__(
        self,
        solved_at: float | None,
        before: Iterable[Metrics] = (),
        evaluated: Iterable[float] = (),
    ) -> None:
        self._solved_at = solved_at
        self._steps = 0
        self._largest = max(evaluated, default=-math.inf)
        for metrics in before:
            self._count(metrics)

    def _count(self, metrics: Metrics) -> None:
        """Count a trained step, and keep the step's largest reward if no earlier reward is
        larger."""
        if "reward/max" in metrics:
            self._steps += 1
            self._largest = max(self._largest, metrics["reward/max"])

    def trained(self, metrics: Metrics) -> list[tuple[str, str]]:
        """Record the metrics of a trained step; return name and message of the warning if it is
        due."""
        self._count(metrics)
        return self._warnings(UNREACHED_STEPS)

    def evaluated(self, reward_max: float) -> list[tuple[str, str]]:
        """Record the largest reward of an evaluation; return name and message of the warning if it
        is due."""
        self._largest = max(self._largest, reward_max)
        return self._warnings(1)

    def _warnings(self, steps: int) -> list[tuple[str, str]]:
        """Return name and message of the warning if at least `steps` steps were trained and no
        reward has reached the threshold; otherwise an empty list."""
        solved_at = self._solved_at
        if solved_at is None or self._steps < steps or not 0 < self._largest < solved_at:
            return []
        self._solved_at = None  # The warning is emitted only once.
        return [
            (
                "eval_solved_at_unreached",
                f"no reward so far has reached eval.solved_at {solved_at:g} (the largest is "
                f"{self._largest:.3g}), so that every response counts as wrong: set eval.solved_at "
                "to the reward of a right response, or compare mean rewards instead of accuracy",
            )
        ]


class FailingScores:
    """Counts failures among the newest scores. It warns about each kind of failure when it occurs
    in 1 % of them, and again at 10 %."""

    def __init__(self) -> None:
        self._newest: deque[set[str]] = deque(maxlen=NEWEST_SCORES)
        self._levels: Counter[str] = Counter()

    def scored(
        self, detail: Mapping[str, float], first: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Record a score; generate name and message of each new warning about failures.

        Args:
            detail: The score's components by name. If the score has failed, a component has the
                name of the failure.
            first: For each kind of failure, a description of the first one.
        """
        self._newest.append({SCORE_FAILURES[name] for name in detail.keys() & SCORE_FAILURES})
        if not self._newest[-1] and not self._levels.total():
            return
        for kind, remedy in _REMEDIES.items():
            count = sum(kind in failed for failed in self._newest)
            level = sum(count >= share * NEWEST_SCORES for share in FAILED_SHARES)
            if level > self._levels[kind]:
                seen = f"{count} of the last {len(self._newest)} scores have failed"
                cause = first.get(kind, "an unrecorded cause")
                name = kind if level == 1 else f"many_{kind}"
                yield name, f"{seen}, the first by {cause}; {remedy}"
            self._levels[kind] = max(level, self._levels[kind]) if count else 0
