"""Converts an agent's calls to tokens, and the policy's responses to replies of the chat API.

A response is stored with its turn, and a reply to the agent's program is made from it. Tokens and
responses depend on the tools that a call offers, so there is one `ChatCodec` for each set of tools.

Invariants
- A response is stored as the policy wrote it. The reply to the agent's program is computed from the
  stored response, so a program that runs again gets the same reply.
- If any part of a response looks like a tool call but cannot be parsed, the whole response is text.
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

_MAX_TOOL_SETS: Final = 64


class ChatCodec:
    """Converts calls to tokens and responses to replies, for calls that offer the same tools."""

    def __init__(self, conversation: Conversation, reader: CallReader | None) -> None:
        self.conversation = conversation
        self._reader = reader

    def opening(self, messages: Sequence[Message]) -> IntArray:
        """Return the tokens of a branch's first messages, up to where the response starts.

        Raises:
            CallRefused: The chat template fails for these messages.
        """
        try:
            return self.conversation.opening(_shown(messages))
        except UserError as error:
            raise CallRefused(str(error), "messages") from error

    def next(self, messages: Sequence[Message], *, ended: bool) -> IntArray:
        """Return the tokens between two responses of a branch, which show `messages` to the policy.

        Args:
            messages: New messages after the earlier response.
            ended: Whether the earlier response ended with a stop token.

        Raises:
            CallRefused: The chat template fails for these messages.
        """
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
        """Return the policy's response to `call` in the form in which it is stored with its turn.

        Args:
            call: The call that the response belongs to.
            answer_ids: Tokens of the response.
            logprobs: Log-probability of each token of the response. Empty for a made-up response,
                whose tokens then get 0.
            before: Number of tokens of the branch before the response.
            ended: Whether the response ended with a stop token.
        """
        text = self.conversation.answer_text(answer_ids)
        tool_calls = self._calls(text) if call.calls_tools else ()
        # The program accepts one tool call per response. The others are not reported to it, but
        # their tokens stay part of the response, because the policy wrote them.
        if not call.parallel_calls:
            tool_calls = tool_calls[:1]
        stored: dict[str, Any] = {
            "text": text,
            "truncated": not ended,
            "tool_calls": [
                {"name": name, "arguments": dict(arguments)} for name, arguments in tool_calls
            ],
            "tokens": [before, len(answer_ids)],
        }
        if call.logprobs:
            pieces = self.conversation.token_texts(answer_ids)
            # Only the made-up responses of a trial episode come without log-probabilities.
            numbers = [float(number) for number in logprobs] or [0.0] * len(pieces)
            stored["logprobs"] = list(zip(pieces, numbers, strict=True))
        return stored

    def answer(self, name: str, stored: Mapping[str, Any]) -> ChatAnswer:
        """Convert a stored response to the `ChatAnswer` that is sent to the agent's program.

        `name` becomes the ID of the response.
        """
        tool_calls = tuple((call["name"], call["arguments"]) for call in stored["tool_calls"])
        text = str(stored["text"])
        if tool_calls and self._reader is not None:
            text = self._reader.read(text)[0]
        logprobs = stored.get("logprobs")
        before, made = stored["tokens"]
        return ChatAnswer(
            name,
            text,
            tool_calls,
            bool(stored["truncated"]),
            (before, made),
            None if logprobs is None else tuple((piece, number) for piece, number in logprobs),
        )

    def _calls(self, text: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Return the tool calls in a response's text; empty if any of them cannot be parsed."""
        if self._reader is None:
            return ()
        _, calls, complaint = self._reader.read(text)
        return () if complaint else tuple((call.name, call.arguments) for call in calls)


class ChatCodecs:
    """Creates and caches a `ChatCodec` for each set of tools that calls offer."""

    def __init__(
        self,
        task: TaskConfig,
        tokenizer: Any,
        stops: Sequence[int],
        parser: str,
        vocabulary: int | None = None,
    ) -> None:
        """Check that the tool parser exists.

        Args:
            task: Settings of the task, for the chat template.
            tokenizer: Tokenizer of the model.
            stops: IDs of the stop tokens.
            parser: SGLang's name of the tool-call parser; empty if calls offer no tools.
            vocabulary: Number of tokens that the model has embeddings for; None if not known.

        Raises:
            UserError: SGLang has no such parser.
        """
        self._conversation = partial(
            Conversation, task, tokenizer, tuple(stops), vocabulary=vocabulary
        )
        self._parser = parser
        self._cached: dict[str, ChatCodec] = {}
        if parser:
            # This also imports the parser. A worker limits its memory after this, so the memory of
            # the import does not count toward the limit.
            CallReader(parser, ()).check()

    def of(self, tools: str) -> ChatCodec:
        """Return the codec for calls that offer `tools`, their descriptions as JSON (empty: none).

        Raises:
            CallRefused: Calls with tools cannot be converted, since `episode.tool_parser` is not
                set, or the chat template or the parser fails with these tools.
        """
        if tools not in self._cached:
            if len(self._cached) >= _MAX_TOOL_SETS:
                del self._cached[next(iter(self._cached))]
            self._cached[tools] = self._make(tools)
        return self._cached[tools]

    def _make(self, tools: str) -> ChatCodec:
        """Create the codec for calls that offer `tools`, and try the chat template and parser."""
        if not tools:
            return ChatCodec(self._conversation(), None)
        if not self._parser:
            raise CallRefused(
                "the call offers tools, but episode.tool_parser is not set. Set it to the format "
                "in which the model calls tools, such as qwen25 or llama3.",
                "tools",
            )
        schemas = json.loads(tools)
        conversation, reader = self._conversation(schemas), CallReader(self._parser, schemas)
        try:
            conversation.check([{"role": "user", "content": "?"}], {"tool", "user"})
            reader.read("")
        # A parser raises ValueError if it does not accept the tools' schemas.
        except (UserError, ValueError) as error:
            raise CallRefused(" ".join(str(error).split()), "tools") from error
        return ChatCodec(conversation, reader)


def _shown(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages for the chat template: all but the description of the tools."""
    return [dict(message) for message in messages if message["role"] != TOOLS_ROLE]
