"""Settings of evaluation: sets of prompts by name, each with sampling of its own."""

import re
from dataclasses import dataclass

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.data import FileConfig
from megatron_async.config.rollout import SamplingConfig
from megatron_async.config.sampling_contract import (
    LARGEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    temperature_fits,
)

HELDOUT = "heldout"
"""The set of the training problems that are kept for evaluation."""
HELDOUT_SEED = 1_000_003
"""Seed of the held-out problems. It never changes, so that runs are evaluated on the same ones."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class EvalSet:
    """A set with everything settled. `prompts` 0: all that its file holds."""

    name: str
    prompts: int
    samples: int
    sampling: SamplingConfig

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 for greedy responses."""
        return 0.0 if self.sampling.top_k == 1 else self.sampling.temperature


class EvalSetConfig(FileConfig):
    """An evaluation set: a file and, where they differ from `eval`'s, its settings."""

    prompts: int = Field(0, ge=0)
    """Number of problems, drawn in an order that never changes; 0 = all."""
    samples: int | None = Field(None, ge=1)
    """Answers per problem."""
    temperature: float | None = None
    """0 = greedy; else 0.01 to 100."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus."""
    top_k: int | None = None
    """Top-k; -1 = off."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response."""

    def check(self) -> None:
        if not self.path:
            raise ValueError("an evaluation set needs a path")


class EvalConfig(Settings):
    """Evaluation on problems that training never sees."""

    prompts: int = Field(256, ge=0)
    """Number of held-out problems; 0 = all that the files of the task hold."""
    temperature: float = 0.0
    """0 = greedy; else 0.01 to 100."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus."""
    top_k: int = -1
    """Top-k; -1 = off."""
    max_new_tokens: int = Field(0, ge=0)
    """Longest response; 0 = sampling.max_new_tokens."""
    samples: int = Field(1, ge=1)
    """Answers per problem: accuracy is their mean; pass@k and maj@k."""
    solved_at: float = 1.0
    """Reward from which on a response counts as right; accuracy is the share of such responses.
    Lower it for a shaped reward, which may never reach 1, or compare mean rewards."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Sets with files of their own, by the names that their metrics get."""
    every_steps: int = Field(0, ge=0)
    """Also during training; 0 = only at its ends."""
    blocking: bool | None = None
    """Whether training waits for evaluations on the way, so that each measures one version; false:
    they run beside it, and responses under way go on with newer weights. none = true where the
    schedule drains its requests or engines are colocated. At both ends of a run training waits."""
    save_samples: int = Field(32, ge=0)
    """Problems of each set whose responses are kept in `evaluations/`."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Limit of one evaluation: past it, one beside training is given up with a warning, one that
    training waits for ends the run."""

    def check(self) -> None:
        named: dict[str, EvalConfig | EvalSetConfig] = {"eval": self}
        named |= {f"eval.sets.{name}": one for name, one in self.sets.items()}
        for where, one in named.items():
            if one.temperature and not temperature_fits(one.temperature):
                raise ValueError(
                    f"{where}.temperature must be 0 (greedy) or lie between "
                    f"{LEAST_TEMPERATURE:g} and {LARGEST_TEMPERATURE:g}, got {one.temperature:g}"
                )
            if one.top_k is not None and one.top_k != -1 and one.top_k < 2:
                raise ValueError(
                    f"{where}.top_k must be -1 (off) or at least 2 (greedy: temperature 0), "
                    f"got {one.top_k}"
                )
        for name in self.sets:
            if name in (HELDOUT, "held-out") or not _NAME.fullmatch(name):
                raise ValueError(
                    f"eval.sets has the name {name!r}; a name is of letters, digits, '_', '-' and "
                    f"'.', 100 at most, and not {HELDOUT!r}"
                )

    def files(self) -> dict[str, tuple[str, FileConfig]]:
        """(setting, file) of each set that has a file of its own."""
        return {name: (f"eval.sets.{name}.path", one) for name, one in self.sets.items()}

    def resolved_sets(self, sampling: SamplingConfig, *, heldout: bool) -> list[EvalSet]:
        """All sets; `heldout`: training keeps problems for evaluation."""
        found = []
        if heldout:
            sampled = self._sampled(None, sampling)
            found.append(EvalSet(HELDOUT, self.prompts, self.samples, sampled))
        for name, one in self.sets.items():
            samples, sampled = one.samples or self.samples, self._sampled(one, sampling)
            found.append(EvalSet(name, one.prompts, samples, sampled))
        return found

    def _sampled(self, one: EvalSetConfig | None, training: SamplingConfig) -> SamplingConfig:
        def of(name: str) -> float:
            value = getattr(one, name, None)
            return float(getattr(self, name) if value is None else value)

        temperature = of("temperature")
        return SamplingConfig(
            temperature=temperature or 1.0,
            top_k=int(of("top_k")) if temperature else 1,
            top_p=of("top_p") if temperature else 1.0,
            max_new_tokens=int(of("max_new_tokens")) or training.max_new_tokens,
            allow_biased_behavior=True,
        )
