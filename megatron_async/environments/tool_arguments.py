"""Types of a tool's arguments: their JSON schemas, and a policy's values converted to them.

Invariants
- The schema that a policy reads and the check of its values follow from the same type.
- A value is converted only where nothing is lost. Every other value raises ValueError.
"""

import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

Tool = Callable[..., Any]

_PLAIN: Final = (int, float, str, bool, NoneType, list, tuple, dict, Any)
"""Types that transformers describes by themselves; it describes other classes as empty objects."""
_PLAIN_GENERICS: Final = (typing.Union, UnionType, list, tuple, dict)
_MOST_EXACT: Final = 1 << 53
"""A whole float up to this magnitude stands for one integer only."""


def function_of(tool: Tool) -> Tool:
    """Return the function inside bound methods and partial objects."""
    while isinstance(tool, functools.partial) or inspect.ismethod(tool):
        tool = tool.func if isinstance(tool, functools.partial) else tool.__func__
    return tool


def argument_types(tool: Tool) -> dict[str, Any]:
    """Return the type of each argument by name.

    Raises TypeError for an argument that has no type or that cannot be given by name, and what
    `typing.get_type_hints` raises for a type that does not exist.
    """
    hints = typing.get_type_hints(function_of(tool), include_extras=True)
    types = {}
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the argument {str(parameter)!r} cannot be given by name")
        if parameter.name not in hints:
            raise TypeError(f"the argument {parameter.name!r} has no type")
        types[parameter.name] = hints[parameter.name]
        _check_enums(types[parameter.name])
    return types


def _check_enums(hint: Any) -> None:
    """Refuse enumerations of values that JSON does not have. Raises TypeError."""
    for inner in (hint, *typing.get_args(hint)):
        if isinstance(inner, type) and issubclass(inner, Enum):
            for member in inner:
                if not isinstance(member.value, str | int | float | None):
                    raise TypeError(f"{inner.__name__}.{member.name} is neither text nor a number")


def described_tool(name: str, tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool in the form that chat templates take.

    Types that transformers cannot describe are described by pydantic. Raises TypeError for a tool
    that cannot be called with JSON, and what both libraries raise about types and docstrings.
    """
    from transformers.utils import get_json_schema

    _check_result(function_of(tool))
    types = argument_types(tool)
    special = {argument: hint for argument, hint in types.items() if not _is_plain(hint)}
    returned = typing.get_type_hints(function_of(tool)).get("return", object)

    def stand_in() -> None:
        """Stand in for a tool that may be an object without a name, types and a docstring."""

    stand_in.__name__ = name
    stand_in.__doc__ = inspect.getdoc(tool.func if isinstance(tool, functools.partial) else tool)
    stand_in.__annotations__ = {**types, **dict.fromkeys(special, Any)}
    if _is_plain(returned):
        stand_in.__annotations__["return"] = returned
    parameters = inspect.signature(tool).parameters.values()
    typed = [parameter.replace(annotation=types[parameter.name]) for parameter in parameters]
    stand_in.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    schema: dict[str, Any] = get_json_schema(stand_in)
    properties = schema["function"]["parameters"]["properties"]
    for argument, hint in special.items():
        found = TypeAdapter(hint).json_schema()
        properties[argument] = {**_inlined(found, found.pop("$defs", {})), **properties[argument]}
    return schema


def converted(hint: Any, given: Any) -> Any:
    """Return `given`, a value of JSON, as an object of type `hint`.

    Text that holds the JSON of a fitting value is read, and a whole float becomes an integer.
    Raises ValueError where the value has another type or would change.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    failed: ValidationError | None = None
    for reading in _readings(given):
        try:
            # Half of a surrogate pair, which a policy can write, is no text.
            text = json.dumps(reading, ensure_ascii=False).encode(errors="replace")
            found = adapter.validate_json(text, strict=True, extra="forbid")
            break
        except ValidationError as error:
            failed = failed or error
    else:
        assert failed is not None
        first = failed.errors()[0]
        where = "".join(f"[{step!r}]" for step in first["loc"])
        raise ValueError(f"{where} {first['msg']}".strip())
    plain = found.value if isinstance(found, Enum) else found
    # Python holds True equal to 1, and large integers become the nearest float.
    exact = not isinstance(plain, float) or plain == reading
    if not exact or isinstance(plain, bool) != isinstance(reading, bool):
        raise ValueError(f"Input would become {plain!r}")
    return found


def _readings(given: Any) -> Iterator[Any]:
    """Yield the values that `given` may stand for without a loss."""
    yield given
    if isinstance(given, str):
        with suppress(ValueError):
            yield from_json(given, allow_inf_nan=False)
    elif isinstance(given, float) and given.is_integer() and abs(given) <= _MOST_EXACT:
        yield int(given)


def _is_plain(hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return all(type(value) in _PLAIN for value in arguments)
    if arguments:
        return typing.get_origin(hint) in _PLAIN_GENERICS and all(map(_is_plain, arguments))
    return hint is None or hint in _PLAIN


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by their definitions, since chat templates do not follow references."""
    if isinstance(schema, list):
        return [_inlined(inner, definitions) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{key: inner for key, inner in schema.items() if key != "$ref"}}
    return {key: _inlined(inner, definitions) for key, inner in schema.items()}


def _check_result(function: Tool) -> None:
    """Refuse a function whose result no policy can read. Raises TypeError."""
    cached = hasattr(function, "cache_info")
    inner = inspect.unwrap(function) if cached else function
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError("it is a generator; return a list instead")
    if cached and inspect.iscoroutinefunction(inner):
        raise TypeError("a cache keeps its coroutine, which can be awaited once only")
