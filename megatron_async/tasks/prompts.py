"""Prompts and conversations as text and tokens.

Invariants
- Every token that a text of the user's becomes is one of the model's vocabulary: a tokenizer may
  have tokens that the model has no embedding for, and an engine or a trainer would end at one.
- No part of a message is lost silently: fields that hold content of the assistant are refused
  where the chat template does not use them.
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
    """A tokenizer's chat template with the settings' system message and arguments."""

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
        """A conversation to learn from: all that the assistant wrote, each turn's end included.

        A message with `weight` 0, as OpenAI's format has it, is not learned. `arguments`: the
        template's, beside the settings' (`tools`). Raises UserError where nothing is learned, and
        where the template shows earlier turns otherwise once later ones follow (some drop an
        earlier turn's thoughts).
        """
        self.check_fields(messages, where)
        template = str(self._tokenizer.chat_template)
        if arguments.get("tools") and not (self._warned or re.search(r"\btools\b", template)):
            self._warned = True
            _logger.warning("%s: the chat template of model.path leaves out `tools`", where)
        text = self.text(messages, begin=False, **arguments)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            before = self.text(messages[:number], begin=True, **arguments)
            upto = self.text(messages[: number + 1], begin=False, **arguments).rstrip()
            if not (text.startswith(upto) and upto.startswith(before)):
                raise UserError(
                    f"{where}: the chat template does not show message {number + 1} as it does "
                    "without the messages after it; write one row for each turn to be learned"
                )
            spans.append((len(before), len(upto)))
        if not spans:
            raise UserError(f"{where}: no message of the assistant")
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
        """Refuse content fields that the template does not use. Raises UserError."""
        template = str(self._tokenizer.chat_template)
        for message in messages:
            for name in CONTENT_FIELDS:
                if name in message and not re.search(rf"[.'\"]{name}\b", template):
                    raise UserError(
                        f"{where}: a message of {message['role']} has the field `{name}`, which "
                        "the chat template of model.path does not use: put it into `content`, "
                        "remove it, or use a model whose template shows it"
                    )

    def text(self, messages: Sequence[Message], *, begin: bool, **arguments: Any) -> str:
        """Messages as text; with `begin` up to where the assistant begins to answer.

        `arguments`: the template's, beside the settings'. Raises UserError.
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
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template of model.path fails for messages of {roles} with "
                f"task.chat_template_kwargs {self._config.chat_template_kwargs}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return str(text)


def chat_template(config: DataConfig, tokenizer: Any) -> ChatTemplate | None:
    """The template to use; None where there is none. Raises UserError for what then has no use."""
    if config.chat_template == "auto" and tokenizer.chat_template:
        return ChatTemplate(config, tokenizer)
    for name in ("system_prompt", "chat_template_kwargs"):
        if getattr(config, name):
            raise UserError(
                f"task.{name} is {getattr(config, name)!r}, and model.path has no chat template "
                "(or task.chat_template is never): leave it out"
            )
    return None


class PromptRenderer:
    """Turns problems into prompts: `task.prompt_template`, then the chat template if there is one.

    Args:
        config: The task's settings.
        tokenizer: A transformers tokenizer.
        vocabulary: Number of tokens that the model has embeddings for; None if it is not known.
        plays: Whether an environment makes the first prompt of an episode, so that `check` looks
            at the question only.
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
        """Return a text that differs where `check` may give another result for the same problem."""
        settings = self._config.model_dump_json(
            include={"system_prompt", "chat_template", "chat_template_kwargs", "prompt_template"}
        )
        template = getattr(self._tokenizer, "chat_template", None)
        numbers = f"{len(self._tokenizer)}\n{self.vocabulary}\n{self._has_episodes}"
        return f"{settings}\n{template}\n{numbers}"

    def messages(self, problem: Problem) -> Sequence[Message]:
        """Return the prompt as a conversation, without the chat template."""
        return problem.messages or [{"role": "user", "content": self._question(problem)}]

    def text(self, problem: Problem) -> str:
        """Return the prompt's text. Raises UserError where no prompt can be made of the problem."""
        messages = self.messages(problem)
        if self.chat is not None:
            self.chat.check_fields(messages, "the prompt")
            return self.chat.text(messages, begin=True)
        if problem.messages:
            raise UserError(
                "model.path has no chat template (or task.chat_template is never), and the "
                "prompts are chat messages: use a model with one, or prompts of text"
            )
        return str(messages[0]["content"])

    def ids(self, problem: Problem) -> IntArray:
        """Return the prompt's tokens. Raises UserError for one that the model does not have."""
        return self.encode(self.text(problem), special_tokens=self.chat is None)

    def encode(self, text: str, *, special_tokens: bool) -> IntArray:
        """Return the tokens of `text`, with the tokenizer's own around it if asked for."""
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        check_vocabulary(ids, self.vocabulary, self._tokenizer)
        return np.asarray(ids, dtype=np.int32)

    def check(self, problem: Problem) -> None:
        """Refuse a problem of which no prompt can be made. Raises UserError.

        A chat template treats all messages of a single text alike, so that only the first of those
        is rendered. Tokens are looked at where the tokenizer has more of them than the model.
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
        template = problem.template or self._config.prompt_template or "{question}"
        fields = {k: v for k, v in problem.fields.items() if k != "question"}
        try:
            return template.format(question=problem.question, **fields)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"task.prompt_template {template!r} does not fit the task: "
                f"it may name question{''.join(', ' + k for k in sorted(problem.fields))}"
            ) from error


def check_vocabulary(ids: IntArray | list[int], vocabulary: int | None, tokenizer: Any) -> None:
    """Refuse tokens that the model has no embedding for. Raises UserError.

    `vocabulary`: the number of those that it has; None if it is not known.
    """
    highest = int(np.max(ids)) if len(ids) else 0
    if vocabulary is not None and highest >= vocabulary:
        raise UserError(
            f"the text holds the token {tokenizer.decode([highest])!r} ({highest}), and the model "
            f"has {vocabulary} tokens (vocab_size in config.json): resize the model's embeddings, "
            "or remove that token from the tokenizer or from the data"
        )
