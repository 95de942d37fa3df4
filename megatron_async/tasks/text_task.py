"""A task of single-turn text problems: template, tokens and stop tokens around a problem source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.config.files import read_json_object
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError, shown
from megatron_async.tasks.base import Problem, ProblemSource, WorkedExample
from megatron_async.tasks.jsonl import worked_lines
from megatron_async.trajectory.types import IntArray, Prompt

# That a tokenizer puts around a text.
_SPECIAL_TOKENS = 8
_MOST_TOKENIZED = 2000
# What `tokenizer.json` says and nothing more, by its names in transformers 4 and 5.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TextTask:
    """Implements `base.Task`. `tokenizer` is a transformers tokenizer."""

    def __init__(
        self,
        config: TaskConfig,
        source: ProblemSource,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._chat = config.chat_template == "auto" and bool(tokenizer.chat_template)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self._stop_token_ids

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        """Training prompts from `position` on."""
        return [self._prompt(self._source.train(position + i)) for i in range(count)]

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts. Raises UserError if there are fewer."""
        return [self._prompt(problem) for problem in self._source.heldout(count)]

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Training problems (None: no end), and up to `heldout` held-out ones."""
        return self._source.counts(heldout)

    def check_lengths(self, longest: int, max_new_tokens: int) -> None:
        """Raises UserError for a prompt that is too long: of a file any, else the first.

        Only what has more bytes than it may have tokens is tokenized, and of that so much that it
        takes seconds; the rest is looked at when it is admitted.
        """
        if self._config.long_prompts == "drop":
            return
        most = longest - max_new_tokens
        listed = self._source.listed() or [
            (f"{self._source.name}, problem 0", self._source.train(0))
        ]
        around = len(self._text(replace(listed[0][1], question="")).encode()) + _SPECIAL_TOKENS
        doubtful = [pair for pair in listed if len(pair[1].question.encode()) + around > most]
        for where, problem in doubtful[:_MOST_TOKENIZED]:
            tokens = len(self.prompt_ids(problem))
            if tokens > most:
                raise UserError(
                    f"{where}: the prompt has {tokens} tokens, which with sampling.max_new_tokens "
                    f"{max_new_tokens} is more than the {longest} that an engine takes "
                    "(engines.context_length, else the model's; engines.max_total_tokens): "
                    "shorten the prompt, lower the one or raise the other, or set "
                    "task.long_prompts: drop"
                )

    def worked_examples(self, count: int, data: str = "") -> Sequence[WorkedExample]:
        """`count` of the task's own, or all of `data` that are not held out (at most `count`)."""
        pairs = list(worked_lines(data, self._config.heldout_share))[:count] if data else None
        if pairs is None:
            pairs = self._source.worked(count)
        if not pairs:
            raise UserError(f"sft.data {data} holds only held-out problems")
        return [self._example(problem, response) for problem, response in pairs]

    def prompt_ids(self, problem: Problem) -> IntArray:
        """The prompt's tokens: template, then the chat template when there is one."""
        return self._encode(self._text(problem), add_special_tokens=not self._chat)

    def _text(self, problem: Problem) -> str:
        try:
            text = self._config.prompt_template.format(
                question=problem.question,
                **{k: v for k, v in problem.fields.items() if k != "question"},
            )
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"task.prompt_template {self._config.prompt_template!r} does not fit the task: "
                f"it may name question{''.join(', ' + k for k in sorted(problem.fields))}"
            ) from error
        if self._config.remove_spaces:
            text = "".join(text.split())
        if self._chat:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        return str(text)

    def _prompt(self, problem: Problem) -> Prompt:
        ids = self.prompt_ids(problem)
        return Prompt(ids, self._source.name, problem.payload, problem.priority)

    def _example(self, problem: Problem, response: str) -> WorkedExample:
        response_ids = self._encode(response, add_special_tokens=False)
        end = np.array([self._tokenizer.eos_token_id], dtype=np.int32)
        return WorkedExample(self.prompt_ids(problem), np.concatenate([response_ids, end]))

    def _encode(self, text: str, add_special_tokens: bool) -> IntArray:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.asarray(ids, dtype=np.int32)


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face directory, never from a hub. Raises UserError.

    Code that the directory brings along is never run; a tokenizer that needs it is refused.
    """
    if _named_class(model_path) in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast as Reader
    else:
        from transformers import AutoTokenizer as Reader  # this imports torch: seconds

    try:
        tokenizer = Reader.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged file raises anything
        raise UserError(f"model.path {model_path!r} has no readable tokenizer: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path {model_path!r}: the tokenizer has no end-of-text token")
    return tokenizer


def _named_class(model_path: str) -> str:
    """The class that the directory wants; empty if it does not say."""
    file = Path(model_path) / "tokenizer_config.json"
    if not file.is_file():
        return ""
    return str(read_json_object(file, f"model.path: {file}").get("tokenizer_class", ""))


def stop_tokens(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of text and those of `generation_config.json`, ascending."""
    stops = {int(tokenizer.eos_token_id)}
    file = Path(model_path) / "generation_config.json"
    if file.is_file():
        more = read_json_object(file, f"model.path: {file}").get("eos_token_id")
        ids = more if isinstance(more, list) else [] if more is None else [more]
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
            raise UserError(
                f"model.path: {file}: eos_token_id is {shown(more)}; it must be a token or a list "
                "of tokens"
            )
        stops.update(ids)
    return tuple(sorted(stops))
