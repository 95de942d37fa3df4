"""Computes the tokens that a turn adds to a branch of a conversation, with the chat template.

A turn is new messages and the policy's response to them. A branch is a path of turns, each of which
continues the one before. The tokens of a branch are: the opening (its first messages), the first
response, the tokens between the first and the second response, the second response, and so on.
Responses keep the tokens that the policy sampled; they are never tokenized again from their text.
The tokens between two responses come from the chat template. They end the earlier response (unless
the policy did), show the new messages, and start the assistant's next message.

Invariants
- The tokens that a turn adds depend only on its messages, the tools and whether the response before
  it ended with a stop token, not on earlier turns. `check` verifies before a run starts that the
  chat template permits this, and refuses a template that does not with the reason.
- If a response ends with any stop token, the token with which the template ends a response is left
  out.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from megatron_async.config.data import DataConfig
from megatron_async.errors import UserError
from megatron_async.tasks.base import Message
from megatron_async.tasks.prompts import ChatTemplate, chat_template, check_vocabulary
from megatron_async.tasks.text_task import response_text
from megatron_async.trajectory.types import IntArray

_ANSWER: Final = "\N{WHITE STAR}answer\N{WHITE STAR}"
_NEXT: Final = "\N{WHITE STAR}next\N{WHITE STAR}"
_EARLIER: Final = {"role": "user", "content": "\N{WHITE STAR}asked\N{WHITE STAR}"}

_NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token that stands for one byte in tokenizers that use SentencePiece's byte fallback."""

PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
"""Chat template for tokenizers that have none: each message on a separate line, and the end token
after each response."""


