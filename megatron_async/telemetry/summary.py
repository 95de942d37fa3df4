"""Totals of a run, from its metrics file: for the closing table and the head of the report."""

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

_ESS = "off_policy/ess"  # raw, per token (docs/semantics.md section 4: "ESS" alone)
_MOST_AVERAGED = 5


@dataclass(frozen=True)
class Measured:
    """Results of one evaluation of one set, with the settings that they depend on.

    Attributes:
        temperature: sampling temperature; 0 for greedy responses.
        reward_max: largest reward.
        solved_at: reward from which on a response counted as right.
        scored_by: description of the rewards (`scoring.identity`).
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
        """Read the set whose metrics begin with `prefix` from a line of an evaluation."""
        names = ("accuracy", "reward_mean", "reward_max", "temperature", "solved_at")
        numbers = {name: line[f"{prefix}/{name}"] for name in names}
        return cls(step=int(line["step"]), scored_by=str(line["scored_by"]), **numbers)

    @property
    def shown_accuracy(self) -> str:
        """The accuracy, with the reason if no response could count as right."""
        if 0 < self.reward_max < self.solved_at:
            return f"{percent(self.accuracy)}: no reward reached eval.solved_at {self.solved_at:g}"
        return percent(self.accuracy)

    def changes(self, later: "Measured") -> list[str]:
        """List what makes accuracies of this evaluation and a later one incomparable."""
        settings = (
            ("eval.solved_at", f"{self.solved_at:g}", f"{later.solved_at:g}"),
            ("sampling", sampling_name(self.temperature), sampling_name(later.temperature)),
            ("reward", self.scored_by, later.scored_by),
        )
        return [f"{name} was {was}, is {now}" for name, was, now in settings if was != now]


@dataclass(frozen=True)
class EvaluatedSet:
    """First and last evaluation of a set; `last` is None if there was only one."""

    name: str
    first: Measured
    last: Measured | None

    def facts(self, start: str) -> list[tuple[str, str]]:
        """Return name and text of each total; `start` names the time of the first evaluation.

        A first value that cannot be compared with the last one is replaced by the reason.
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
    """Totals of one run. Shares are of trained sequences or tokens; times are seconds.

    `rewards`: the mean at the start and at the end, of up to five steps each.
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
        """Number of scores that have failed, in words."""
        return f"{self.failed_scores:,} of {self.scores:,}" if self.scores else "not measured"

    def facts(self, start: str = "at the start") -> list[tuple[str, str]]:
        """Name and text of each total; `start`: what the first evaluation is called."""
        rewards = " / ".join(f"{reward:.3f}" for reward in self.rewards)
        evaluated = [fact for one in self.evaluated for fact in one.facts(start)]
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
    """Format a share."""
    return f"{100 * value:.1f} %"


def _evaluated(lines: Sequence[Mapping[str, float]]) -> Iterator[EvaluatedSet]:
    """Yield every set of a run's evaluations, which are in order of their steps."""
    sets: dict[str, list[Measured]] = {}
    for line in lines:
        for name, prefix in evaluated_sets(line).items():
            sets.setdefault(name, []).append(Measured.of(line, prefix))
    for name, found in sets.items():
        yield EvaluatedSet(name, found[0], found[-1] if len(found) > 1 else None)


def summarize(directory: RunDirectory) -> RunSummary:
    """Read counts and times of all steps of a run, and the rest of the surviving lineage."""
    train = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    written = read_all_metrics(directory.metrics_file)

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in written)

    def weighted(name: str, weight: str = "train/trained_tokens") -> float:
        known = [line for line in train if name in line]
        weights = [line.get(weight, 1.0) for line in known]
        return fmean([line[name] for line in known], weights) if sum(weights) else 0.0

    rewards = [line["rollout/reward_mean"] for line in train if "rollout/reward_mean" in line]
    end = max(1, min(_MOST_AVERAGED, len(rewards) // 2))
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
