"""Columns of a row: the published layouts, and any other by setting.

A layout gives names to columns and, where a data set hides the answer in a solution, the way to
find it. `Columns.problem` turns a row into a problem or refuses it, naming place and column.
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from megatron_async.config.data import ColumnsConfig
from megatron_async.config.files import parse_json
from megatron_async.errors import UserError, short_repr
from megatron_async.tasks.answers import final_answer, last_boxed
from megatron_async.tasks.base import Message, Problem, row_payload

_LARGEST_PRIORITY: Final = 1_000_000
_ROLES: Final = ("system", "user", "assistant", "tool")
_MISSING: Final = object()
CONTENT_FIELDS: Final = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)
"""Fields of a message that hold content of the assistant."""


def _after_hashes(text: str) -> str | None:
    """GSM8K: what follows the last `####`, without commas between thousands."""
    answer = final_answer(text, "####")
    return None if answer is None else answer.replace(",", "")


@dataclass(frozen=True)
class Columns:
    """Names of columns; where there are several, the first that a row has counts.

    `answer` empty: rows have none, or have it in `solution`, where `find_answer` reads it.
    `template`: how prompts are put.
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...] = ()
    solution: tuple[str, ...] = ()
    find_answer: Callable[[str], str | None] = last_boxed
    response: str = "response"
    priority: str = "priority"
    template: str = "{question}"

    @classmethod
    def of(cls, layout: str, settings: ColumnsConfig, template: str = "") -> "Columns":
        """The layout's, and what the settings call otherwise; `template`: the settings' own.

        Raises UserError for a template that cannot be read.
        """
        changes: dict[str, Any] = settings.model_dump(exclude_none=True)
        if settings.prompt is not None:
            changes["prompt"] = (settings.prompt,)
        if settings.answer is not None:
            changes |= {"answer": (settings.answer,) if settings.answer else (), "solution": ()}
        if template:
            changes["template"] = template
        columns = replace(LAYOUTS[layout], **changes)
        _ = columns.named
        return columns

    @cached_property
    def named(self) -> frozenset[str]:
        """The columns in the template. Raises UserError."""
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(self.template) if name}
        except ValueError as error:
            raise UserError(f"task.prompt_template {self.template!r}: {error}") from error
        return frozenset(names - {"question"})

    def problem(self, row: Mapping[str, Any], where: str, *, answered: bool = True) -> Problem:
        """The problem of a row; without `answered` it needs no answer. Raises UserError."""
        name, prompt = self._first(row, self.prompt, where, "columns.prompt")
        messages = chat_messages(prompt, f"{where}, column {name!r}") if _is_list(prompt) else ()
        if messages and messages[-1]["role"] != "user":
            raise UserError(
                f"{where}, column {name!r} ends with a message of {messages[-1]['role']!r}; a "
                "prompt ends with the user's"
            )
        question = messages[-1]["content"] if messages else _text(prompt, name, where)
        # A mapping of which a part is used stays whole, and so does a conversation.
        used = {self.priority} if len(messages) > 1 else {name, self.priority}
        answer = ""
        if answered and (self.answer or self.solution):
            name, answer = self._answer(row, where)
            used.add(name)
        metadata = {key: value for key, value in row.items() if key not in used}
        payload = row_payload(question, answer, metadata)
        priority = self._priority(row, where)
        fields = _fields(metadata) if self.named else {}
        return Problem(question, payload, fields, priority, messages, self.template, where)

    def example(self, row: Mapping[str, Any], where: str) -> tuple[Problem, str]:
        """The problem and the response of a row to learn from. Raises UserError."""
        name, response = self._first(row, (self.response,), where, "columns.response")
        return self.problem(row, where, answered=False), _text(response, name, where)

    def _answer(self, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        if not self.solution or any(value_at(row, name) is not _MISSING for name in self.answer):
            name, answer = self._first(row, self.answer, where, "columns.answer")
            return name, _text(answer, name, where)
        name, solution = self._first(row, self.solution, where, "columns.answer")
        answer = (self.find_answer(_text(solution, name, where)) or "").strip()
        if not answer:
            raise UserError(f"{where}: no answer in column {name!r}, got {short_repr(solution)}")
        return name, answer

    def _priority(self, row: Mapping[str, Any], where: str) -> int:
        priority = row.get(self.priority, 0)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(
                f"{where}: `{self.priority}` must be a whole number, got {short_repr(priority)}"
            )
        if abs(priority) > _LARGEST_PRIORITY:
            raise UserError(
                f"{where}: `{self.priority}` must be between -{_LARGEST_PRIORITY} and "
                f"{_LARGEST_PRIORITY}, got {short_repr(priority)}"
            )
        return priority

    @staticmethod
    def _first(
        row: Mapping[str, Any], names: Sequence[str], where: str, setting: str
    ) -> tuple[str, Any]:
        """Return name and value of the first of these columns. Raises UserError."""
        for name in names:
            value = value_at(row, name)
            if value is not _MISSING:
                return name, value
        wanted = " or ".join(f"`{name}`" for name in names)
        columns = short_repr(sorted(row))
        raise UserError(f"{where}: there is no column {wanted} among {columns} ({setting})")


# The answers of Hendrycks' MATH stand in its solutions, those of MATH-500 in a column.
LAYOUTS: Final[Mapping[str, Columns]] = MappingProxyType(
    {
        "rows": Columns(("prompt",), ("answer",)),
        "gsm8k": Columns(("question",), (), ("answer",), _after_hashes, response="answer"),
        "math": Columns(("problem",), ("answer",), ("solution",), response="solution"),
        "aime": Columns(("problem", "Problem", "question", "Question"), ("answer", "Answer")),
        "deepscaler": Columns(("problem",), ("answer",), ("solution",), response="solution"),
        "dapo_math": Columns(("prompt",), ("reward_model.ground_truth",), response="solution"),
        "mbpp_plus": Columns(
            ("prompt",),
            response="code",
            template="{question}\n\nYour code must pass these tests:\n\n{test_list}",
        ),
        "minif2f": Columns(
            ("formal_statement",),
            template="Complete the following Lean 4 code:\n\n```lean4\n{header}{question}\n```",
        ),
    }
)


def _fields(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Columns that a prompt template may name: texts, numbers and lists of texts, a line each."""
    fields = {}
    for key, value in metadata.items():
        if isinstance(value, (str, int, float)):
            fields[key] = str(value)
        elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            fields[key] = "\n".join(value)
    return fields


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value at a name, or at a path with dots; a value that equals nothing where none is."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _text(value: Any, name: str, where: str) -> str:
    infinite = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or infinite:
        raise UserError(f"{where}: `{name}` must be a text or a number, got {short_repr(value)}")
    text = str(value)
    if not text or text.isspace():
        raise UserError(f"{where}: `{name}` is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: `{name}` holds half of a surrogate pair, got {short_repr(value)}"
        ) from error
    return text


def chat_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Return a row's chat messages as templates take them. Raises UserError.

    Contents become text. Every other field stays, but for empty ones; the arguments of calls become
    objects. A call or a thought needs no content, nor does the result of a tool.
    """
    if not _is_list(value):
        raise UserError(f"{where} must be a list of chat messages, got {short_repr(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise UserError(
                f"{where}, message {number}: `role` must be one of {', '.join(_ROLES)}, "
                f"got {short_repr(role)}"
            )
        place = f"{where}, message {number}"
        fields = {k: v for k, v in message.items() if v not in (None, "", [], {})}
        if calls := fields.get("tool_calls"):
            fields["tool_calls"] = _tool_calls(calls, place)
        may_be_empty = role == "tool" or any(name in fields for name in CONTENT_FIELDS)
        content = _content(fields.get("content", ""), place, may_be_empty=may_be_empty)
        messages.append({**fields, "role": role, "content": content})
    return tuple(messages)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message with arguments as objects. Raises UserError.

    OpenAI's form has the arguments as a text of JSON, which templates would quote once more.
    """
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where}: `tool_calls` is {short_repr(calls)}; it must be a list of calls, each "
                "with the `name` and the `arguments` of a function"
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, f"{where}: the arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise UserError(
                f"{where}: the arguments of {function['name']} are {short_repr(arguments)}; they "
                "must be an object"
            )
        named = {**{k: v for k, v in function.items() if v is not None}, "arguments": arguments}
        whole = {k: v for k, v in call.items() if v is not None}
        found.append({**whole, "function": named} if "function" in call else named)
    return found


def row_tools(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the JSON schemas in a row's column `tools`, which may be a text. Raises UserError."""
    tools = row.get("tools") or []
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}, column 'tools'")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where}: `tools` is {short_repr(tools)}; it must be a list of JSON schemas"
        )
    return tools


def _content(content: Any, where: str, *, may_be_empty: bool) -> str:
    if content == "" and may_be_empty:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise UserError(
                    f"{where} holds a part of type {short_repr(kind)}: only text can be trained "
                    "on, images and sounds cannot"
                )
        content = "".join(str(part["text"]) for part in content)
    return _text(content, "content", where)
