"""Turns a row of a data file into a problem, by the column names of a layout or of the settings.

A layout is the set of column names of a published data set and, where that data set has its answers
inside solutions, the function that extracts them. `Columns.problem` turns a row into a problem, or
raises a UserError that names the row and the column.
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

_MAX_PRIORITY: Final = 1_000_000
_ROLES: Final = ("system", "user", "assistant", "tool")
_MISSING: Final = object()
CONTENT_FIELDS: Final = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)
"""Fields of a chat message, besides `content`, that carry content of the assistant."""


def _after_hashes(text: str) -> str | None:
    """Return what follows the last `####` in a GSM8K solution, without commas, or None."""
    answer = final_answer(text, "####")
    return None if answer is None else answer.replace(",", "")


@dataclass(frozen=True)
class Columns:
    """Names of the columns that a row's prompt, answer and response are in.

    If several names are listed for the same field, the first name that exists in a row is used. A
    name with dots leads into nested mappings.

    Attributes:
        prompt: Columns of the prompt.
        answer: Columns of the reference answer. If empty, the answer is taken from `solution`; rows
            have no answer if that is empty too.
        solution: Columns of a worked solution that contains the answer.
        find_answer: Extracts the answer from the solution; returns None if there is none.
        response: Column of the response to learn, for supervised fine-tuning.
        priority: Column of the scheduling priority.
        template: Template of the prompt.
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
        """Return the columns of a layout, with the names that the settings override.

        Args:
            layout: Name of a layout in `LAYOUTS`.
            settings: Column names that replace those of the layout where they are set.
            template: Prompt template that replaces the layout's; empty to keep the layout's.

        Raises:
            UserError: If the template is not a valid format string.
        """
        changes: dict[str, Any] = settings.model_dump(exclude_none=True)
        if settings.prompt is not None:
            changes["prompt"] = (settings.prompt,)
        if settings.answer is not None:
            changes |= {"answer": (settings.answer,) if settings.answer else (), "solution": ()}
        if template:
            changes["template"] = template
        columns = replace(LAYOUTS[layout], **changes)
        _ = columns.named  # raises if the template is invalid
        return columns

    @cached_property
    def named(self) -> frozenset[str]:
        """Names of the fields, besides `question`, that the prompt template uses.

        Raises:
            UserError: If the template is not a valid format string.
        """
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(self.template) if name}
        except ValueError as error:
            raise UserError(
                f"task.prompt_template is {self.template!r}, which is not a valid template: {error}"
            ) from error
        return frozenset(names - {"question"})

    def problem(self, row: Mapping[str, Any], where: str, *, answered: bool = True) -> Problem:
        """Return the problem that a row describes.

        Args:
            row: The row, by column name.
            where: File and line (or row) of the row, for error messages.
            answered: Whether the row must have an answer if `answer` or `solution` names a column.

        Raises:
            UserError: If a column is missing or has an unusable value.
        """
        name, prompt = self._first(row, self.prompt, where, "columns.prompt")
        messages = chat_messages(prompt, f"{where}, column {name!r}") if _is_list(prompt) else ()
        if messages and messages[-1]["role"] != "user":
            raise UserError(
                f"{where}, column {name!r} ends with a message of role {messages[-1]['role']!r}; "
                "the last message of a prompt must have the role 'user'"
            )
        question = messages[-1]["content"] if messages else _text(prompt, name, where)
        # Columns that were used are left out of the metadata, with two exceptions: a column with
        # several messages, of which the question is only the last one, and a column with a nested
        # mapping, of which only one value was used. The dotted name of such a value equals no key
        # of the row, so it removes nothing below.
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
        """Return a row's problem and the response to learn from it, for supervised fine-tuning.

        Raises:
            UserError: If a column is missing or has an unusable value.
        """
        name, response = self._first(row, (self.response,), where, "columns.response")
        return self.problem(row, where, answered=False), _text(response, name, where)

    def _answer(self, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        """Return the name of the column that a row's answer is from, and the answer.

        Raises:
            UserError: If the row has no answer.
        """
        if not self.solution or any(value_at(row, name) is not _MISSING for name in self.answer):
            name, answer = self._first(row, self.answer, where, "columns.answer")
            return name, _text(answer, name, where)
        name, solution = self._first(row, self.solution, where, "columns.answer")
        answer = (self.find_answer(_text(solution, name, where)) or "").strip()
        if not answer:
            raise UserError(
                f"{where}: column {name!r} contains no final answer, got {short_repr(solution)}"
            )
        return name, answer

    def _priority(self, row: Mapping[str, Any], where: str) -> int:
        """Return a row's scheduling priority; 0 if the row has none.

        Raises:
            UserError: If the priority is not a whole number or is too large.
        """
        priority = row.get(self.priority, 0)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(
                f"{where}: `{self.priority}` must be a whole number, got {short_repr(priority)}"
            )
        if abs(priority) > _MAX_PRIORITY:
            raise UserError(
                f"{where}: `{self.priority}` must be between -{_MAX_PRIORITY} and "
                f"{_MAX_PRIORITY}, got {short_repr(priority)}"
            )
        return priority

    @staticmethod
    def _first(
        row: Mapping[str, Any], names: Sequence[str], where: str, setting: str
    ) -> tuple[str, Any]:
        """Return name and value of the first of the columns `names` that exists in the row.

        For the error message, `where` is the file and line of the row, and `setting` the setting
        that can name another column.

        Raises:
            UserError: If none of the columns exists.
        """
        for name in names:
            value = value_at(row, name)
            if value is not _MISSING:
                return name, value
        wanted = " or ".join(f"`{name}`" for name in names)
        columns = short_repr(sorted(row))
        raise UserError(
            f"{where}: there is no column {wanted} among {columns}; {setting} can name another one"
        )


# Hendrycks' MATH has its answers inside the solutions; MATH-500 has them in a column. The layout
# `math` therefore names both columns.
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
    """Return the values of a row that a prompt template may use, converted to strings.

    These are strings, numbers and lists of strings. A list becomes a text with one line for each
    string. Other values are left out.
    """
    fields = {}
    for key, value in metadata.items():
        if isinstance(value, (str, int, float)):
            fields[key] = str(value)
        elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            fields[key] = "\n".join(value)
    return fields


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a row's column, or of a nested value named by a path with dots.

    If there is none, the result is the private object `_MISSING`, which equals no other value.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _is_list(value: Any) -> bool:
    """Return whether `value` is a list that starts with a mapping, as a list of messages does."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _text(value: Any, name: str, where: str) -> str:
    """Return a column's value as text; raise a UserError if it is not a usable text or number.

    A value is not usable if it is blank, infinite or NaN, or cannot be encoded as UTF-8.
    """
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
    """Return a row's chat messages in the form that chat templates accept.

    The content of each message becomes a string. All other fields are kept unless they are empty.
    The arguments of tool calls become mappings. Only messages of tools, and messages with a tool
    call or with reasoning, may have no content.

    Raises:
        UserError: If `value` is not a list of valid chat messages.
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
    """Return the tool calls of a message, with the arguments of each call as a mapping.

    OpenAI's format has the arguments as JSON text, which a chat template would quote once more.

    Raises:
        UserError: If the calls do not have names and arguments.
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
            arguments = parse_json(arguments, f"{where}: `arguments` of {function['name']}")
        if not isinstance(arguments, dict):
            raise UserError(
                f"{where}: `arguments` of {function['name']} is {short_repr(arguments)}; it must "
                "be a JSON object"
            )
        named = {**{k: v for k, v in function.items() if v is not None}, "arguments": arguments}
        whole = {k: v for k, v in call.items() if v is not None}
        found.append({**whole, "function": named} if "function" in call else named)
    return found


def row_tools(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools in a row's column `tools`, given as a list or as JSON text.

    A row without the column has none.

    Raises:
        UserError: If the column is not a list of mappings.
    """
    tools = row.get("tools") or []
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}, column 'tools'")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where}: `tools` is {short_repr(tools)}; it must be a list of JSON schemas"
        )
    return tools


def _content(content: Any, where: str, *, may_be_empty: bool) -> str:
    """Return the content of a chat message as a string; the text parts of a list are joined.

    Raises:
        UserError: If the content has a part that is not text, or is empty although it may not be.
    """
    if content == "" and may_be_empty:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise UserError(
                    f"{where} holds a part of type {short_repr(kind)}; only text can be trained "
                    "on, not images or audio"
                )
        content = "".join(str(part["text"]) for part in content)
    return _text(content, "content", where)
