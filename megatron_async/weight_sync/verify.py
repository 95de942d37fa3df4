"""Checks that engines have the weights that the trainer sent, and that the reported log-probs
belong to the sampled tokens.

The checks use only data that engines have reported, and do no I/O. They are needed for three
reasons. SGLang accepts and ignores a tensor with an unknown name. Its checksums are computed over
its own fused parameters, so a trainer cannot compute them for comparison. Some of its settings
change log-probs or sampling. Each of the four checks detects errors that the others cannot
(docs/semantics.md section 5):

- Every name that is sent belongs to a parameter of the engine (`NameCheck.add`).
- Every parameter of the engine was sent (`NameCheck.finish`).
- All engines have the same version with the same checksum (`agreed_checksum`, `disagreement`).
- The trainer's log-probs of tokens that an engine has sampled equal the engine's, up to rounding
  (`RatioCheck`).
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
# End of the names of scales of quantized weights, and of the rearranged copies that SGLang makes of
# them for some fp8 kernels.
_SCALES = re.compile(r"_?scale(_inv|_2)?(_shuffled|_swizzled|_deepgemm)?$")
_FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\."), ".experts.w2_"),
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)


def engine_parameter(name: str) -> str:
    """Return the name of SGLang's parameter that contains the Hugging Face tensor `name`.

    SGLang fuses several tensors into one parameter: the query, key and value projections, the gate
    and up projections, and all experts of a layer.

    >>> engine_parameter("model.layers.0.self_attn.k_proj.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def engine_parameters(checksum_answer: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters of all ranks of an engine, from its reply to the call
    `weights_checker`.

    The result is empty if the reply does not have the expected form.
    """
    try:
        return frozenset(name for rank in checksum_answer["ranks"] for name in rank["checksums"])
    except (KeyError, TypeError):
        return frozenset()


class NameCheck:
    """Compares the names of the tensors that are sent in one update with the names of the engines'
    parameters."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._sent: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Add the names of tensors that are about to be sent.

        The engines' parameter names come from a list of checksums, in which SGLang combines an fp8
        weight and its scale under the name of the weight. So the name of a scale is accepted if the
        name of its weight is in the list.

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
        """Add the names that another sender of the same update has sent: the value of `sent`
        there."""
        self._sent.update(names)

    def finish(self) -> None:
        """Check that every parameter of the engines was sent in the update.

        Parameters with the name of a scale of quantized weights are not required, because some of
        them are copies that the engine makes itself.

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
    """Return the most common checksum among engines that report `version`; None if two checksums
    are equally common, or if no engine reports `version`."""
    counts = Counter(held.checksum for held in reports if held.version == version).most_common(2)
    clear = len(counts) == 1 or (len(counts) == 2 and counts[0][1] > counts[1][1])
    return counts[0][0] if clear else None


def disagreement(
    held: LoadedVersion,
    reports: Sequence[LoadedVersion],
    version: PolicyVersion,
    agreed: str | None,
) -> str | None:
    """Return an error message if the report `held` of an engine does not have `version` with the
    checksum `agreed`; None if it does. The message lists the checksums in `reports`."""
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
    """Mean and largest absolute difference between the engine's and the trainer's log-prob, over
    tokens that an engine has sampled."""

    mean: float
    largest: float

    @classmethod
    def of(cls, engine_N: FloatArray, trainer_N: FloatArray) -> "RatioError":
        """Compute the differences of two arrays of log-probs [N], N > 0. If one is NaN, the result
        is NaN, which fails every check."""
        error_N = np.abs(engine_N.astype(np.float64) - trainer_N.astype(np.float64))
        return cls(float(error_N.mean()), float(error_N.max()))


EXACT_TOLERANCE = 1e-4
"""Largest accepted mean difference between the engine's and the trainer's log-probs at temperature
1, if both compute in float32."""
BASELINE_UPDATES = 4
"""Number of updates whose errors determine the usual error, if engine or trainer computes in less
precision than float32. An error is the mean difference of log-probs."""
GROSS_FACTOR = 10.0
"""A mean error of more than `GROSS_FACTOR` times the usual mean error is gross and fails the check,
within the bounds `GROSS_LEAST` and `GROSS_MOST`."""
GROSS_LEAST, GROSS_MOST = 0.2, 1.0
"""Mean errors (differences of log-probs, in nats) of at most `GROSS_LEAST` never fail the check,
and errors above `GROSS_MOST` always do.

As long as the usual error is not known, only `GROSS_MOST` counts. With the weights of another model
the error is 2 to 9, and with log-probs at another temperature 1.7. For healthy runs in half
precision, 0.03 to 0.4 are reported.
"""


class RatioCheck:
    """Checks that an engine's log-probs of tokens that it sampled with the current weights are
    close to the trainer's, and learns which error is usual. The error is the mean absolute
    difference.

    If `tolerance` is given, it is the limit of the error. Otherwise the limit depends on the
    precision: if engine and trainer compute in float32 (`exact`), it is `EXACT_TOLERANCE`, divided
    by the temperature if that is below 1. In less precision, only errors far above the usual error
    fail (`GROSS_FACTOR`). The usual error is the median of the engines' errors over the first
    `BASELINE_UPDATES` updates that this object sees.
    """

    def __init__(self, *, tolerance: float | None, temperature: float) -> None:
        self._tolerance = tolerance
        # Logits are divided by the temperature, and so are their errors.
        self._exact = EXACT_TOLERANCE / min(1.0, temperature)
        self._learned: list[list[float]] = []

    @property
    def baseline(self) -> float | None:
        """The usual mean error of log-probs; None until `BASELINE_UPDATES` updates were seen."""
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
        """Return whether the mean error of an engine's log-probs passes the check: it must be at
        most the value that `limit` returns. NaN does not pass.

        Args:
            error: The engine's error.
            exact: Whether engine and trainer compute in float32.
        """
        return error.mean <= self.limit(exact=exact)

    def learn(self, errors: Iterable[RatioError]) -> None:
        """Use the errors of one update to determine the usual error, unless `BASELINE_UPDATES`
        updates were used already. Pass only errors of engines that passed the check."""
        means = [error.mean for error in errors]
        if means and self.baseline is None:
            self._learned.append(means)

    def drift(self, errors: Iterable[RatioError]) -> float | None:
        """Return the largest of the mean errors divided by the usual error; None until the usual
        error is known."""
        worst = max((error.mean for error in errors), default=math.nan)
        return None if self.baseline is None else worst / max(self.baseline, 1e-12)


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(repr(name) for name in ordered[:_NAMED]) + more
