"""Totals of a run, from its metrics file: for the closing table and the head of the report."""

from dataclasses import dataclass, field
from statistics import fmean

from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.interface import SCORE_FAILURES
from megatron_async.telemetry.metrics import TRAINER_PHASES, first_accuracy, read_metrics

_ESS = "off_policy/ess"  # raw, per token (docs/semantics.md section 4: "ESS" alone)
_MOST_AVERAGED = 5


@dataclass(frozen=True)
class RunSummary:
    """Totals of one run. Shares are of trained sequences or tokens; times are seconds.

    `rewards`: the mean at the start and at the end, of up to five steps each.
    """

    steps: int
    accuracy_first: float | None
    accuracy_last: float | None
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
        return [
            (f"held-out accuracy {start}", percent(self.accuracy_first)),
            ("held-out accuracy after RL", percent(self.accuracy_last)),
            ("mean reward at the start / at the end", rewards or "not measured"),
            ("failed scores", self.failures),
            ("RL steps", str(self.steps)),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("generation, tokens/s", f"{self.generation_tokens_per_second:,.0f}"),
            ("training, tokens/s", f"{self.training_tokens_per_second:,.0f}"),
            ("resumed trajectories", percent(self.resumed_share)),
            ("token lag, mean / largest", f"{self.lag_mean:.2f} / {self.lag_max}"),
            ("ESS (raw, per token)", "-" if self.ess is None else f"{self.ess:.3f}"),
        ]


def percent(value: float | None) -> str:
    """A share as text."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def summarise(directory: RunDirectory) -> RunSummary:
    """Read the surviving lineage of a run's metrics."""
    train = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in train)

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
        accuracy_first=first_accuracy(evaluations[0]) if evaluations else None,
        accuracy_last=first_accuracy(evaluations[-1]) if len(evaluations) > 1 else None,
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
