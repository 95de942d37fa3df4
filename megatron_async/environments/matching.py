"""Branches of an episode by their messages: which of them a call of an agent continues.

A branch is messages, an answer, more messages, an answer. A call brings all messages of a
conversation again; what it continues is the longest branch that it begins with.

Invariants
- Pure: what a call matches follows from the turns that were begun and answered before it.
- Messages are compared as JSON, without the ids of calls; nothing else is compared loosely.
- A turn of which the branch has been continued before is continued a second time by a fork.
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
"""Of a message that holds the descriptions of tools; it comes before all others."""


@dataclass(frozen=True)
class Fork:
    """A branch that begins beside another one: why, and the first message that differs.

    `repeated`: an equal call; `shortened`: the beginning of one; `thread`: a conversation begins,
    with no message in common; `tools`: other tools; `answer`: an answer of the policy was changed;
    `message`: another one was. `at`: its place; `was` is empty where the branch has no message
    there, `now` where the call has none.
    """

    why: Why
    at: int
    was: str
    now: str


@dataclass(frozen=True)
class Match:
    """A call continues turn `parent` (None: it begins) with the messages `new`.

    `fork`: None where it continues what nothing else had continued.
    """

    parent: int | None
    new: tuple[Message, ...]
    fork: Fork | None


class Branches:
    """The turns of an episode, as they were begun and answered."""

    def __init__(self) -> None:
        self._answered: dict[bytes, int] = {}  # all messages of a branch -> its last turn
        self._asked: set[bytes] = set()  # the same without the answer
        self._next: dict[bytes, str] = {}  # messages -> the one that came after them at last
        self._heads: list[bytes] = []
        self._calls: list[bytes] = []
        self._continued: set[int | None] = set()

    def match(self, messages: Sequence[Message]) -> Match:
        """Match a call with these messages to the branch that it continues."""
        chain = _chain(_START, messages)
        parent, kept = None, 0
        for length in range(len(messages), 0, -1):
            if (turn := self._answered.get(chain[length])) is not None:
                parent, kept = turn, length
                break
        return Match(parent, tuple(messages[kept:]), self._fork(messages, chain, parent))

    def begin(self, parent: int | None, new: Sequence[Message]) -> int:
        """The number of a turn that continues `parent` with messages."""
        start = _START if parent is None else self._heads[parent]
        self._heads.append(self._extend(start, new))
        self._calls.append(self._heads[-1])
        self._asked.add(self._heads[-1])
        self._continued.add(parent)
        return len(self._heads) - 1

    def asked(self, turn: int) -> bytes:
        """The digest of the call that a turn was (`call_digest`)."""
        return self._calls[turn]

    def answer(self, turn: int, message: Message) -> None:
        """Note the answer of a turn that was begun."""
        self._heads[turn] = self._extend(self._heads[turn], [message])
        self._answered[self._heads[turn]] = turn

    def _extend(self, start: bytes, messages: Sequence[Message]) -> bytes:
        chain = _chain(start, messages)
        for before, message in zip(chain, messages, strict=False):
            self._next[before] = _text(message)
        return chain[-1]

    def _fork(
        self, messages: Sequence[Message], chain: Sequence[bytes], parent: int | None
    ) -> Fork | None:
        if not self._heads or (parent is not None and parent not in self._continued):
            return None
        common = max(n for n, h in enumerate(chain) if h in self._next or h in self._asked)
        was = self._next.get(chain[common], "")
        now = _text(messages[common]) if common < len(messages) else ""
        if not now:
            return Fork("repeated" if chain[-1] in self._asked else "shortened", common, was, now)
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
    """A digest that only calls with equal messages have."""
    return _chain(_START, messages)[-1]


def _chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """A digest of every beginning of messages."""
    chain = [start]
    for message in messages:
        text = _text(message).encode("utf-8", "surrogatepass")
        chain.append(hashlib.blake2b(chain[-1] + text, digest_size=16).digest())
    return chain


def _text(message: Message) -> str:
    """Return what of a message is compared."""
    compared = dict(message)
    if calls := compared.get("tool_calls"):
        compared["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(compared, sort_keys=True)
