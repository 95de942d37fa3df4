"""Checks that engines have what the trainer sent, and that their log-probs describe what they
sample.

These are pure checks of the engines' reports. They are needed because SGLang accepts and ignores a
tensor with an unknown name, because its checksums are over its own fused layout, which a trainer
cannot compute, and because some of its settings change log-probs or sampling. Each of the four
checks detects what the others cannot (docs/semantics.md section 5):

- Every name that is sent belongs to a parameter of the engine (`NameCheck.add`).
- Every parameter of the engine was sent (`NameCheck.finish`).
- All engines have the same version with the same checksum (`agreed_checksum`, `disagreement`).
- Tokens that an engine samples have ratio 1 under the trainer (`RatioCheck`).
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
    """Return the name of SGLang's parameter that contains the Hugging Face tensor `name`.

    SGLang fuses query, key and value, gate and up projections, and experts.

    >>> engine_parameter("model.layers.0.self_attn.k_proj.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def engine_parameters(checksum_answer: Mapping[str, Any]) -> frozenset[str]:
    """Return all parameter names in an engine's reply to `weights_checker`, of all its ranks.

    The result is empty for a reply of another form.
    """
    try:
        return frozenset(name for rank in checksum_answer["ranks"] for name in rank["checksums"])
    except (KeyError, TypeError):
        return frozenset()


class NameCheck:
    """Compares the tensor names of one update with the parameters of the engines."""

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
                f"the engines have no parameter for {_listing(unknown)}; they would ignore it "
                "silently"
            )
        self._sent.update(owners.values())
        self._sent.update(owners)

    @property
    def sent(self) -> frozenset[str]:
        """Names sent in this update so far, and the engines' parameters that they belong to."""
        return frozenset(self._sent)

    def sent_before(self, names: Iterable[str]) -> None:
        """Add the names that another sender of the same update has sent (its `sent`)."""
        self._sent.update(names)

    def finish(self) -> None:
        """Check that the complete update has all parameters of the engines.

        Scales of quantized weights need not be sent, because the engine computes them.

        Raises:
            ComponentFailure: If a parameter is missing.
        """
        missing = [name for name in self._known - self._sent if _SCALES.search(name) is None]
        if missing:
            raise ComponentFailure(
                f"the update lacks {_listing(missing)}, which the engines would keep unchanged"
            )


@dataclass(frozen=True)
class LoadedVersion:
    """The version that an engine reports to have loaded, with the checksum of its weights."""

    engine_id: str
    version: PolicyVersion
    checksum: str


def agreed_checksum(reports: Sequence[LoadedVersion], version: PolicyVersion) -> str | None:
    """Return the checksum that most engines with `version` report; None if two are equally
    common."""
    counts = Counter(held.checksum for held in reports if held.version == version).most_common(2)
    clear = len(counts) == 1 or (len(counts) == 2 and counts[0][1] > counts[1][1])
    return counts[0][0] if clear else None


def disagreement(
    held: LoadedVersion,
    reports: Sequence[LoadedVersion],
    version: PolicyVersion,
    agreed: str | None,
) -> str | None:
    """Return why the engine of `held` does not have `version` with the `agreed` checksum; None if
    it does."""
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
    """Mean and largest |engine's log-prob - trainer's log-prob| over tokens that an engine has
    sampled."""

    mean: float
    largest: float

    @classmethod
    def of(cls, engine_N: FloatArray, trainer_N: FloatArray) -> "RatioError":
        """Compare two arrays of log-probs [N], N > 0. NaN is kept, and passes no check."""
        error_N = np.abs(engine_N.astype(np.float64) - trainer_N.astype(np.float64))
        return cls(float(error_N.mean()), float(error_N.max()))


EXACT_TOLERANCE = 1e-4
"""Largest accepted mean error at temperature 1 if engine and trainer compute in float32."""
BASELINE_UPDATES = 4
"""Number of updates from which the usual error is learned if one of them computes in less
precision."""
GROSS_FACTOR = 10.0
"""Multiple of the usual mean error above which an error is gross, within the next two bounds."""
GROSS_LEAST, GROSS_MOST = 0.2, 1.0
"""Mean errors below `GROSS_LEAST` are never gross, and errors above `GROSS_MOST` always are.

While the usual error is being learned, only `GROSS_MOST` counts. Weights of another model have
errors of 2 to 9, log-probs at another temperature 1.7. Healthy half-precision runs are reported
with 0.03 to 0.4."""


class RatioCheck:
    """Limits the error of log-probs of on-policy tokens, and learns which error is usual.

    With `tolerance`, that is the limit of the mean error. Without it, the limit is
    `EXACT_TOLERANCE` if engine and trainer compute in float32 (`exact`); otherwise only gross
    errors fail. The usual error is the median of the engines' mean errors over the first
    `BASELINE_UPDATES` updates that this object sees.
    """

    def __init__(self, *, tolerance: float | None, temperature: float) -> None:
        self._tolerance = tolerance
        # The temperature divides an error of the logits.
        self._exact = EXACT_TOLERANCE / min(1.0, temperature)
        self._learned: list[list[float]] = []

    @property
    def baseline(self) -> float | None:
        """The usual mean error; None until it is learned."""
        if len(self._learned) < BASELINE_UPDATES:
            return None
        return median(mean for update in self._learned for mean in update)

    def limit(self, *, exact: bool) -> float:
        """Return the largest mean error of an engine's log-probs that passes.

        Args:
            exact: Whether engine and trainer compute in float32.
        """
        if self._tolerance is not None:
            return self._tolerance
        if exact:
            return self._exact
        if self.baseline is None:
            return GROSS_MOST
        return min(GROSS_MOST, max(GROSS_LEAST, GROSS_FACTOR * self.baseline))

    def passes(self, error: RatioError, *, exact: bool) -> bool:
        """Return whether an engine's error is within the limit; NaN is not."""
        return error.mean <= self.limit(exact=exact)

    def learn(self, errors: Iterable[RatioError]) -> None:
        """Add the errors of an update, of the engines that passed, to the baseline until it is
        complete."""
        means = [error.mean for error in errors]
        if means and self.baseline is None:
            self._learned.append(means)

    def drift(self, errors: Iterable[RatioError]) -> float | None:
        """Return the largest mean error divided by the usual one; None until the usual error is
        learned."""
        worst = max((error.mean for error in errors), default=math.nan)
        return None if self.baseline is None else worst / max(self.baseline, 1e-12)


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(repr(name) for name in ordered[:_NAMED]) + more
