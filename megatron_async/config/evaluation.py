"""Settings of evaluation: named sets of prompts, each with its own sampling."""

import re
from dataclasses import dataclass

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.data import FileConfig
from megatron_async.config.rollout import SamplingConfig
from megatron_async.config.sampling_contract import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    temperature_fits,
)

HELDOUT = "heldout"
"""Name of the set of held-out problems of the task."""
HELDOUT_SEED = 1_000_003
"""Seed of the held-out problems. It never changes, so that all runs are evaluated on the same
problems."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class EvalSet:
    """An evaluation set with a value for every setting. A setting that the set does not have gets
    its value from section `eval`.

    `prompts` is the number of problems; 0 = all problems of the set.
    """

    name: str
    prompts: int
    samples: int
    sampling: SamplingConfig

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 for greedy responses."""
        return 0.0 if self.sampling.top_k == 1 else self.sampling.temperature


class EvalSetConfig(FileConfig):
    """An evaluation set with its own file. Settings that are none have the value in section
    `eval`."""

    prompts: int = Field(0, ge=0)
    """Number of problems, drawn in a fixed order; 0 = all."""
    samples: int | None = Field(None, ge=1)
    """Number of responses per problem."""
    temperature: float | None = None
    """Sampling temperature: 0 (greedy), or 0.01 to 100."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling: smallest total probability of the tokens to sample from."""
    top_k: int | None = None
    """Number of most probable tokens to sample from; -1 = all."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response, in tokens."""

    def check(self) -> None:
        if not self.path:
            raise ValueError("an evaluation set has no path; set one")


class EvalConfig(Settings):
    """Evaluation on problems that are never trained on."""

    prompts: int = Field(256, ge=0)
    """Number of held-out problems to evaluate on; 0 = all held-out problems of the task's files."""
    temperature: float = 0.0
    """Sampling temperature: 0 (greedy), or 0.01 to 100."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: smallest total probability of the tokens to sample from."""
    top_k: int = -1
    """Number of most probable tokens to sample from; -1 = all."""
    max_new_tokens: int = Field(0, ge=0)
    """Longest response, in tokens; 0 = sampling.max_new_tokens."""
    samples: int = Field(1, ge=1)
    """Number of responses per problem. Accuracy is the mean over all of them; with several there
    are also pass@k and maj@k."""
    solved_at: float = 1.0
    """Smallest reward with which a response counts as right; accuracy is the share of such
    responses. Lower it for a shaped reward that may never reach 1, or compare mean rewards."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Evaluation sets with their own files. The key of a set is its name in metrics."""
    every_steps: int = Field(0, ge=0)
    """Number of steps between evaluations during training; 0 = only at the start and the end."""
    blocking: bool | None = None
    """Whether training waits for each evaluation, so that one policy version generates all its
    responses. With false, an evaluation runs concurrently with training, and its running responses
    continue with newer weights. none = true if `schedule.boundary` is drain or pause, or if engines
    are colocated, otherwise false. Training always waits for the evaluations at its start and
    end."""
    save_samples: int = Field(32, ge=0)
    """Number of problems of each set whose responses are saved in `evaluations/`."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Time limit of one evaluation, in seconds. An evaluation that exceeds it is abandoned with a
    warning if it runs concurrently with training, and ends the run if training waits for it."""

    def check(self) -> None:
        named: dict[str, EvalConfig | EvalSetConfig] = {"eval": self}
        named |= {f"eval.sets.{name}": one for name, one in self.sets.items()}
        for where, one in named.items():
            if one.temperature and not temperature_fits(one.temperature):
                raise ValueError(
                    f"{where}.temperature must be 0 (greedy) or lie between "
                    f"{MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}, got {one.temperature:g}"
                )
            if one.top_k is not None and one.top_k != -1 and one.top_k < 2:
                raise ValueError(
                    f"{where}.top_k must be -1 (all tokens) or at least 2 (greedy: temperature 0), "
                    f"got {one.top_k}"
                )
        for name in self.sets:
            if name in (HELDOUT, "held-out") or not _NAME.fullmatch(name):
                raise ValueError(
                    f"eval.sets has the name {name!r}; a name consists of at most 100 letters, "
                    f"digits, '_', '-' and '.', and is not {HELDOUT!r}"
                )

    def files(self) -> dict[str, tuple[str, FileConfig]]:
        """Return, for each set with its own file, the name of the setting and the file."""
        return {name: (f"eval.sets.{name}.path", one) for name, one in self.sets.items()}

    def resolved_sets(self, sampling: SamplingConfig, *, heldout: bool) -> list[EvalSet]:
        """Return all evaluation sets, each with a value for every setting.

        Args:
            sampling: The sampling of training, for the default response length.
            heldout: Whether the task holds out problems, which are then the first set.
        """
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
