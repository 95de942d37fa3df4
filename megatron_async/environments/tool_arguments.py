"""Describes the types of tool arguments as JSON schemas, and converts a policy's values to them.

Invariants
- The schema that a policy reads and the check of the policy's values come from the same type.
- A value is converted only if no information is lost. Every other value raises ValueError.
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
"""Types whose JSON schemas transformers can make; it describes other classes as empty objects."""
_PLAIN_GENERICS: Final = (typing.Union, UnionType, list, tuple, dict)
_MAX_EXACT: Final = 1 << 53
"""Largest magnitude up to which every float without a fraction stands for exactly one integer."""


def function_of(tool: Tool) -> Tool:
    """Return the plain function of a tool that is a bound method or a partial object."""
    while isinstance(tool, functools.partial) or inspect.ismethod(tool):
        tool = tool.func if isinstance(tool, functools.partial) else tool.__func__
    return tool


def argument_types(tool: Tool) -> dict[str, Any]:
    """Return the declared type of each argument of a tool by name.

    Raises:
        TypeError: An argument has no type, cannot be passed by keyword, or is an enum whose values
            JSON cannot represent.
        Exception: `typing.get_type_hints` failed, as for a type that does not exist.
    """
    hints = typing.get_type_hints(function_of(tool), include_extras=True)
    types = {}
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the argument {str(parameter)!r} cannot be passed by keyword")
        if parameter.name not in hints:
            raise TypeError(f"the argument {parameter.name!r} has no type")
        types[parameter.name] = hints[parameter.name]
        _check_enums(types[parameter.name])
    return types


def _check_enums(hint: Any) -> None:
    """Raise TypeError if a type has an enum whose values are neither text, numbers nor None."""
    for inner in (hint, *typing.get_args(hint)):
        if isinstance(inner, type) and issubclass(inner, Enum):
            for member in inner:
                if not isinstance(member.value, str | int | float | None):
                    raise TypeError(f"{inner.__name__}.{member.name} is neither text nor a number")


def described_tool(name: str, tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool, in the form that chat templates expect.

    transformers makes the schema; pydantic describes the types that transformers cannot.

    Args:
        name: Name under which the policy calls the tool.
        tool: The tool.

    Raises:
        TypeError: The tool cannot be called with JSON values, or has no result that can be shown.
        Exception: transformers or pydantic failed because of a type or the docstring.
    """
    from transformers.utils import get_json_schema

    _check_result(function_of(tool))
    types = argument_types(tool)
    special = {argument: hint for argument, hint in types.items() if not _is_plain(hint)}
    returned = typing.get_type_hints(function_of(tool)).get("return", object)

    def stand_in() -> None:
        """Represent the tool for `get_json_schema`, which needs a name, types and a docstring.

        The tool may be a callable object that does not have these attributes.
        """

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
    """Convert `given`, a JSON value that the policy wrote, to an object of type `hint`.

    Values that a model often writes in place of the declared type are accepted: a text that is the
    JSON of a fitting value is parsed, and a float without a fraction becomes an integer.

    Raises:
        ValueError: The value has another type, or would be changed by the conversion.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    failed: ValidationError | None = None
    for reading in _readings(given):
        try:
            # Lone surrogates, which a policy can write, are replaced, since UTF-8 cannot encode
            # them.
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
    # Refuse a conversion that changes the value, such as a large integer that becomes the nearest
    # float. Also refuse conversions between bools and numbers. `==` does not detect those, since
    # True equals 1 in Python.
    exact = not isinstance(plain, float) or plain == reading
    if not exact or isinstance(plain, bool) != isinstance(reading, bool):
        raise ValueError(f"Input would be changed to {plain!r}")
    return found


def _readings(given: Any) -> Iterator[Any]:
    """Yield `given`, then the other value that it may stand for, if there is one.

    A text may stand for the value of which it is the JSON, and a float without a fraction for an
    integer.
    """
    yield given
    if isinstance(given, str):
        with suppress(ValueError):
            yield from_json(given, allow_inf_nan=False)
    elif isinstance(given, float) and given.is_integer() and abs(given) <= _MAX_EXACT:
        yield int(given)


def _is_plain(hint: Any) -> bool:
    """Return whether transformers can make the JSON schema of type `hint`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return all(type(value) in _PLAIN for value in arguments)
    if arguments:
        return typing.get_origin(hint) in _PLAIN_GENERICS and all(map(_is_plain, arguments))
    return hint is None or hint in _PLAIN


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a JSON schema in which each `$ref` is replaced by its definition.

    Chat templates do not follow references.
    """
    if isinstance(schema, list):
        return [_inlined(inner, definitions) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{key: inner for key, inner in schema.items() if key != "$ref"}}
    return {key: _inlined(inner, definitions) for key, inner in schema.items()}


def _check_result(function: Tool) -> None:
    """Raise TypeError for a generator, or a cached coroutine, whose result cannot be shown."""
    cached = hasattr(function, "cache_info")
    inner = inspect.unwrap(function) if cached else function
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError("it is a generator; return a list instead")
    if cached and inspect.iscoroutinefunction(inner):
        raise TypeError("it caches a coroutine, which can be awaited only once")
