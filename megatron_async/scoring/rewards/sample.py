"""Defines the argument of a reward function (`Sample`) and checks the value that it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.config.reward import BATCH_METRICS
from megatron_async.errors import short_repr
from megatron_async.scoring.interface import CONVERSATIONS, SCORER_FAULTS

Returned = float | tuple[float, Mapping[str, float]]
"""Return value of a reward function for a response: a score, or a score and its named
components."""


# Largest absolute value of a score. It leaves room below the largest float32, 3.4e38, for weighted
# sums of scores, since a batch stores rewards as float32.
_LARGEST: Final = 1e30


class Unavailable(RuntimeError):
    """Raised by a reward function that cannot score now, for a reason that is not the response."""


@dataclass(frozen=True)
class Sample:
    """The argument of a reward function: a response, and the row of the data with its prompt.

    Attributes:
        response: Text of the response; for an episode, the policy's last response.
        prompt: The prompt; if it has several chat messages, the text of the last message.
        answer: The row's reference answer; empty if the row has none.
        metadata: The row's other columns.
        payload: All that the task stores about the prompt.
        messages: All chat messages of an episode, with their roles; empty without an episode.
    """

    response: str
    prompt: str = ""
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict, repr=False)
    messages: Sequence[Mapping[str, Any]] = ()


def sample_of(payload: Mapping[str, Any], text: str, index: int = 0) -> Sample:
    """Return the sample for a response `text` to the prompt with this payload.

    `index` is the position of the response among the conversations in the payload; it is not used
    if the payload has none.
    """
    conversations = payload.get(CONVERSATIONS)
    return Sample(
        text,
        str(payload.get("question", "")),
        str(payload.get("answer", "")),
        payload.get("metadata", {}),
        payload,
        conversations[index] if conversations else (),
    )


@dataclass(frozen=True)
class RewardScore:
    """A checked score with named components; all numbers are finite, also in float32.

    Attributes:
        value: The score.
        parts: The components by name.
    """

    value: float
    parts: Mapping[str, float]


def score_of(returned: Any) -> RewardScore:
    """Convert the value that a reward function returned for one response to a score.

    The value must be a finite number, or a tuple of a number and a mapping of names to numbers.

    Raises:
        ValueError: If the value has any other form, or a component has a reserved name.
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    value, parts = returned if pair else (returned, {})
    if not isinstance(parts, Mapping):
        raise ValueError(
            f"the reward returned {short_repr(returned)}; the second element of the tuple must be "
            "a mapping of names to numbers"
        )
    named = {str(name): _number(str(name), part) for name, part in parts.items()}
    for name in named.keys() & (BATCH_METRICS | SCORER_FAULTS.keys()):
        raise ValueError(
            f"the reward returned a component {name!r}, which is the name of a metric. Rename it."
        )
    return RewardScore(_number("", value), named)


def _number(name: str, value: Any) -> float:
    """Convert a score or the component `name` to a float; `name` is empty for the score itself.

    Raises:
        ValueError: If it is not a number, not finite, or larger than `_LARGEST`.
    """
    # NumPy's and torch's numbers have __float__ too. A text must not be accepted as a number.
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
