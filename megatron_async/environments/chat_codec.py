"""Tokens and text of an agent's calls and answers, by the tools of a call.

Invariants
- An answer is stored as the policy wrote it; what a program gets follows from that alone.
- Where a part of an answer looks like a call and cannot be read, the whole answer is text.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from megatron_async.config.rollout import TaskConfig
from megatron_async.environments.chat import CallRefused, ChatAnswer, ChatCall
from megatron_async.environments.conversation import Conversation
from megatron_async.environments.matching import TOOLS_ROLE, Message
from megatron_async.environments.tools import CallReader
from megatron_async.errors import UserError
from megatron_async.trajectory.types import IntArray

_MOST_TOOL_SETS: Final = 64


class ChatCodec:
    """Rendering and reading with one set of tools."""

    def __init__(self, conversation: Conversation, reader: CallReader | None) -> None:
        self.conversation = conversation
        self._reader = reader

    def opening(self, messages: Sequence[Message]) -> IntArray:
        """The tokens up to the first answer. Raises CallRefused where the template fails."""
        try:
            return self.conversation.opening(_shown(messages))
        except UserError as error:
            raise CallRefused(str(error), "messages") from error

    def next(self, messages: Sequence[Message], *, ended: bool) -> IntArray:
        """The tokens between an answer (`ended`: with its end) and the next. Raises CallRefused."""
        try:
            return self.conversation.next(_shown(messages), ended=ended)
        except UserError as error:
            raise CallRefused(str(error), "messages") from error

    def stored(
        self,
        call: ChatCall,
        answer_ids: Sequence[int],
        logprobs: Sequence[float],
        before: int,
        *,
        ended: bool,
    ) -> dict[str, Any]:
        """An answer to a call as it is stored; `before`: tokens of its input."""
        text = self.conversation.answer_text(answer_ids)
        found = self._calls(text) if call.calls_tools else ()
        if not call.parallel_calls:  # the stored tokens keep the others: the policy wrote them
            found = found[:1]
        stored: dict[str, Any] = {
            "text": text,
            "truncated": not ended,
            "tool_calls": [{"name": name, "arguments": dict(given)} for name, given in found],
            "tokens": [before, len(answer_ids)],
        }
        if call.logprobs:
            pieces = self.conversation.token_texts(answer_ids)
            # An answer that is made up for a check before a run has no log-probs.
            numbers = [float(number) for number in logprobs] or [0.0] * len(pieces)
            stored["logprobs"] = list(zip(pieces, numbers, strict=True))
        return stored

    def answer(self, name: str, stored: Mapping[str, Any]) -> ChatAnswer:
        """A stored answer as a program gets it."""
        found = tuple((one["name"], one["arguments"]) for one in stored["tool_calls"])
        text = str(stored["text"])
        if found and self._reader is not None:
            text = self._reader.read(text)[0]
        logprobs = stored.get("logprobs")
        before, made = stored["tokens"]
        return ChatAnswer(
            name,
            text,
            found,
            bool(stored["truncated"]),
            (before, made),
            None if logprobs is None else tuple((piece, number) for piece, number in logprobs),
        )

    def _calls(self, text: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        if self._reader is None:
            return ()
        _, calls, complaint = self._reader.read(text)
        return () if complaint else tuple((call.name, call.arguments) for call in calls)


class ChatCodecs:
    """Rendering and reading, by the tools of a call."""

    def __init__(
        self,
        task: TaskConfig,
        tokenizer: Any,
        stops: Sequence[int],
        parser: str,
        vocabulary: int | None = None,
    ) -> None:
        self._conversation = partial(
            Conversation, task, tokenizer, tuple(stops), vocabulary=vocabulary
        )
        self._parser = parser
        self._known: dict[str, ChatCodec] = {}
        if parser:
            CallReader(parser, ()).check()  # also imports the parser

    def of(self, tools: str) -> ChatCodec:
        """Texts with these tools, as JSON; empty: none. Raises CallRefused."""
        if tools not in self._known:
            if len(self._known) >= _MOST_TOOL_SETS:
                del self._known[next(iter(self._known))]
            self._known[tools] = self._make(tools)
        return self._known[tools]

    def _make(self, tools: str) -> ChatCodec:
        if not tools:
            return ChatCodec(self._conversation(), None)
        if not self._parser:
            raise CallRefused(
                "the call has tools, and episode.tool_parser is not set: name the form in which "
                "the model calls them, as qwen25 or llama3",
                "tools",
            )
        schemas = json.loads(tools)
        conversation, reader = self._conversation(schemas), CallReader(self._parser, schemas)
        try:
            conversation.check([{"role": "user", "content": "?"}], {"tool", "user"})
            reader.read("")
        except (UserError, ValueError) as error:  # also of a schema that no parser takes
            raise CallRefused(" ".join(str(error).split()), "tools") from error
        return ChatCodec(conversation, reader)


def _shown(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages that a template is given."""
    return [dict(message) for message in messages if message["role"] != TOOLS_ROLE]
