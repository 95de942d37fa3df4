"""Do engines hold what the trainer sent, and sample from what their log-probs describe?

Pure checks of what engines report. SGLang accepts a tensor whose name it does not know and ignores
it, its checksums are over its own fused layout, so that a trainer cannot compute them, and some of
its settings change log-probs or sampling. Hence four checks, each of which catches what the others
cannot (docs/semantics.md section 5):

- every name that is sent belongs to a parameter that the engine has (`NameCheck.add`);
- every parameter that the engine has was sent (`NameCheck.finish`);
- all engines hold one version under one checksum (`agreed_checksum`, `disagreement`);
- tokens that an engine samples have ratio 1 under the trainer (`RatioCheck`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import FloatArray, PolicyVersion

_NAMED = 4
# Scales of quantized weights, and the rearranged copies that SGLang makes for some fp8 kernels.
_SCALES = re.compile(r"_?scale(_inv|_2)?(_shuffled|_swizzled|_deepgemm)?$")
_FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\."), ".experts.w2_"),
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)


def engine_parameter(name: str) -> str:
    """SGLang's parameter that holds the Hugging Face tensor `name` (fused QKV, gate/up, experts).

    >>> engine_parameter("model.layers.0.self_attn.k_proj.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def engine_parameters(checksum_answer: Mapping[str, Any]) -> frozenset[str]:
    """Parameter names in an engine's reply to `weights_checker` (all its ranks).

    None in a reply that is not of its form.
    """
    try:
        return frozenset(name for rank in checksum_answer["ranks"] for name in rank["checksums"])
    except (KeyError, TypeError):
        return frozenset()


class NameCheck:
    """Compares the names of one update with the parameters that the engines have."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._sent: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Add the names of tensors that are about to be sent.

        SGLang's checksums cover the product of an fp8 weight and its scale under the name of the
        weight, so the name of a scale is accepted if that of its weight is known.

        Raises:
            ComponentFailure: No engine would load a tensor of one of these names.
        """
        owners = {name: engine_parameter(name) for name in names}
        unknown = [
            name
            for name, owner in owners.items()
            if self._known.isdisjoint({name, owner, _SCALES.sub("", owner)})
        ]
        if unknown:
            raise ComponentFailure(
                f"the engines do not know {_listing(unknown)}: they would ignore it silently"
            )
        self._sent.update(owners.values())
        self._sent.update(owners)

    @property
    def sent(self) -> frozenset[str]:
        """Names of this update so far, and the engines' parameters that they belong to."""
        return frozenset(self._sent)

    def sent_before(self, names: Iterable[str]) -> None:
        """Add the names that another sender of the same update had in `sent`."""
        self._sent.update(names)

    def finish(self) -> None:
        """The update is complete. Raises ComponentFailure if a parameter was left out.

        Scales of quantized weights are made by the engine and not sent.
        """
        missing = [name for name in self._known - self._sent if _SCALES.search(name) is None]
        if missing:
            raise ComponentFailure(
                f"the update left out {_listing(missing)}, which the engines would keep as it was"
            )


@dataclass(frozen=True)
class HeldVersion:
    """Report of an engine about the version that it holds."""

    engine_id: str
    version: PolicyVersion
    checksum: str


def agreed_checksum(reports: Sequence[HeldVersion], version: PolicyVersion) -> str | None:
    """The checksum that most engines with `version` have; None where two are equally common."""
    counts = Counter(held.checksum for held in reports if held.version == version).most_common(2)
    clear = len(counts) == 1 or (len(counts) == 2 and counts[0][1] > counts[1][1])
    return counts[0][0] if clear else None


def disagreement(
    held: HeldVersion, reports: Sequence[HeldVersion], version: PolicyVersion, agreed: str | None
) -> str | None:
    """Return the reason if this engine does not hold `version` as agreed."""
    if held.version != version:
        return (
            f"engine {held.engine_id} reports version {held.version} after the update to {version}"
        )
    if held.checksum != agreed:
        listing = ", ".join(f"{other.engine_id}: {other.checksum[:16]}" for other in reports)
        return f"engines disagree on the weights of {version}: {listing}"
    return None


@dataclass(frozen=True)
class RatioError:
    """Mean and largest |engine - trainer| log-prob over the tokens that an engine sampled."""

    mean: float
    largest: float

    @classmethod
    def of(cls, engine_N: FloatArray, trainer_N: FloatArray) -> "RatioError":
        """Compare two arrays [N], N > 0. What is not a number stays so, and passes no check."""
        error_N = np.abs(engine_N.astype(np.float64) - trainer_N.astype(np.float64))
        return cls(float(error_N.mean()), float(error_N.max()))


EXACT_TOLERANCE = 1e-4
"""Largest mean error at temperature 1 where engine and trainer compute in float32."""
BASELINE_UPDATES = 4
"""Updates from which the usual error is learned where one of them computes in less."""
GROSS_FACTOR = 10.0
"""A mean error above this many times the usual one is a gross error, ..."""
GROSS_LEAST, GROSS_MOST = 0.2, 1.0
"""... but none below the first of these is, and each above the second; that one alone counts while
the baseline is learned. Weights of another model are 2 to 9 off, log-probs at another temperature
1.7; healthy half-precision runs are reported with 0.03 to 0.4."""


class RatioCheck:
    """Limit on the distance from 1 of ratios of on-policy tokens; it learns what is usual.

    With `tolerance` that is the limit of the mean error. Without: `EXACT_TOLERANCE` where all
    compute in float32 (`exact`); else gross errors alone do not pass. The baseline is the median of
    the engines' mean errors over the first `BASELINE_UPDATES` updates of this object's life.
    """

    def __init__(self, *, tolerance: float | None, temperature: float) -> None:
        self._tolerance = tolerance
        # An error of the logits is divided by it.
        self._exact = EXACT_TOLERANCE / min(1.0, temperature)
        self._learned: list[list[float]] = []

    @property
    def baseline(self) -> float | None:
        """The usual mean error; None until it is learned."""
        if len(self._learned) < BASELINE_UPDATES:
            return None
        return median(mean for update in self._learned for mean in update)

    def limit(self, *, exact: bool) -> float:
        """Largest mean error that passes."""
        if self._tolerance is not None:
            return self._tolerance
        if exact:
            return self._exact
        if self.baseline is None:
            return GROSS_MOST
        return min(GROSS_MOST, max(GROSS_LEAST, GROSS_FACTOR * self.baseline))

    def passes(self, error: RatioError, *, exact: bool) -> bool:
        """Return whether an engine's error is within the limit (a NaN never is)."""
        return error.mean <= self.limit(exact=exact)

    def learn(self, errors: Iterable[RatioError]) -> None:
        """Add an update's errors, of the engines that passed."""
        means = [error.mean for error in errors]
        if means and self.baseline is None:
            self._learned.append(means)

    def drift(self, errors: Iterable[RatioError]) -> float | None:
        """The largest of the mean errors over the usual one; None until that is learned."""
        worst = max((error.mean for error in errors), default=math.nan)
        return None if self.baseline is None else worst / max(self.baseline, 1e-12)


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(repr(name) for name in ordered[:_NAMED]) + more
