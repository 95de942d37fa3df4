"""The interface of environments that users write, and the checks of what these return.

A class has `reset(**row)`, which gives the opening (a text, messages, or None for the row's own
prompt), and then either `step(answer) -> Step`, or no `step`: its public methods are then tools
(`tools.py`). It may have `state() -> bytes` and `restore(state, **row)`, `get_reward()` and
`close()`. Any method may be `async def`.

Invariants
- What the user's code returns is checked here, once; nothing behind it meets another type.
- Every refusal is one sentence that names the method and shows what it returned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.errors import short_repr
from megatron_async.scoring.rewards.sample import score_of
from megatron_async.tasks.base import Message

LARGEST_OBSERVATION: Final = 1 << 20
"""Characters of one observation; more is a fault of the environment."""
LARGEST_STATE: Final = 256 << 10
"""Bytes of `state()`; more, and the episode is replayed in place of restored."""
_ROLES: Final = ("system", "user", "tool")

Observation = str | Sequence[Message]


class EnvironmentFault(RuntimeError):
    """An environment has returned what it must not, or raised: its episode cannot go on."""


class EnvironmentHung(EnvironmentFault):
    """A call has passed its limit and cannot be ended: its thread stays busy with it."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that the policy has called."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """An answer of the policy, in a turn counted from 0.

    `text`: without the token that ends it and, where a parser found calls, without those.
    `truncated`: it was cut off at `sampling.max_new_tokens`.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    turn: int = 0


@dataclass(frozen=True)
class Step:
    """A reply of the environment: text or messages, the turn's reward, whether it is over.

    `parts`: named numbers for metrics.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A checked `Step`: the observation as messages."""

    messages: tuple[Message, ...]
    reward: float
    done: bool
    parts: Mapping[str, float]


def opening_of(returned: Any, prompt: Sequence[Message], where: str) -> tuple[Message, ...]:
    """The first messages of an episode from what `reset` returned. Raises EnvironmentFault."""
    if returned is None and not prompt:
        raise EnvironmentFault(
            f"{where} returned None, and the task's rows have no prompt: return the opening"
        )
    return tuple(prompt) if returned is None else messages_of(returned, where)


def reply_of(returned: Any, where: str) -> Reply:
    """Check what `step` returned. Raises EnvironmentFault."""
    if not isinstance(returned, Step):
        raise EnvironmentFault(f"{where} returned {short_repr(returned)}; it must be a Step")
    if not isinstance(returned.done, bool):
        raise EnvironmentFault(f"{where}: Step.done is {short_repr(returned.done)}, not a bool")
    reward, parts = number_of((returned.reward, returned.parts), f"{where}: Step.reward")
    observation = returned.observation
    over = returned.done and isinstance(observation, str | tuple | list) and not observation
    messages = () if over else messages_of(observation, where)
    return Reply(messages, reward, returned.done, parts)


def number_of(returned: Any, where: str) -> tuple[float, Mapping[str, float]]:
    """A reward and its parts, as a reward function may return them. Raises EnvironmentFault."""
    try:
        score = score_of(returned)
    except Exception as error:  # a number of the user's may raise anything
        raise EnvironmentFault(f"{where}: {error}") from error
    return score.value, score.parts


def messages_of(observation: Any, where: str) -> tuple[Message, ...]:
    """Check what the policy is to read. Raises EnvironmentFault."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence) or not observation:
        raise EnvironmentFault(
            f"{where} returned the observation {short_repr(observation)}; it must be text or "
            "messages"
        )
    for message in observation:
        _check_message(message, where)
    parts = (part for message in observation for item in message.items() for part in item)
    if sum(map(len, parts)) > LARGEST_OBSERVATION:
        raise EnvironmentFault(
            f"{where} returned an observation of more than {LARGEST_OBSERVATION:,} characters"
        )
    # Exact strings: a class of the user's would be unknown where they arrive.
    return tuple({str.__str__(k): str.__str__(v) for k, v in m.items()} for m in observation)


def _check_message(message: Any, where: str) -> None:
    good = (
        isinstance(message, Mapping)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
        and all(_is_text(part) for item in message.items() for part in item)
    )
    if not good:
        raise EnvironmentFault(
            f"{where} returned the message {short_repr(message)}; one has a text `content` and a "
            f"`role` of {', '.join(_ROLES)}"
        )


def _is_text(part: Any) -> bool:
    """Return whether it can be written as UTF-8: half of a surrogate pair cannot."""
    return isinstance(part, str) and part.encode(errors="replace").decode() == part
