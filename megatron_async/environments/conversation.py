"""Tokens of a conversation: what a turn adds to a branch, by the tokenizer's chat template.

A branch is the opening, then answers of the policy, then what came after each. What the policy
wrote stays as the tokens that it wrote; it is never made from text again. The tokens between two
answers are what the template puts after an answer and before the next: its end, where the policy
wrote none, the new messages, and where the assistant begins to speak.

Invariants
- What a turn adds follows from its messages, the tools and how the answer before it ended; from
  nothing earlier. That a template allows this is checked before a run starts (`check`), and one
  that does not is refused by name.
- A policy's end of its own (any stop token) stands for the template's.
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
"""Name of a token that holds a byte, in tokenizers of SentencePiece's kind."""

PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
"""Of a tokenizer without a template: every message on a line of its own, answers with their end."""


class Conversation:
    """Renders the turns of one model's conversations.

    `tools`: JSON schemas, empty: none. `calls`: answers may hold calls, of which the marks are
    special tokens of some models; with tools they may always. `vocabulary`: number of tokens that
    the model has embeddings for; a text that holds another one is a UserError.
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
        """The tokens up to the first answer. Raises UserError where the template fails."""
        return self._encode(self._text(messages, begin=True))

    def next(self, messages: Sequence[Message], *, ended: bool) -> IntArray:
        """The tokens between an answer and the next one. Raises UserError.

        `ended`: the answer's last token is a stop token; the template's own is then left out.
        """
        between = self._encode(self._after_answer([_EARLIER], messages))
        if not ended:
            return between
        ends = np.flatnonzero(np.isin(between, list(self._stop_token_ids)))
        # Only an end that belongs to the answer goes, never one in a message behind it.
        if len(ends) and ends[0] < len(self._closing):
            return between[int(ends[0]) + 1 :]
        return between

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token of an answer; joined, they are the answer's text.

        A token that holds part of a character gets its bytes as lone surrogates, as Python's
        `surrogateescape` has them: encoded so, all tokens are the UTF-8 of the text.
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
                # Some tokenizers leave out a space at the beginning of a text only.
                before = self._letter
        return texts

    def _token_bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that is no text by itself."""
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if fallback := _BYTE.fullmatch(name):
            return bytes.fromhex(fallback[1])
        if all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        return text.encode()  # the vocabulary has the replacement character itself

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte that each letter stands for in names of byte-level tokens."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    @cached_property
    def _letter(self) -> list[int]:
        """The tokens of a letter, to decode another token as it is inside a text."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Return what the policy has written as text, without the token that ended it."""
        return response_text(
            self._tokenizer, token_ids, self._stop_token_ids, skip_special=self._skips_special
        )

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer with its end, as a policy could write it."""
        end = sorted(self._stop_token_ids)[:1]
        return [*self._encode(text).tolist(), *end]

    def decoded(self, token_ids: IntArray) -> str:
        """The text of any tokens, special ones too."""
        return str(self._tokenizer.decode(token_ids.tolist()))

    def check(self, opening: Sequence[Message], roles: Collection[str]) -> None:
        """Check that conversations can go on, with messages of `roles`. Raises UserError."""
        text = self._text(opening, begin=True)
        for schema in self._tools:
            name = str(schema["function"]["name"])
            if name not in text:
                raise UserError(
                    f"the chat template in use leaves out the tools (no {name!r} in the first "
                    "prompt); use a model whose template shows them"
                )
        for role in sorted(roles):
            new = [{"role": role, "content": _NEXT}]
            short = self._after_answer([_EARLIER], new)
            if _NEXT not in short:
                raise _refusal(f"leaves out a message of role {role!r}")
            answered = {"role": "assistant", "content": "Yes."}
            long = self._after_answer([*opening, answered, *new], new)
            if long != short:
                raise _refusal(f"shows a message of role {role!r} otherwise in a longer one")

    @cached_property
    def _closing(self) -> IntArray:
        """The tokens that the template puts behind the last answer of a conversation."""
        text = self._text([_EARLIER, {"role": "assistant", "content": _ANSWER}], begin=False)
        return self._encode(text.partition(_ANSWER)[2])

    def _after_answer(self, earlier: Sequence[Message], messages: Sequence[Message]) -> str:
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._text([*earlier, answer, *messages], begin=True)
        _, found, after = text.partition(_ANSWER)  # the first: observations may hold anything
        if not found:
            raise _refusal("leaves out an answer once others follow")
        return after

    def _text(self, messages: Sequence[Message], *, begin: bool) -> str:
        return self._template.text(messages, begin=begin, **self._arguments)

    def _encode(self, text: str) -> IntArray:
        whole = text.encode(errors="replace").decode()  # half of a surrogate pair is no text
        ids = self._tokenizer.encode(whole, add_special_tokens=False)
        check_vocabulary(ids, self._vocabulary, self._tokenizer)
        return np.asarray(ids, np.int32)


def _refusal(what: str) -> UserError:
    return UserError(
        f"the chat template of model.path cannot show conversations of many turns: it {what}; use "
        "a model whose template can, or set `task.chat_template: never` for plain text"
    )
