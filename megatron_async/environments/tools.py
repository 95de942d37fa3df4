"""A class whose public methods are tools, and the calls that a policy writes.

Invariants
- A tool is described to the policy by its types and its docstring; one that cannot be described is
  refused by name before anything starts.
- Whatever is wrong with a call (no such tool, broken JSON, wrong arguments, an exception) is
  the tool's answer to the policy; none ends an episode.
- What looks like a call and cannot be read stays in the text: no character of an answer vanishes.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import ClassMethodDescriptorType, MethodDescriptorType
from typing import Any, Final

from megatron_async.environments.interface import ToolCall
from megatron_async.environments.json_text import json_text
from megatron_async.environments.tool_arguments import (
    Tool,
    argument_types,
    converted,
    described_tool,
)
from megatron_async.errors import UserError, short_repr
from megatron_async.tasks.base import Message

NOT_TOOLS: Final = frozenset({"reset", "step", "state", "restore", "get_reward", "close"})
"""Public methods of an environment that are no tools."""
_UNDESCRIBED: Final = ({"type": "function", "function": {"name": "-"}},)
"""What parsers get where nothing describes a tool: without any they look for no call."""
_NO_METHODS: Final = (
    type,
    functools.cached_property,
    MethodDescriptorType,
    ClassMethodDescriptorType,
)
"""Attributes that are no methods of the user's; the last two are those of built-in types."""
MOST_NESTED: Final = 64
"""Levels of a call's arguments; what is far deeper, Python can read and not write again."""


def tools_of(environment: Any, name: str) -> dict[str, Tool]:
    """Return the public methods of an environment that has no `step`, by name.

    A method is whatever the environment's class makes callable: a function, a class method, a
    static method, a cached or partial one, another descriptor. Attributes of the object, classes
    and properties are not tools; properties are not read. Raises UserError.
    """
    if hasattr(environment, "step"):
        return {}
    tools: dict[str, Tool] = {}
    for method in dir(type(environment)):
        if method.startswith("_") or method in NOT_TOOLS:
            continue
        found = inspect.getattr_static(type(environment), method, None)
        if isinstance(found, _NO_METHODS) or inspect.isdatadescriptor(found):
            continue
        if not hasattr(found, "__get__"):
            continue  # a value that can be called, as an alias of a type or a function of C
        try:
            tool = getattr(environment, method)
        except Exception as error:  # the user's descriptor may raise anything
            raise UserError(
                f"environment.name {name!r}: the attribute {method!r} cannot be read: "
                f"{error!r} (one that is not a tool begins with _)"
            ) from error
        if callable(tool):
            tools[method] = tool
    if not tools:
        raise UserError(
            f"environment.name {name!r} has neither `step` nor a public method to be a tool"
        )
    return tools


def described(tools: Mapping[str, Tool], name: str) -> list[dict[str, Any]]:
    """Return the tools as chat templates take them (JSON schemas). Raises UserError."""
    schemas = []
    for method, tool in tools.items():
        try:
            schemas.append(described_tool(method, tool))
        except Exception as error:  # libraries raise several kinds about types and docstrings
            raise UserError(
                f"environment.name {name!r}: the tool {method!r} cannot be described: {error} "
                "(a tool needs typed arguments and a docstring with `Args:`; a method that is "
                "none begins with _)"
            ) from error
    return schemas


class CallReader:
    """Finds the calls in what a policy has written, by one of SGLang's parsers.

    Without `schemas` (what plays by `step` describes no tools) a call may have any name.
    """

    def __init__(self, parser: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._parser = parser
        self._schemas = schemas

    def check(self) -> None:
        """Check that SGLang has the parser. Raises UserError."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = FunctionCallParser.ToolCallParserEnum
        if self._parser not in known:
            raise UserError(
                f"episode.tool_parser is {self._parser!r}; it must be one of "
                f"{', '.join(sorted(known))}"
            )
        try:
            self.read("")
        except ValueError as error:  # one that needs what no setting gives
            raise UserError(f"episode.tool_parser is {self._parser!r}: {error}") from error

    def read(self, text: str) -> tuple[str, tuple[ToolCall, ...], str]:
        """The text around calls, the calls, and what is wrong with the rest (empty: nothing)."""
        from sglang.srt.entrypoints.openai.protocol import Tool as ToolModel
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        tools = [ToolModel.model_validate(schema) for schema in self._schemas or _UNDESCRIBED]
        parser = FunctionCallParser(tools, self._parser)
        if not parser.has_tool_call(text):
            return text, (), ""
        try:
            with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
                rest, items = parser.parse_non_stream(text)
            calls = tuple(_call(item.name or "", item.parameters) for item in items)
        except Exception as error:  # noqa: BLE001 - parsers raise all kinds over such texts
            return text, (), f"Error: the call cannot be read: {error}"
        names = [str(schema["function"]["name"]) for schema in self._schemas]
        known = tuple(call for call in calls if call.name in names or not names)
        # Parsers leave out broken JSON, with its text.
        marks = (parser.detector.bot_token, getattr(parser.detector, "tool_call_start_token", ""))
        begun = max((text.count(mark) for mark in (*marks, text) if mark), default=0)
        if len(known) < max(begun, len(calls)):
            what = f"Error: a call cannot be read, or its tool is none of: {', '.join(names)}"
            return text, known, what
        return rest, calls, ""


def _call(name: str, parameters: str) -> ToolCall:
    arguments = json.loads(parameters or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name!r} are {short_repr(arguments)}, not an object")
    if is_nested_deeply(arguments):
        raise ValueError(f"the arguments of {name!r} are nested more than {MOST_NESTED} times")
    return ToolCall(name, arguments)


def is_nested_deeply(value: Any) -> bool:
    """Return whether a value of JSON is nested more than `MOST_NESTED` times."""
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def bound(tools: Mapping[str, Tool], call: ToolCall) -> Callable[[], Any] | str:
    """Return the call to make, or the message for the policy that it cannot be made."""
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name!r}; there are: {', '.join(tools)}"
    try:
        signature = inspect.signature(tool)
        arguments = signature.bind(**call.arguments).arguments
    except TypeError as error:
        return f"Error: {call.name}: {error}"
    types = argument_types(tool)
    for name, given in arguments.items():
        if given is None and signature.parameters[name].default is None:
            continue  # as in `count: int = None`
        try:
            arguments[name] = converted(types[name], given)
        except ValueError as error:
            return f"Error: {call.name}: {name} is {short_repr(given)}: {error}"
    return lambda: tool(**arguments)


def tool_message(name: str, returned: Any) -> Message:
    """Return the message with a tool's result for the policy: text, or else JSON.

    Raises TypeError or ValueError for an object that cannot be written as either.
    """
    content = returned
    if not isinstance(returned, str):
        content = json_text(returned, default=_plain)
    # Half of a surrogate pair, which a policy can put into a call, is no text.
    return {"role": "tool", "name": name, "content": content.encode(errors="replace").decode()}


def _plain(value: Any) -> Any:
    """Return a value of JSON for an object that is none. Raises TypeError."""
    if isinstance(value, Enum):
        return value.value
    text = str(value)
    if hex(id(value)) in text:  # a generator, or an object that has no text of its own
        raise TypeError(f"the tool returned a {type(value).__name__}, which is no text and no JSON")
    return text