class Conversation:
    """Converts the messages of conversations to one model's tokens, and responses to text.

    An object serves all conversations with the same tools.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        stop_token_ids: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        calls: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        """Create a renderer of one model's conversations, with its chat template.

        Args:
            config: Settings of the task's chat template.
            tokenizer: Tokenizer of the model.
            stop_token_ids: IDs of the tokens that end a response.
            tools: JSON schemas of the tools that the template describes; empty for no tools.
            calls: Whether responses may have tool calls although `tools` is empty. The text of
                responses then keeps special tokens, since some models mark calls with them.
            vocabulary: Number of tokens that the model has embeddings for; None if not known. A
                text with another token raises UserError.
        """
        self._vocabulary = vocabulary
        arguments: dict[str, Any] = {"tools": list(tools)} if tools else {}
        template = chat_template(config, tokenizer)
        if template is None:
            template = ChatTemplate(config, tokenizer)
            arguments["chat_template"] = PLAIN_TEMPLATE
        self._template = template
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._tools = tools
        self._skips_special = config.skip_special_tokens and not (tools or calls)

    def opening(self, messages: Sequence[Message]) -> IntArray:
        """Return the tokens of a branch's first messages, up to where the first response starts.

        Raises:
            UserError: The chat template fails for these messages.
        """
        return self._encode(self._text(messages, begin=True))

    def next(self, messages: Sequence[Message], *, ended: bool) -> IntArray:
        """Return the tokens between two responses of a branch, which show `messages` to the policy.

        Args:
            messages: New messages after the earlier response.
            ended: Whether the earlier response ended with a stop token. If so, the result does not
                end that response again.

        Raises:
            UserError: The chat template fails for these messages.
        """
        between = self._encode(self._after_answer([_EARLIER], messages))
        if not ended:
            return between
        ends = np.flatnonzero(np.isin(between, list(self._stop_token_ids)))
        # Remove the tokens with which the template ends the response, up to and including its stop
        # token. This stop token is within the first `len(self._closing)` tokens. A later stop token
        # ends one of the messages and must stay.
        if len(ends) and ends[0] < len(self._closing):
            return between[int(ends[0]) + 1 :]
        return between

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token of a response; joined, they are the response's text.

        A token that holds only part of a character has its bytes as lone surrogates in its text
        (Python's `surrogateescape`). Encoded with `surrogateescape`, the joined texts are the UTF-8
        of the response.
        """
        texts: list[str] = []
        before: list[int] = []
        hidden = frozenset(self._tokenizer.all_special_ids if self._skips_special else ())
        for token_id in token_ids:
            text = self.answer_text([*before, token_id])[len(self.answer_text(before)) :]
            if _NO_TEXT in text:
                text = self._token_bytes(token_id, text).decode(errors="surrogateescape")
            texts.append(text)
            if token_id not in hidden:
                # Some tokenizers drop a space at the start of a text. So decode each later token
                # together with a letter before it, and remove the letter's text.
                before = self._letter
        return texts

    def _token_bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that holds only part of a character.

        `text` is the decoded text of the token, which has a replacement character.
        """
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if fallback := _BYTE.fullmatch(name):
            return bytes.fromhex(fallback[1])
        if all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        # The token is not part of a character, so the replacement character is its correct text.
        return text.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Mapping from each letter in names of byte-level tokens to the byte that it stands for."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    @cached_property
    def _letter(self) -> list[int]:
        """The tokens of the text "a", after which another token is decoded as inside a text."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a policy's response, without stop and padding tokens at its end."""
        return response_text(
            self._tokenizer, token_ids, self._stop_token_ids, skip_special=self._skips_special
        )

    def answer_ids(self, text: str) -> list[int]:
        """Return the tokens of a made-up response: the tokens of `text` and a stop token."""
        end = sorted(self._stop_token_ids)[:1]
        return [*self._encode(text).tolist(), *end]

    def decoded(self, token_ids: IntArray) -> str:
        """Return the text of `token_ids`, including that of special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist()))

    def check(self, opening: Sequence[Message], roles: Collection[str]) -> None:
        """Check that the chat template can render conversations of several turns.

        Args:
            opening: First messages of a conversation.
            roles: Roles of the messages that may follow a response.

        Raises:
            UserError: The template leaves out the tools or messages of one of `roles`, or the
                tokens that a turn adds depend on earlier turns.
        """
        text = self._text(opening, begin=True)
        for schema in self._tools:
            name = str(schema["function"]["name"])
            if name not in text:
                raise UserError(
                    f"the chat template in use leaves out the tools (no {name!r} in the first "
                    "prompt). Use a model whose template shows tools."
                )
        for role in sorted(roles):
            new = [{"role": role, "content": _NEXT}]
            short = self._after_answer([_EARLIER], new)
            if _NEXT not in short:
                raise _refusal(f"leaves out a message of role {role!r}")
            answered = {"role": "assistant", "content": "Yes."}
            long = self._after_answer([*opening, answered, *new], new)
            if long != short:
                raise _refusal(f"renders a message of role {role!r} differently after more turns")

    @cached_property
    def _closing(self) -> IntArray:
        """The tokens with which the template ends a response when no message follows."""
        text = self._text([_EARLIER, {"role": "assistant", "content": _ANSWER}], begin=False)
        return self._encode(text.partition(_ANSWER)[2])

    def _after_answer(self, earlier: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return the text that the template puts between one response and the next.

        Args:
            earlier: The messages before the first of the two responses.
            messages: The messages between the two responses.
        """
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._text([*earlier, answer, *messages], begin=True)
        # Split at the first occurrence of the placeholder, which is the response. A later message
        # may contain the same text.
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise _refusal("leaves out a response that later messages follow")
        return after

    def _text(self, messages: Sequence[Message], *, begin: bool) -> str:
        return self._template.text(messages, begin=begin, **self._arguments)

    def _encode(self, text: str) -> IntArray:
        # Tokenizers do not accept lone surrogates, which Python strings may contain.
        whole = text.encode(errors="replace").decode()
        ids = self._tokenizer.encode(whole, add_special_tokens=False)
        check_vocabulary(ids, self._vocabulary, self._tokenizer)
        return np.asarray(ids, np.int32)


def _refusal(what: str) -> UserError:
    """Return the error for a chat template that cannot be used; `what` states what it does."""
    return UserError(
        "the chat template of model.path cannot render conversations of several turns: it "
        f"{what}. Use a model whose template can, or set `task.chat_template: never` for plain text"
    )
