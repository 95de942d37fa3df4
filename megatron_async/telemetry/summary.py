"""Computes the totals of a run from its metrics file, for the closing table and the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.interface import SCORE_FAILURES
from megatron_async.telemetry.metrics import (
    TRAINER_PHASES,
    evaluated_sets,
    read_all_metrics,
    read_metrics,
    sampling_name,
)

# Effective sample size. Without further words it means the raw one (before truncation) per token
# (docs/semantics.md section 4).
_ESS = "off_policy/ess"
_MAX_AVERAGED = 5


@dataclass(frozen=True)
class Measured:
    """Results of one evaluation of one set, with the settings on which they depend.

    Attributes:
        step: Number of the policy version that was evaluated.
        temperature: Sampling temperature; 0 for greedy responses.
        reward_max: Largest reward.
        solved_at: Reward from which a response counted as right.
        scored_by: Description of the rewards (`scoring.identity`).
    """

    step: int
    accuracy: float
    reward_mean: float
    reward_max: float
    temperature: float
    solved_at: float
    scored_by: str

    @classmethod
    def of(cls, line: Mapping[str, float], prefix: str) -> "Measured":
        """Return the results of one set from `line`, a line of metrics.jsonl about an evaluation.
        The set's metrics begin with `prefix`."""
        names = ("accuracy", "reward_mean", "reward_max", "temperature", "solved_at")
        numbers = {name: line[f"{prefix}/{name}"] for name in names}
        return cls(step=int(line["step"]), scored_by=str(line["scored_by"]), **numbers)

    @property
    def shown_accuracy(self) -> str:
        """Accuracy as text. If no response could count as right, because no reward has reached
        `eval.solved_at`, the text says so."""
        if 0 < self.reward_max < self.solved_at:
            return f"{percent(self.accuracy)}: no reward reached eval.solved_at {self.solved_at:g}"
        return percent(self.accuracy)

    def changes(self, later: "Measured") -> list[str]:
        """Return texts about the settings that differ between this evaluation and a later one, so
        that their accuracies cannot be compared."""
        settings = (
            ("eval.solved_at", f"{self.solved_at:g}", f"{later.solved_at:g}"),
            ("sampling", sampling_name(self.temperature), sampling_name(later.temperature)),
            ("reward", self.scored_by, later.scored_by),
        )
        return [f"{name} was {was}, is {now}" for name, was, now in settings if was != now]


@dataclass(frozen=True)
class EvaluatedSet:
    """First and last evaluation of an evaluation set. `last` is None if there was only one
    evaluation."""

    name: str
    first: Measured
    last: Measured | None

    def facts(self, start: str) -> list[tuple[str, str]]:
        """Return the set's accuracy and mean reward, before and after training, as pairs of name
        and text.

        If settings of the evaluation have changed in between, the changes are returned in place of
        the first accuracy.

        Args:
            start: Words for the time of the first evaluation.
        """
        first, last = self.first, self.last
        accuracy, reward = first.shown_accuracy, f"{first.reward_mean:.3f}"
        if last is not None and (changes := first.changes(last)):
            accuracy = f"not comparable: {'; '.join(changes)}"
            reward = reward if first.scored_by == last.scored_by else "not comparable"
        sampling = sampling_name(first.temperature)
        facts = [(f"{self.name} accuracy {start} ({sampling})", accuracy)]
        if last is None:
            return [*facts, (f"{self.name} mean reward {start}", reward)]
        sampling = sampling_name(last.temperature)
        return [
            *facts,
            (f"{self.name} accuracy after RL ({sampling})", last.shown_accuracy),
            (f"{self.name} mean reward {start} / after RL", f"{reward} / {last.reward_mean:.3f}"),
        ]


