"""The sample that a reward reads, and the score that it may return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.config.reward import BATCH_METRICS
from megatron_async.errors import short_repr
from megatron_async.scoring.interface import CONVERSATIONS, SCORER_FAULTS

Returned = float | tuple[float, Mapping[str, float]]
"""A score, or a score and named parts of it."""


_LARGEST: Final = 1e30  # times a weight, and added up, it fits into the float32 of a batch


class Unavailable(RuntimeError):
    """Raised by a reward that cannot be had now, for reasons that are not the response's."""


@dataclass(frozen=True)
class Sample:
    """A response, and the row of the data that it responds to.

    `answer` is the row's reference answer (empty where it has none), `metadata` its other columns.
    Of an episode `response` is the last answer, and `messages` are all, with their roles.
    """

    response: str
    prompt: str = ""
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict, repr=False)
    messages: Sequence[Mapping[str, Any]] = ()


def sample_of(payload: Mapping[str, Any], text: str, place: int = 0) -> Sample:
    """The sample of a request to a scorer; `place` of the text among its responses."""
    conversations = payload.get(CONVERSATIONS)
    return Sample(
        text,
        str(payload.get("question", "")),
        str(payload.get("answer", "")),
        payload.get("metadata", {}),
        payload,
        conversations[place] if conversations else (),
    )


@dataclass(frozen=True)
class RewardScore:
    """A score with its parts; all are finite, in float32 too."""

    value: float
    parts: Mapping[str, float]


def score_of(returned: Any) -> RewardScore:
    """Check what a reward returned for one response. Raises ValueError for the rest."""
    pair = isinstance(returned, tuple) and len(returned) == 2
    value, parts = returned if pair else (returned, {})
    if not isinstance(parts, Mapping):
        raise ValueError(
            f"the reward returned {short_repr(returned)}; the second of two must be a mapping of "
            "names to numbers"
        )
    named = {str(name): _number(str(name), part) for name, part in parts.items()}
    for name in named.keys() & (BATCH_METRICS | SCORER_FAULTS.keys()):
        raise ValueError(f"the reward names a part {name!r}, which is a name of metrics; rename it")
    return RewardScore(_number("", value), named)


def _number(name: str, value: Any) -> float:
    # NumPy's and torch's numbers have __float__ too; a text must not pass as a number.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        pair = "" if name else ", or a number and a mapping of names to numbers"
        group = " (with `group: true` a reward returns a list)" if isinstance(value, list) else ""
        raise ValueError(
            f"the reward returned {short_repr(value)}{f' as {name!r}' if name else ''}; it must be "
            f"a number{pair}{group}"
        )
    number = float(value)
    if not abs(number) <= _LARGEST:
        raise ValueError(
            f"the reward returned {number}{f' as {name!r}' if name else ''}; it must be a finite "
            f"number of at most {_LARGEST:g}"
        )
    return number
