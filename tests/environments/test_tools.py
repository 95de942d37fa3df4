"""Tests how tools are described to a policy, and the calls that a policy writes."""

from __future__ import annotations

import asyncio
import enum
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from megatron_async.environments.environment_runner import EnvironmentRunner, Threads
from megatron_async.environments.interface import ToolCall
from megatron_async.environments.tools import bound, described, tool_message, tools_of
from megatron_async.errors import UserError

PROMPT = [{"role": "user", "content": "q"}]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Pair(enum.Enum):
    FIRST = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int
    y: float = 0.0


class Box(TypedDict):
    corners: list[Point]


class Tree(TypedDict):
    children: list[Tree]


def tool_of(hint: Any) -> Callable[..., Any]:
    """Return a tool with one argument of type `hint`, which returns the argument."""

    def tool(value: Any) -> Any:
        """Return a value.

        Args:
            value: The value.
        """
        return value

    tool.__annotations__ = {"value": hint}
    return tool


def result_of(hint: Any, given: Any) -> Any:
    """Call a tool whose argument has type `hint`; return its result or the error message."""
    call = bound({"tool": tool_of(hint)}, ToolCall("tool", {"value": given}))
    return call if isinstance(call, str) else call()


@pytest.mark.parametrize(
    ("hint", "given", "found"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (int, 3.0, 3),
        (int, 10**30, 10**30),
        (float, "0.5", 0.5),
        (bool, "true", True),
        (str, "3", "3"),
        (int | None, "null", None),
        (int | str, "3", "3"),
        (int | float, "2.5", 2.5),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (Literal["a", 1], "1", 1),
        (Color, "blue", Color.BLUE),
        (Point, {"x": 1}, Point(1)),
        (Box, {"corners": [{"x": 1, "y": 2}]}, {"corners": [Point(1, 2.0)]}),
        (Any, {"a": [1.5, "1", True]}, {"a": [1.5, "1", True]}),
    ],
)
def test_tool_argument_is_converted_to_its_type_when_nothing_is_lost(
    hint: Any, given: Any, found: Any
) -> None:
    result = result_of(hint, given)
    assert (type(result), result) == (type(found), found)


@pytest.mark.parametrize(
    ("hint", "given"),
    [
        (int, True),
        (int, 2.5),
        (int, "three"),
        (int, None),
        (int, 1e23),
        (float, "nan"),
        (float, 10**400),
        (float, 2**53 + 1),
        (bool, 1),
        (str, 3),
        (list[int], [1, True]),
        (list[str], "ab"),
        (tuple[int, int], [1, 2, 3]),
        (dict[str, int], {"a": 1.5}),
        (Literal[1], True),
        (Color, "green"),
        (Level, True),
        (Point, {"x": 1, "z": 2}),
        (Annotated[int, Field(ge=1)], 0),
    ],
)
def test_tool_call_returns_an_error_when_an_argument_has_another_type(
    hint: Any, given: Any
) -> None:
    result = result_of(hint, given)
    assert isinstance(result, str)
    assert result.startswith("Error: tool: value is ")


def test_tool_argument_may_be_null_when_its_default_is_none() -> None:
    def tool(count: int = None) -> Any:  # type: ignore[assignment]  # noqa: RUF013
        return count

    call = bound({"tool": tool}, ToolCall("tool", {"count": None}))
    assert callable(call) and call() is None