@dataclass(frozen=True)
class RunSummary:
    """Totals of one run. Times are in seconds.

    Attributes:
        steps: Number of trained steps, without steps that a resume abandoned.
        resumed_share: Share of the trained responses that were resumed after an interruption.
        ess: Raw effective sample size per token; None if not measured.
        rewards: Mean training reward at the start and at the end, over up to five steps each.
    """

    steps: int
    evaluated: tuple[EvaluatedSet, ...]
    generated_tokens: int
    generation_tokens_per_second: float
    training_tokens_per_second: float
    resumed_share: float
    lag_mean: float
    lag_max: int
    ess: float | None
    rewards: tuple[float, ...] = ()
    scores: int = 0
    failed_scores: int = 0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> str:
        """Text with the number of failed scores and the number of all scores."""
        return f"{self.failed_scores:,} of {self.scores:,}" if self.scores else "not measured"

    def facts(self, start: str = "at the start") -> list[tuple[str, str]]:
        """Return every total as a pair of name and text.

        Args:
            start: Words for the time of the first evaluation.
        """
        rewards = " / ".join(f"{reward:.3f}" for reward in self.rewards)
        evaluated = [fact for results in self.evaluated for fact in results.facts(start)]
        evaluated = evaluated or [("held-out accuracy", "not measured")]
        return [
            *evaluated,
            ("mean training reward (sampled), first / last steps", rewards or "not measured"),
            ("failed scores", self.failures),
            ("RL steps", str(self.steps)),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("generation, tokens/s", f"{self.generation_tokens_per_second:,.0f}"),
            ("training, tokens/s", f"{self.training_tokens_per_second:,.0f}"),
            ("resumed trajectories", percent(self.resumed_share)),
            ("token lag, mean / largest", f"{self.lag_mean:.2f} / {self.lag_max}"),
            ("ESS (raw, per token)", "-" if self.ess is None else f"{self.ess:.3f}"),
        ]


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.1f} %"


def _evaluated(lines: Sequence[Mapping[str, float]]) -> Iterator[EvaluatedSet]:
    """Generate an `EvaluatedSet` for every evaluation set of a run. `lines` are the lines of
    metrics.jsonl about evaluations, in the order of steps."""
    sets: dict[str, list[Measured]] = {}
    for line in lines:
        for name, prefix in evaluated_sets(line).items():
            sets.setdefault(name, []).append(Measured.of(line, prefix))
    for name, found in sets.items():
        yield EvaluatedSet(name, found[0], found[-1] if len(found) > 1 else None)


def summarize(directory: RunDirectory) -> RunSummary:
    """Compute the totals of the run in `directory`.

    A resume continues from a checkpoint and abandons the steps that were trained after it.
    Abandoned steps count in the generated tokens, the two rates in tokens per second, the numbers
    of scores and of failed scores, and the seconds of each phase. They do not count in all other
    values, including the number of steps.
    """
    train = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    written = read_all_metrics(directory.metrics_file)

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in written)

    def weighted(name: str, weight: str = "train/trained_tokens") -> float:
        lines = [line for line in train if name in line]
        weights = [line.get(weight, 1.0) for line in lines]
        return fmean([line[name] for line in lines], weights) if sum(weights) else 0.0

    rewards = [line["rollout/reward_mean"] for line in train if "rollout/reward_mean" in line]
    end = max(1, min(_MAX_AVERAGED, len(rewards) // 2))
    generating = total("rollout/seconds")
    training = total("time/train")
    return RunSummary(
        steps=len(train),
        evaluated=tuple(_evaluated(evaluations)),
        generated_tokens=int(total("rollout/tokens")),
        generation_tokens_per_second=total("rollout/tokens") / generating if generating else 0.0,
        training_tokens_per_second=total("train/tokens") / training if training else 0.0,
        resumed_share=weighted("rollout/resumed_share", "rollout/trajectories"),
        lag_mean=weighted("rollout/lag_mean"),
        lag_max=int(max((line["rollout/lag_max"] for line in train), default=0)),
        ess=weighted(_ESS) if any(_ESS in line for line in train) else None,
        rewards=(fmean(rewards[:end]), fmean(rewards[-end:])) if rewards else (),
        scores=int(total("rollout/scores")),
        failed_scores=int(sum(total(f"rollout/{name}") for name in SCORE_FAILURES.values())),
        seconds_by_phase={phase: total(name) for phase, name in TRAINER_PHASES},
    )
