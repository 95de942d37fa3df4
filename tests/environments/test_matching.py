"""Tests which turn an agent's call continues, against a matcher that compares lists of messages."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.environments.matching import Branches, Match, call_digest

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: tuple[str, dict[str, Any]], ids: str = "call") -> dict[str, Any]:
    made = [
        {"id": f"{ids}{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def compared(messages: Messages) -> Messages:
    without = copy.deepcopy(messages)
    for message in without:
        for call in message.get("tool_calls", ()):
            del call["id"]
    return without


class Independent:
    """Reference matcher that keeps whole conversations and compares them message by message."""

    def __init__(self) -> None:
        self.calls: list[Messages] = []
        self.whole: list[Messages | None] = []
        self.parents: list[int | None] = []

    def parent(self, call: Messages) -> int | None:
        found = [
            (len(whole), turn)
            for turn, whole in enumerate(self.whole)
            if whole is not None and compared(call)[: len(whole)] == compared(whole)
        ]
        return max(found)[1] if found else None

    def forks(self, parent: int | None) -> bool:
        return bool(self.calls) and (parent is None or parent in self.parents)

    def common(self, call: Messages) -> int:
        """Return how many first messages of the call are also the first messages of a branch."""
        longest = 0
        for earlier, whole in zip(self.calls, self.whole, strict=True):
            branch = compared(whole or earlier)
            same = 0
            for message, other in zip(branch, compared(call), strict=False):
                if message != other:
                    break
                same += 1
            longest = max(longest, same)
        return longest


def ask(branches: Branches, call: Messages, answer: dict[str, Any] | None) -> Match:
    match = branches.match(call)
    turn = branches.begin(match.parent, match.new)
    if answer is not None:
        branches.answer(turn, answer)
    return match


TEXTS = st.sampled_from(["a", "b", "", "a ", "\ud800"])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_branches_match_and_fork_like_an_independent_matcher(data: st.DataObject) -> None:
    branches, reference = Branches(), Independent()
    for _ in range(data.draw(st.integers(1, 12))):
        earlier = data.draw(st.sampled_from([[], *reference.calls, *filter(None, reference.whole)]))
        call: Messages = copy.deepcopy(earlier[: data.draw(st.integers(0, len(earlier)))])
        for message in call:
            if data.draw(st.integers(0, 9)) == 0:
                message["content"] = data.draw(TEXTS)
        call += [user(text) for text in data.draw(st.lists(TEXTS, max_size=2))]
        call = call or [user("a")]
        match = branches.match(call)
        parent = reference.parent(call)
        assert match.parent == parent
        before = reference.whole[parent] if parent is not None else []
        assert before is not None
        assert list(match.new) == call[len(before) :]
        assert (match.fork is not None) == reference.forks(parent)
        if match.fork is not None:
            assert match.fork.at == reference.common(call)
            assert (match.fork.why == "repeated") == (
                compared(call) in map(compared, reference.calls)
            )
        turn = branches.begin(match.parent, match.new)
        answer = None
        if data.draw(st.booleans()):
            answer = assistant(data.draw(TEXTS))
            branches.answer(turn, answer)
        reference.calls.append([*before, *match.new])
        reference.whole.append(None if answer is None else [*call, answer])
        reference.parents.append(match.parent)


def test_fork_reason_is_determined_by_the_first_differing_message() -> None:
    tools = {"role": "tools", "content": "[]"}
    opening = [user("a"), assistant("yes"), user("b")]

    def why(*call: dict[str, Any]) -> tuple[str, int] | None:
        branches = Branches()
        ask(branches, opening[:1], opening[1])
        ask(branches, opening, assistant("no"))
        fork = branches.match(list(call)).fork
        return fork and (fork.why, fork.at)

    assert why(*opening, assistant("no"), user("c")) is None
    assert why(*opening) == ("repeated", 3)
    assert why(*opening[:2]) == ("shortened", 2)
    assert why(user("other")) == ("thread", 0)
    assert why(tools, *opening) == ("tools", 0)
    assert why(user("a"), assistant("yes "), user("b")) == ("answer", 1)
    assert why(*opening[:2], user("c")) == ("message", 2)
    branches = Branches()
    ask(branches, opening[:1], opening[1])
    fork = branches.match([user("a"), assistant("Yes"), user("b")]).fork
    assert fork is not None and '"yes"' in fork.was and '"Yes"' in fork.now


def test_branches_compare_arguments_of_tool_calls_but_not_their_ids() -> None:
    def continues(sent: dict[str, Any]) -> bool:
        branches = Branches()
        ask(branches, [user("a")], assistant("", ("f", {"x": 1, "y": 2})))
        return branches.match([user("a"), sent, user("b")]).fork is None

    assert continues(assistant("", ("f", {"y": 2, "x": 1}), ids="other"))
    assert not continues(assistant("", ("f", {"x": 1, "y": 3})))
    assert not continues(assistant("", ("g", {"x": 1, "y": 2})))


def test_call_digest_is_equal_only_when_the_messages_are_equal() -> None:
    assert call_digest([user("a"), user("b")]) == call_digest([user("a"), user("b")])
    assert call_digest([user("a"), user("b")]) != call_digest([user("ab")])
    assert call_digest([user("a")]) != call_digest([user("a"), user("b")])
