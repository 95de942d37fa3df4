"""Provides the types of the interface that users' environments implement, and checks their values.

An environment class has `reset(**row)`, which returns the opening of an episode: a text, messages,
or None for the prompt of the task's row. A class with `step(answer) -> Step` replies to each
response of the policy. The public methods of a class without `step` are tools that the policy calls
(`tools.py`). A class may also have `state() -> bytes` and `restore(state, **row)`, `get_reward()`
and `close()`. Any method may be `async def`.

Invariants
- Each value that the user's code returns is checked once, in this module; other modules rely on its
  type.
- Every error message names the method and shows the value that the method returned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.errors import short_repr
from megatron_async.scoring.rewards.sample import score_of
from megatron_async.tasks.base import Message

MAX_OBSERVATION: Final = 1 << 20
"""Largest number of characters in one observation; a longer one raises EnvironmentFault."""
MAX_STATE: Final = 256 << 10
"""Largest size in bytes of a snapshot from `state()`. A larger snapshot is not stored, so the
episode is replayed from its stored responses rather than restored from the snapshot."""
_ROLES: Final = ("system", "user", "tool")

Observation = str | Sequence[Message]


class EnvironmentFault(RuntimeError):
    """Error of a user's environment or agent, which raised, timed out or returned a bad value.

    It ends the current attempt at the episode.
    """


class EnvironmentHung(EnvironmentFault):
    """Error of a call to user code that exceeded its time limit and could not be canceled.

    A call in a thread keeps that thread busy until the call returns.
    """


@dataclass(frozen=True)
class ToolCall:
    """A call to a tool that the policy wrote in a response: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The policy's response in one turn of an episode, as the environment's `step` receives it.

    Attributes:
        text: Text of the response without its stop token. If `episode.tool_parser` is set and the
            parser read all tool calls, their text is left out too.
        tool_calls: Tool calls that the parser found in the response.
        truncated: Whether the response has no stop token because it was cut off, usually at
            `sampling.max_new_tokens`.
        turn: Number of the turn, counted from 0.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    turn: int = 0


@dataclass(frozen=True)
class Step:
    """The environment's reply to one response of the policy, which `step` returns.

    Attributes:
        observation: Text or messages that the policy reads next. It may be empty if `done` is true.
        reward: Reward of this turn.
        done: Whether the episode is over.
        parts: Named numbers for metrics.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A checked `Step`, whose observation was converted to a tuple of messages.

    `messages` is empty if the episode is over and the `Step` had no observation.
    """

    messages: tuple[Message, ...]
    reward: float
    done: bool
    parts: Mapping[str, float]


def opening_of(returned: Any, prompt: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Return an episode's first messages: what `reset` returned or, for None, the row's `prompt`.

    Args:
        returned: Value that the environment's `reset` returned.
        prompt: Messages of the task's row; empty if the row has no prompt.
        where: Name of the method, for error messages.

    Raises:
        EnvironmentFault: `returned` is neither text nor valid messages, or is None although the row
            has no prompt.
    """
    if returned is None and not prompt:
        raise EnvironmentFault(
            f"{where} returned None, but the task's row has no prompt. Return the opening of the "
            "episode."
        )
    return tuple(prompt) if returned is None else messages_of(returned, where)


def reply_of(returned: Any, where: str) -> Reply:
    """Check the value that an environment's `step` returned, and convert it to a `Reply`.

    Raises:
        EnvironmentFault: `returned` is not a `Step`, or one of its fields has an invalid value.
    """
    if not isinstance(returned, Step):
        raise EnvironmentFault(f"{where} returned {short_repr(returned)}; it must be a Step")
    if not isinstance(returned.done, bool):
        raise EnvironmentFault(
            f"{where}: Step.done is {short_repr(returned.done)}; it must be a bool"
        )
    reward, parts = number_of((returned.reward, returned.parts), f"{where}: Step.reward")
    observation = returned.observation
    over = returned.done and isinstance(observation, str | tuple | list) and not observation
    messages = () if over else messages_of(observation, where)
    return Reply(messages, reward, returned.done, parts)


def number_of(returned: Any, where: str) -> tuple[float, Mapping[str, float]]:
    """Convert a reward that user code returned to a float and named numbers for metrics.

    User code returns a reward in the forms that a reward function may return: a number, or a number
    with a mapping of named numbers.

    Raises:
        EnvironmentFault: `returned` has neither form.
    """
    try:
        score = score_of(returned)
    except Exception as error:  # User code may return a number whose conversion raises anything.
        raise EnvironmentFault(f"{where}: {error}") from error
    return score.value, score.parts


def messages_of(observation: Any, where: str) -> tuple[Message, ...]:
    """Check an observation of the environment, and convert it to the messages for the policy.

    A text becomes one message of the role `user`.

    Raises:
        EnvironmentFault: `observation` is neither text nor a non-empty sequence of valid messages,
            or it is longer than `MAX_OBSERVATION`.
    """
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence) or not observation:
        raise EnvironmentFault(
            f"{where} returned the observation {short_repr(observation)}; it must be text or "
            "a non-empty list of messages"
        )
    for message in observation:
        _check_message(message, where)
    parts = (part for message in observation for item in message.items() for part in item)
    if sum(map(len, parts)) > MAX_OBSERVATION:
        raise EnvironmentFault(
            f"{where} returned an observation of more than {MAX_OBSERVATION:,} characters"
        )
    # Subclasses of str become plain strings, because the process that unpickles the messages may
    # not be able to import a user's class.
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
            f"{where} returned the message {short_repr(message)}; a message must have a text "
            f"`content` and a `role` of {', '.join(_ROLES)}"
        )


def _is_text(part: Any) -> bool:
    """Return whether `part` is a string that UTF-8 can encode, so without lone surrogates."""
    return isinstance(part, str) and part.encode(errors="replace").decode() == part
