"""Reads text, JSON and YAML files of users, so that every invalid file causes one clear message.

Invariants
- Files are UTF-8, with or without a byte order mark.
- Returned values consist of the types of JSON only. Every failure is a UserError whose message
  begins with the argument `what`, a name of the thing that was read, such as `config file x.yaml`.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_async.errors import UserError, short_repr

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""Names of the tokenizer file in a model's directory; the first that exists is used."""
_MAX_LEVELS = 32
_MAX_VALUES = 1_000_000
# Errors that PyYAML raises for a value that does not fit its type tag, such as the empty text in
# `!!int ""`.
_MISFITS = (ValueError, TypeError, LookupError, AttributeError)
_MISFIT = "a value does not fit its tag"


def read_text(path: Path, what: str) -> str:
    """Return the text of a file.

    Raises:
        UserError: If it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:  # The path has a null byte.
        raise UserError(f"{what} cannot be read: {error}") from error


def parse_json(text: str, what: str) -> Any:
    """Return the JSON value of `text`.

    Raises:
        UserError: If it is not valid JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise UserError(
            f"{what} is not valid JSON: {error.msg} ({line}column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is not valid JSON: {_reason(error)}") from error


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        UserError: If the file does not contain a JSON object.
    """
    content = parse_json(read_text(path, what), what)
    if not isinstance(content, dict):
        raise UserError(f"{what} must contain a JSON object, got {type(content).__name__}")
    return content


def parse_yaml(text: str, what: str) -> Any:
    """Return the YAML value of `text`. No mapping may have a key twice.

    Raises:
        UserError: If it is not valid YAML, or has values that JSON cannot express.
    """
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{what} is not valid YAML: {error.problem}{where}") from error
    except (yaml.YAMLError, RecursionError, *_MISFITS) as error:
        raise UserError(f"{what} is not valid YAML: {_reason(error)}") from error
    _check_plain(content, what, "", itertools.count(1))
    return content


def _check_plain(value: object, what: str, where: str, seen: Iterator[int], depth: int = 0) -> None:
    """Check that a YAML value could also be written as JSON.

    YAML's aliases can create cycles and exponentially many values. Therefore the number of values
    and the number of nested levels are limited.

    Args:
        value: The value to check, with everything in it.
        what: Name of the text that was parsed, for messages.
        where: Path of `value` in the text, for messages.
        seen: Counter of all values that were checked.
        depth: Number of lists and mappings around `value`.

    Raises:
        UserError: If the value cannot be written as JSON, or exceeds a limit.
    """
    if depth > _MAX_LEVELS or next(seen) > _MAX_VALUES:
        raise UserError(f"{what} has more than {_MAX_LEVELS} levels or {_MAX_VALUES:,} values")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str) or not _is_plain(key):
                raise UserError(
                    f"{what}: {where or 'the mapping'} has the key {short_repr(key)}; keys must be "
                    "texts"
                )
            _check_plain(inner, what, f"{where}.{key}" if where else key, seen, depth + 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_plain(inner, what, f"{where}.{number}", seen, depth + 1)
    elif not _is_plain(value):
        raise UserError(
            f"{what}: {where or 'the value'} is {short_repr(value)}; a value must be a text, a "
            "finite number of at most 64 bits, true, false, null, a list or a mapping"
        )


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return value is None


class _Loader(yaml.SafeLoader):
    """YAML loader for plain types that refuses duplicate keys; PyYAML would silently keep the last
    one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"{short_repr(key.value)} is set twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "integer string conversion" in str(error):
        return "it holds a number of thousands of digits"
    return str(error) if isinstance(error, ValueError | yaml.YAMLError) else _MISFIT


def named_templates(folder: Path) -> list[Path]:
    """Return the sorted files with the named chat templates of the tokenizer in `folder`.

    transformers saves a tokenizer's named templates as `additional_chat_templates/NAME.jinja`.
    """
    return sorted((folder / "additional_chat_templates").glob("*.jinja"))


def tokenizer_digest(model_path: str) -> str:
    """Return the SHA-256 of a model's tokenizer and chat templates; empty if there is no
    tokenizer."""
    folder = Path(model_path)
    files = [file for name in TOKENIZER_FILES if (file := folder / name).is_file()]
    if not files:
        return ""
    template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    named = {file.stem: read_text(file, f"{file}") for file in named_templates(folder)}
    text: object = None
    # transformers ignores the templates in tokenizer_config.json if there are template files.
    if template.is_file():
        text = read_text(template, f"{template}")
    elif settings.is_file() and not named:
        text = read_json_object(settings, f"{settings}").get("chat_template")
    text = {"default": text, **named} if named else text
    try:
        content = files[0].read_bytes()
    except OSError as error:
        raise UserError(f"{files[0]} cannot be read: {error.strerror}") from error
    return hashlib.sha256(json.dumps(text).encode() + content).hexdigest()


def vocabulary_of(model_path: str) -> int | None:
    """Return the vocabulary size that a model's config.json states; None if it states none."""
    file = Path(model_path) / "config.json"
    size = read_json_object(file, f"{file}").get("vocab_size") if file.is_file() else None
    return size if type(size) is int else None
