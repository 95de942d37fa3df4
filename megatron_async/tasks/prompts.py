"""Renders problems and conversations as text and tokens.

Invariants
- Every token made from a user's text is in the model's vocabulary. A tokenizer may have tokens that
  the model has no embedding for, and such a token would crash an engine or a trainer.
- No part of a message is lost silently: if a message has a field with content of the assistant that
  the chat template does not use, the message is refused.
"""

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from megatron_async.config.data import DataConfig
from megatron_async.errors import UserError
from megatron_async.tasks.base import Message, Problem, WorkedExample
from megatron_async.tasks.layouts import CONTENT_FIELDS
from megatron_async.trajectory.types import IntArray

_logger = logging.getLogger(__name__)


class ChatTemplate:
    """A tokenizer's chat template, with the system message and arguments from the settings."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._warned = False

    def conversation(
        self,
        messages: Sequence[Message],
        stop_token_ids: Collection[int],
        where: str,
        **arguments: Any,
    ) -> WorkedExample:
        """Return a conversation as a supervised example that trains on every assistant message.

        The token that ends an assistant message is trained on too. A message with `weight` 0, as in
        OpenAI's format, is not trained on.

        Args:
            messages: The conversation.
            stop_token_ids: Tokens that end a response. If the last trained token is not one of
                them, the end-of-text token is added.
            where: Setting, file and line of the conversation, for error messages.
            arguments: Arguments of the chat template in addition to those of the settings, such as
                `tools`.

        Raises:
            UserError: If there is nothing to train on, or if the template renders an earlier
                message differently once later messages follow. Some templates do: they remove an
                earlier message's thoughts.
        """
        self.check_fields(messages, where)
        template = str(self._tokenizer.chat_template)
        if arguments.get("tools") and not (self._warned or re.search(r"\btools\b", template)):
            self._warned = True
            _logger.warning("%s: the chat template of model.path does not use `tools`", where)
        text = self.text(messages, begin=False, **arguments)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            before = self.text(messages[:number], begin=True, **arguments)
            upto = self.text(messages[: number + 1], begin=False, **arguments).rstrip()
            if not (text.startswith(upto) and upto.startswith(before)):
                raise UserError(
                    f"{where}: the chat template renders message {number + 1} differently when "
                    "messages follow it; write a separate row for each message to be trained on"
                )
            spans.append((len(before), len(upto)))
        if not spans:
            raise UserError(f"{where}: there is no message of the assistant to train on")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        begins = np.array([begin for begin, _ in encoded["offset_mapping"]])
        trained = np.zeros(len(ids), np.bool_)
        for begin, end in spans:
            trained |= (begins >= begin) & (begins < end)
        last = int(np.flatnonzero(trained)[-1]) + 1
        ids, trained = ids[:last], trained[:last]
        if ids[-1] not in stop_token_ids:
            ids.append(int(self._tokenizer.eos_token_id))
            trained = np.append(trained, True)
        first = int(np.flatnonzero(trained)[0])
        tokens = np.asarray(ids, np.int32)
        return WorkedExample(tokens[:first], tokens[first:], trained[first:])

    def check_fields(self, messages: Sequence[Message], where: str) -> None:
        """Raise a UserError if the chat template does not use a content field that a message has.

        Content fields are `CONTENT_FIELDS`, such as `tool_calls`.
        """
        template = str(self._tokenizer.chat_template)
        for message in messages:
            for name in CONTENT_FIELDS:
                if name in message and not re.search(rf"[.'\"]{name}\b", template):
                    raise UserError(
                        f"{where}: a message of {message['role']} has the field `{name}`, which "
                        "the chat template of model.path does not use; put it into `content`, "
                        "remove it, or use a model whose template shows it"
                    )

    def text(self, messages: Sequence[Message], *, begin: bool, **arguments: Any) -> str:
        """Return messages as text, as the chat template renders them.

        Args:
            messages: The conversation.
            begin: Whether to append the start of the assistant's next message.
            arguments: Arguments of the chat template in addition to those of the settings.

        Raises:
            UserError: If the template fails.
        """
        system = self._config.system_prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=begin,
                **self._config.chat_template_kwargs,
                **arguments,
            )
        except Exception as error:  # a template may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template of model.path fails for messages of {roles} with "
                f"task.chat_template_kwargs {self._config.chat_template_kwargs}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return str(text)


def chat_template(config: DataConfig, tokenizer: Any) -> ChatTemplate | None:
    """Return the chat template to use, or None if there is none or the settings turn it off.

    Raises:
        UserError: If there is none to use although a setting needs one.
    """
    if config.chat_template == "auto" and tokenizer.chat_template:
        return ChatTemplate(config, tokenizer)
    for name in ("system_prompt", "chat_template_kwargs"):
        if getattr(config, name):
            raise UserError(
                f"task.{name} is {getattr(config, name)!r}; it needs a chat template, and "
                "model.path has no chat template (or task.chat_template is never). Leave it out."
            )
    return None


class PromptRenderer:
    """Renders problems as prompts: first `task.prompt_template`, then the chat template, if any.

    Args:
        config: The task's settings.
        tokenizer: A transformers tokenizer.
        vocabulary: Number of tokens that the model has embeddings for; None if it is not known.
        has_episodes: Whether an environment makes the first prompt of an episode. Then `check`
            looks only at the question.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        vocabulary: int | None,
        *,
        has_episodes: bool = False,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._has_episodes = has_episodes
        self._rendered = False
        self.vocabulary = vocabulary
        self.chat = chat_template(config, tokenizer)

    def identity(self) -> str:
        """Return a text that changes whenever `check` might judge the same problem differently.

        It contains the settings, the chat template and the vocabulary sizes that `check` depends
        on.
        """
        settings = self._config.model_dump_json(
            include={"system_prompt", "chat_template", "chat_template_kwargs", "prompt_template"}
        )
        template = getattr(self._tokenizer, "chat_template", None)
        numbers = f"{len(self._tokenizer)}\n{self.vocabulary}\n{self._has_episodes}"
        return f"{settings}\n{template}\n{numbers}"

    def messages(self, problem: Problem) -> Sequence[Message]:
        """Return a problem's prompt as chat messages, before the chat template is applied."""
        return problem.messages or [{"role": "user", "content": self._question(problem)}]

    def text(self, problem: Problem) -> str:
        """Return a problem's prompt as text.

        Raises:
            UserError: If the problem cannot be rendered.
        """
        messages = self.messages(problem)
        if self.chat is not None:
            self.chat.check_fields(messages, "the prompt")
            return self.chat.text(messages, begin=True)
        if problem.messages:
            raise UserError(
                "the prompts are chat messages, and model.path has no chat template (or "
                "task.chat_template is never); use a model with a chat template, or text prompts"
            )
        return str(messages[0]["content"])

    def ids(self, problem: Problem) -> IntArray:
        """Return the token IDs of a problem's prompt.

        Raises:
            UserError: If the problem cannot be rendered, or has a token that the model does not
                have.
        """
        return self.encode(self.text(problem), special_tokens=self.chat is None)

    def encode(self, text: str, *, special_tokens: bool) -> IntArray:
        """Return the token IDs of `text`.

        `special_tokens` adds the special tokens that the tokenizer puts around a text.

        Raises:
            UserError: If a token is not in the model's vocabulary.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        check_vocabulary(ids, self.vocabulary, self._tokenizer)
        return np.asarray(ids, dtype=np.int32)

    def check(self, problem: Problem) -> None:
        """Raise a UserError if a problem cannot be rendered as a prompt.

        Only the first problem that is a single text goes through the chat template: if the template
        accepts one text, it accepts all. If the tokenizer has more tokens than the model has
        embeddings, every problem is tokenized, to check its tokens.
        """
        if self._has_episodes:
            self.messages(problem)
        elif self.vocabulary is not None and len(self._tokenizer) > self.vocabulary:
            self.ids(problem)
        elif problem.messages or not self._rendered:
            self.text(problem)
            self._rendered = True
        else:
            self._question(problem)

    def _question(self, problem: Problem) -> str:
        """Return a problem's question, filled into the prompt template.

        Raises:
            UserError: If the template names a field that the problem does not have.
        """
        template = problem.template or self._config.prompt_template or "{question}"
        fields = {k: v for k, v in problem.fields.items() if k != "question"}
        try:
            return template.format(question=problem.question, **fields)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"task.prompt_template {template!r} does not fit the task; "
                f"it may name question{''.join(', ' + k for k in sorted(problem.fields))}"
            ) from error


def check_vocabulary(ids: IntArray | list[int], vocabulary: int | None, tokenizer: Any) -> None:
    """Raise a UserError if the model has no embedding for one of the tokens in `ids`.

    `vocabulary` is the number of tokens that the model has embeddings for; if it is None (unknown),
    nothing is checked. `tokenizer` decodes the token for the message.
    """
    highest = int(np.max(ids)) if len(ids) else 0
    if vocabulary is not None and highest >= vocabulary:
        raise UserError(
            f"the text holds the token {tokenizer.decode([highest])!r} ({highest}), and the model "
            f"has {vocabulary} tokens (vocab_size in config.json); resize the model's embeddings, "
            "or remove that token from the tokenizer or from the data"
        )