class Counted:
    """A decorator whose object binds a method with a `__get__` of its class."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.tool = tool

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return functools.partial(self.tool, instance)


def look(self: Any, word: str, count: int = 1) -> str:
    """Look a word up.

    Args:
        word: The word.
        count: How many lines.
    """
    return f"{word} {count}"


def documented(function: Any) -> Any:
    """Give a function the docstring of `look`."""
    function.__doc__ = look.__doc__
    return function


@documented
def look_without_object(word: str, count: int = 1) -> str:
    return look(None, word, count)


@documented
async def look_later(self: Any, word: str, count: int = 1) -> str:
    return look(self, word, count)


def tools_with(**members: Any) -> dict[str, Callable[..., Any]]:
    return tools_of(type("Tools", (), {"reset": lambda self, **row: None, **members})(), "Tools")


@pytest.mark.parametrize(
    "member",
    [
        look,
        classmethod(look),
        staticmethod(look_without_object),
        functools.lru_cache(look),
        functools.cache(look),
        classmethod(functools.cache(look)),  # type: ignore[arg-type]
        functools.partialmethod(look),
        functools.partialmethod(look, count=1),
        Counted(look),
        look_later,
        functools.partialmethod(look_later),
    ],
    ids=lambda member: type(member).__name__,
)
def test_method_is_offered_by_its_name_when_it_is_not_a_plain_function(member: Any) -> None:
    tools = tools_with(search=member)
    [schema] = described(tools, "Tools")
    function = schema["function"]
    assert (function["name"], function["description"]) == ("search", "Look a word up.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "The word."},
            "count": {"type": "integer", "description": "How many lines."},
        },
        "required": ["word"],
    }
    call = bound(tools, ToolCall("search", {"word": "a"}))
    assert callable(call)
    result = call()
    assert (asyncio.run(result) if asyncio.iscoroutine(result) else result) == "a 1"


def test_method_with_two_names_is_described_once_by_each_name() -> None:
    schemas = described(tools_with(find=look, search=look), "Tools")
    assert [schema["function"]["name"] for schema in schemas] == ["find", "search"]


class WithoutObject:
    """Look a word up.

    Args:
        word: The word.
    """

    def __call__(self, word: str) -> str:
        return word


@pytest.mark.parametrize(
    "member",
    [math.sqrt, list[int], int | None, NewType("ID", int), threading.Lock, WithoutObject(), Color],
    ids=["function of C", "alias", "union", "new type", "type of C", "object", "class"],
)
def test_callable_class_attribute_is_not_a_tool_when_it_is_not_a_method(member: Any) -> None:
    assert list(tools_with(look=look, search=member)) == ["look"]


def test_methods_of_a_built_in_base_class_are_not_tools() -> None:
    tools = type("Tools", (dict,), {"look": look})()
    assert list(tools_of(tools, "Tools")) == ["look"]


def test_property_is_neither_read_nor_offered_as_a_tool() -> None:
    def unread(self: Any) -> None:
        raise RuntimeError("no game has started")

    members = {"board": property(unread), "cards": functools.cached_property(unread), "Kind": Color}
    assert list(tools_with(look=look, limit=3, **members)) == ["look"]


@documented
def yields(self: Any, word: str) -> Iterator[str]:
    yield word


@documented
async def yields_later(self: Any, word: str) -> AsyncIterator[str]:
    yield word


@documented
def by_position(self: Any, word: str, /) -> str:
    return word


@documented
def of_many(self: Any, *words: str) -> str:
    return "".join(words)


@documented
def of_no_type(self: Any, word) -> str:  # type: ignore[no-untyped-def]
    return str(word)


@documented
def of_unknown_type(self: Any, word: missing.Lock) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(word)


@documented
def of_a_class(self: Any, word: Threads) -> str:
    return str(word)


@documented
def of_pairs(self: Any, word: Pair) -> str:
    return str(word)


@documented
def of_itself(self: Any, word: Tree) -> str:
    return str(word)


class Unreadable:
    def __get__(self, instance: Any, owner: type) -> Any:
        raise ValueError("no connection")


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (yields, "it is a generator; return a list"),
        (yields_later, "it is a generator; return a list"),
        (functools.cache(look_later), "can be awaited only once"),
        (by_position, "cannot be passed by keyword"),
        (of_many, "cannot be passed by keyword"),
        (of_no_type, "'word' has no type"),
        (of_unknown_type, "'missing' is not defined"),
        (of_a_class, "Unable to generate pydantic-core schema"),
        (of_itself, "recursion"),
        (of_pairs, r"Pair\.FIRST is neither text nor a number"),
        (Unreadable(), r"cannot be read: ValueError\('no connection'\)"),
    ],
)
def test_method_is_refused_by_name_when_it_cannot_be_offered(member: Any, reason: str) -> None:
    with pytest.raises(UserError, match=rf"'search' .*({reason})"):
        described(tools_with(look=look, search=member), "Tools")


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Color, {"enum": ["red", "blue"], "type": "string"}),
        (list[Color], {"items": {"enum": ["red", "blue"], "type": "string"}, "type": "array"}),
        (Level, {"enum": [1], "type": "integer"}),
        (Point, {"properties": {"x": {"type": "integer"}, "y": {"type": "number"}}}),
        (Box, {"properties": {"corners": {"items": {"required": ["x"]}}}}),
        (Point | None, {"anyOf": [{"required": ["x"]}, {"type": "null"}]}),
        (tuple[int, ...], {"items": {"type": "integer"}, "type": "array"}),
        (Annotated[int, Field(ge=1)], {"minimum": 1, "type": "integer"}),
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (int | None, {"type": "integer", "nullable": True}),
    ],
)
def test_tool_argument_is_described_with_what_its_type_permits(hint: Any, schema: Any) -> None:
    [found] = described({"tool": tool_of(hint)}, "Tools")
    value = found["function"]["parameters"]["properties"]["value"]
    assert value["description"] == "The value."
    assert_contains(value, schema)


def assert_contains(found: Any, expected: Any) -> None:
    """Check that `found` has everything that `expected` has, at every level."""
    if isinstance(expected, dict):
        for key, inner in expected.items():
            assert_contains(found[key], inner)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_contains(left, right)
    else:
        assert found == expected


class Own:
    """An object whose text is Python's default, with its address."""


