"""Finds the branch of an episode that an agent's call to the policy continues.

A turn is new messages and the policy's response to them. A branch is a path of turns from a first
turn to a last one. A call sends all messages of its conversation again, so it continues the longest
branch whose messages and responses are the first messages of the call.

Invariants
- The result of a match depends only on the turns and responses that were recorded before it.
- Messages are compared as JSON. The IDs of tool calls are left out; everything else must be equal.
- A fork is the start of a new branch. A call makes one if it continues a turn that another call
  continued before, or if it continues no turn and is not the episode's first call.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Message = Mapping[str, Any]
Why = Literal["repeated", "shortened", "thread", "tools", "answer", "message"]

_START: Final = b""
TOOLS_ROLE: Final = "tools"
"""Role of the message that holds the descriptions of a call's tools; it precedes all others."""


@dataclass(frozen=True)
class Fork:
    """Reason why a call starts a new branch instead of extending an existing branch, and the first
    difference.

    Attributes:
        why: `repeated`: an earlier call had the same messages. `shortened`: the call's messages are
            the beginning of an earlier conversation. `tools`: the call offers other tools.
            `thread`: the call starts a new conversation: it has no messages of the policy, and no
            earlier conversation has its first message. `answer`: a response of the policy was
            changed. `message`: another message was changed.
        at: Index of the first message in which the call differs from an earlier conversation.
        was: The earlier conversation's message at `at`, as JSON; empty if it ended there.
        now: The call's message at `at`, as JSON; empty if the call has no more messages.
    """

    why: Why
    at: int
    was: str
    now: str


@dataclass(frozen=True)
class Match:
    """Turn of an episode that an agent's call continues, and the new messages of the call.

    Attributes:
        parent: Number of the turn that the call continues; None if it starts a conversation.
        new: Messages of the call after the response of turn `parent`; all messages if `parent` is
            None.
        fork: Reason why the call starts a new branch; None if it does not, which means that it is
            the episode's first call or the first that continues `parent`.
    """

    parent: int | None
    new: tuple[Message, ...]
    fork: Fork | None


class Branches:
    """Index of an episode's turns by the digests of their conversations.

    It is kept up to date with `begin` and `answer`, and `match` looks calls up in it.
    """

    def __init__(self) -> None:
        # From the digest of all messages of a branch up to and including a response, to the number
        # of the turn with that response.
        self._answered: dict[bytes, int] = {}
        # Digest of all messages of each call, without the response to the call.
        self._inputs: set[bytes] = set()
        # From the digest of the first n messages of a conversation to message n + 1, as JSON. If
        # several conversations start with these messages, the newest one counts.
        self._next: dict[bytes, str] = {}
        # For each turn, the digest of all messages of its branch. `begin` computes it without the
        # turn's response, and `answer` adds the response.
        self._heads: list[bytes] = []
        self._calls: list[bytes] = []
        self._continued: set[int | None] = set()

    def match(self, messages: Sequence[Message]) -> Match:
        """Return which turn a call with `messages` continues, its new messages, and any fork."""
        chain = _chain(_START, messages)
        parent, matched = None, 0
        for length in range(len(messages), 0, -1):
            if (turn := self._answered.get(chain[length])) is not None:
                parent, matched = turn, length
                break
        return Match(parent, tuple(messages[matched:]), self._fork(messages, chain, parent))

    def begin(self, parent: int | None, new: Sequence[Message]) -> int:
        """Add a turn that continues turn `parent` with the messages `new`, and return its number.

        `parent` is None for a turn that starts a conversation.
        """
        start = _START if parent is None else self._heads[parent]
        self._heads.append(self._extend(start, new))
        self._calls.append(self._heads[-1])
        self._inputs.add(self._heads[-1])
        self._continued.add(parent)
        return len(self._heads) - 1

    def digest_of_turn(self, turn: int) -> bytes:
        """Return the digest (`call_digest`) of the call that became turn number `turn`."""
        return self._calls[turn]

    def answer(self, turn: int, message: Message) -> None:
        """Append the policy's response `message` to the branch of turn number `turn`."""
        self._heads[turn] = self._extend(self._heads[turn], [message])
        self._answered[self._heads[turn]] = turn

    def _extend(self, start: bytes, messages: Sequence[Message]) -> bytes:
        chain = _chain(start, messages)
        for before, message in zip(chain, messages, strict=False):
            self._next[before] = _comparable(message)
        return chain[-1]

    def _fork(
        self, messages: Sequence[Message], chain: Sequence[bytes], parent: int | None
    ) -> Fork | None:
        if not self._heads or (parent is not None and parent not in self._continued):
            return None
        common = max(n for n, h in enumerate(chain) if h in self._next or h in self._inputs)
        was = self._next.get(chain[common], "")
        now = _comparable(messages[common]) if common < len(messages) else ""
        if not now:
            return Fork("repeated" if chain[-1] in self._inputs else "shortened", common, was, now)
        begins = common == 0 and not any(m["role"] == "assistant" for m in messages)
        return Fork(_why(was, now, begins=begins), common, was, now)


def _why(was: str, now: str, *, begins: bool) -> Why:
    roles = [json.loads(text)["role"] for text in (was, now) if text]
    if TOOLS_ROLE in roles:
        return "tools"
    if begins:
        return "thread"
    return "answer" if was and roles[0] == "assistant" else "message"


def call_digest(messages: Sequence[Message]) -> bytes:
    """Return a digest of a call's messages, equal for calls whose messages are equal.

    The IDs of tool calls do not count.
    """
    return _chain(_START, messages)[-1]


def _chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of a conversation before `messages` and after each of them.

    Item n of the result is the digest after the first n messages.

    Args:
        start: Digest of the conversation before the messages, which is item 0.
        messages: The messages.
    """
    chain = [start]
    for message in messages:
        text = _comparable(message).encode("utf-8", "surrogatepass")
        chain.append(hashlib.blake2b(chain[-1] + text, digest_size=16).digest())
    return chain


def _comparable(message: Message) -> str:
    """Return a message as canonical JSON for comparison, without the IDs of its tool calls."""
    compared = dict(message)
    if calls := compared.get("tool_calls"):
        compared["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(compared, sort_keys=True)
