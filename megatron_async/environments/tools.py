"""Offers an environment's public methods to the policy as tools, and parses calls to these tools.

Invariants
- A tool is described to the policy by its argument types and its docstring. A tool that cannot be
  described is refused with its name before a run starts.
- Any error of a tool call (unknown tool, broken JSON, wrong arguments, an exception of the tool) is
  sent to the policy as the result of the call, and does not end the episode.
- Text that looks like a tool call but cannot be parsed stays in the text of the response, so no
  character of a response is lost.
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
"""Names of an environment's public methods that are not tools."""
_UNDESCRIBED: Final = ({"type": "function", "function": {"name": "-"}},)
"""Placeholder for the tools' schemas if there are none, because SGLang's parsers find no calls
without tools."""
_NO_METHODS: Final = (
    type,
    functools.cached_property,
    MethodDescriptorType,
    ClassMethodDescriptorType,
)
"""Types of class attributes that are not methods of the user. The last two are the types of methods
of built-in classes."""
MAX_NESTED: Final = 64
"""Largest nesting depth of a tool call's arguments. Python's json can parse much deeper values that
it cannot write again."""


def tools_of(environment: Any, name: str) -> dict[str, Tool]:
    """Return the tools of an environment object by name: its class's public methods.

    The result is empty if the object has `step`. A method is any class attribute that becomes
    callable on the object: a function, class method, static method, cached or partial method, or
    another descriptor. Attributes of the object, classes and properties are not tools, and
    properties are not read.

    Args:
        environment: The environment object.
        name: Setting `environment.name`, for error messages.

    Raises:
        UserError: The object has neither `step` nor a tool, or an attribute cannot be read.
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
            # A value without `__get__` is not a method, even if it is callable, as an alias of a
            # type is.
            continue
        try:
            tool = getattr(environment, method)
        except Exception as error:  # A user's descriptor may raise anything.
            raise UserError(
                f"environment.name {name!r}: the attribute {method!r} cannot be read: "
                f"{error!r}. If it is not a tool, let its name start with _."
            ) from error
        if callable(tool):
            tools[method] = tool
    if not tools:
        raise UserError(
            f"environment.name {name!r} has neither `step` nor a public method that can be a tool"
        )
    return tools


def described(tools: Mapping[str, Tool], name: str) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, in the form that chat templates expect.

    Args:
        tools: Tools by name.
        name: Setting `environment.name`, for error messages.

    Raises:
        UserError: A tool has an argument without a type, or no fitting docstring.
    """
    schemas = []
    for method, tool in tools.items():
        try:
            schemas.append(described_tool(method, tool))
        except Exception as error:  # The libraries raise many types of errors.
            raise UserError(
                f"environment.name {name!r}: the tool {method!r} cannot be described: {error}. "
                "A tool needs typed arguments and a docstring with `Args:`. If the method is not "
                "a tool, let its name start with _."
            ) from error
    return schemas


class CallReader:
    """Parses the tool calls in a response of the policy with one of SGLang's parsers."""

    def __init__(self, parser: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Create a reader of tool calls.

        Args:
            parser: SGLang's name of the parser (setting `episode.tool_parser`).
            schemas: JSON schemas of the tools. If empty, as for an environment with `step`, calls
                may have any name.
        """
        self._parser = parser
        self._schemas = schemas

    def check(self) -> None:
        """Check that SGLang has the parser of `episode.tool_parser`, and import it.

        Raises:
            UserError: SGLang does not have the parser, or cannot create it.
        """
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = FunctionCallParser.ToolCallParserEnum
        if self._parser not in known:
            raise UserError(
                f"episode.tool_parser is {self._parser!r}; it must be one of "
                f"{', '.join(sorted(known))}"
            )
        try:
            self.read("")
        except ValueError as error:  # Some parsers need arguments that no setting provides.
            raise UserError(f"episode.tool_parser is {self._parser!r}: {error}") from error

    def read(self, text: str) -> tuple[str, tuple[ToolCall, ...], str]:
        """Split the text of a response into text and tool calls.

        Returns:
            The text without the calls, the calls, and an empty error message. If a call cannot be
            parsed or names an unknown tool: the whole text, the calls that could be read, and an
            error message for the policy.
        """
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
        except Exception as error:  # noqa: BLE001 - parsers raise many types of errors
            return text, (), f"Error: the call cannot be read: {error}"
        names = [str(schema["function"]["name"]) for schema in self._schemas]
        known = tuple(call for call in calls if call.name in names or not names)
        # Parsers silently drop calls with broken JSON, together with their text. To notice that,
        # count the marks that start calls in the text.
        marks = (parser.detector.bot_token, getattr(parser.detector, "tool_call_start_token", ""))
        started = max((text.count(mark) for mark in (*marks, text) if mark), default=0)
        if len(known) < max(started, len(calls)):
            what = f"Error: a call cannot be read, or its tool is none of: {', '.join(names)}"
            return text, known, what
        return rest, calls, ""


def _call(name: str, parameters: str) -> ToolCall:
    """Parse the arguments of a tool call from JSON; raise ValueError if they are not an object."""
    arguments = json.loads(parameters or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of {name!r} are {short_repr(arguments)}; they must be an object"
        )
    if is_nested_deeply(arguments):
        raise ValueError(f"the arguments of {name!r} are nested more than {MAX_NESTED} times")
    return ToolCall(name, arguments)


def is_nested_deeply(value: Any) -> bool:
    """Return whether lists and objects of a JSON value are nested more than `MAX_NESTED` deep."""
    level = [value]
    for _ in range(MAX_NESTED):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def bound(tools: Mapping[str, Tool], call: ToolCall) -> Callable[[], Any] | str:
    """Convert the arguments of a tool call to the tool's types; return a function that calls it.

    Returns:
        A function without arguments that calls the tool, or an error message for the policy if the
        tool does not exist or the arguments do not fit.
    """
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
            # An argument that is declared as `count: int = None` may be None, although its type
            # does not allow that.
            continue
        try:
            arguments[name] = converted(types[name], given)
        except ValueError as error:
            return f"Error: {call.name}: {name} is {short_repr(given)}: {error}"
    return lambda: tool(**arguments)


def tool_message(name: str, returned: Any) -> Message:
    """Return the message that shows a tool's result to the policy: text as it is, else JSON.

    Raises:
        TypeError: A part of the result can be written neither as text nor as JSON.
        ValueError: The result cannot be written as JSON for another reason.
    """
    content = returned
    if not isinstance(returned, str):
        content = json_text(returned, default=_plain)
    # The result may repeat lone surrogates from the call, which a policy can write. They are
    # replaced, since UTF-8 cannot encode them.
    return {"role": "tool", "name": name, "content": content.encode(errors="replace").decode()}


def _plain(value: Any) -> Any:
    """Convert an object that JSON cannot represent: an enum to its value, any other to its text.

    Raises:
        TypeError: The object has no meaningful text, as a generator.
    """
    if isinstance(value, Enum):
        return value.value
    text = str(value)
    # Python's default text of an object contains its address, and tells a policy nothing.
    if hex(id(value)) in text:
        raise TypeError(
            f"the tool returned a {type(value).__name__}, which is neither text nor JSON"
        )
    return text