@pytest.mark.parametrize("returned", [(n for n in (1, 2)), iter([1]), Own(), {"a": [Own()]}, look])
def test_tool_result_is_refused_when_its_text_is_an_address(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"the tool returned a .*, which is neither text nor JSON"):
        tool_message("tool", returned)


def test_tool_result_shows_the_values_of_enums_when_it_is_json() -> None:
    returned = {"colors": [Color.RED, Level.LOW], "of": Point(1)}
    content = tool_message("tool", returned)["content"]
    assert content == '{"colors": ["red", 1], "of": "Point(x=1, y=0.0)"}'


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ({"city": "東京", "note": "naïve 😀"}, '{"city": "東京", "note": "naïve 😀"}'),
        (["Zürich", {"🗻": "富士山"}], '["Zürich", {"🗻": "富士山"}]'),
        ({"half": "a\ud83d"}, '{"half": "a\\ud83d"}'),
        ({"color": Color.RED, "by": "Ü"}, '{"color": "red", "by": "Ü"}'),
        ("naïve 😀", "naïve 😀"),
    ],
)
def test_tool_result_reaches_the_policy_literally_when_it_is_not_ascii(
    returned: Any, content: str
) -> None:
    message = tool_message("tool", returned)
    assert message["content"] == content
    message["content"].encode()


def next_of_nothing(self: Any) -> Any:
    """Take the next of no values."""
    return next(iter(()))


async def next_of_nothing_later(self: Any) -> Any:
    """Take the next of no values."""
    return next(iter(()))


@pytest.mark.parametrize(
    ("member", "content"),
    [
        (next_of_nothing, "Error: StopIteration: "),
        (next_of_nothing_later, "Error: RuntimeError: coroutine raised StopIteration"),
    ],
)
async def test_tool_error_reaches_the_policy_when_it_is_a_stop_iteration(
    member: Any, content: str
) -> None:
    tools = type("Tools", (), {"reset": lambda self, **row: None, "draw": member})
    threads = Threads(1)
    runner = EnvironmentRunner(tools, "own.py:Tools", threads, 5.0)
    await runner.reset({}, PROMPT)
    reply = await asyncio.wait_for(runner._tool(ToolCall("draw"), 5.0), 10)
    threads.close()
    assert reply["content"] == content
