"""Chat messages as text: the tokenizer's template, and which tokens an assistant wrote."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from megatron_async.config.data import DataConfig
from megatron_async.errors import UserError
from megatron_async.tasks.base import Message, WorkedExample


class ChatTemplate:
    """A tokenizer's chat template with the settings' system message and arguments."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages up to where the assistant begins."""
        return self._render(messages, begin=True)

    def conversation(
        self, messages: Sequence[Message], stop_token_ids: Collection[int], where: str
    ) -> WorkedExample:
        """A conversation to learn from: all that the assistant wrote, each turn's end included.

        Raises UserError where there is nothing of it, or where the template shows earlier turns
        otherwise once later ones follow (some drop an earlier turn's thoughts).
        """
        text = self._render(messages, begin=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], begin=True)
            upto = self._render(messages[: number + 1], begin=False).rstrip()
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

    def _render(self, messages: Sequence[Message], *, begin: bool) -> str:
        system = self._config.system_prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=begin,
                **self._config.chat_template_kwargs,
            )
        except Exception as error:  # a template raises what it likes
            raise UserError(
                f"the chat template of model.path fails with task.chat_template_kwargs "
                f"{self._config.chat_template_kwargs}: {type(error).__name__}: {error}"
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
