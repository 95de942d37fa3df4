"""A task of single-turn text problems: template, tokens and stop tokens around a problem source.

Chat messages become text by the tokenizer's template, with a mark on the tokens that an assistant
wrote.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_async.config.data import DataConfig, FileConfig
from megatron_async.config.evaluation import HELDOUT, HELDOUT_SEED
from megatron_async.config.files import read_json_object, vocabulary_of
from megatron_async.errors import UserError, short_repr
from megatron_async.tasks.base import (
    Message,
    Problem,
    ProblemSource,
    WorkedExample,
    asked_keys,
    is_heldout_key,
)
from megatron_async.tasks.files import ProblemFile
from megatron_async.tasks.layouts import Columns, chat_messages, row_tools
from megatron_async.tasks.prompts import PromptRenderer, check_vocabulary
from megatron_async.tasks.rows import Rows, open_rows, report_bad_rows
from megatron_async.tasks.seeds import seed_problem
from megatron_async.trajectory.types import IntArray, Prompt

# That a tokenizer puts around a text.
_SPECIAL_TOKENS = 8
_MOST_TOKENIZED = 2000
_MOST_SHOWN = 2000
# Of `tokenizer.json` and nothing more, as transformers 4 and 5 name it.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TextTask:
    """Implements `base.Task`. `tokenizer` is a transformers tokenizer.

    `evaluated`: the evaluation sets that are files of their own, by name. `plays`: an environment
    opens each episode; a prompt has no tokens, and its messages in the payload (`chat`: the row has
    messages in place of a text).
    """

    def __init__(
        self,
        config: DataConfig,
        source: ProblemSource,
        tokenizer: Any,
        prompts: PromptRenderer,
        stop_token_ids: tuple[int, ...],
        evaluated: Mapping[str, ProblemFile] = MappingProxyType({}),
        *,
        has_episodes: bool = False,
    ) -> None:
        self._has_episodes = has_episodes
        self._config = config
        self.source = source
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._evaluated = evaluated
        self._prompts = prompts

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        """Training prompts from `position` on."""
        return [self._prompt(self.source.train(position + i)) for i in range(count)]

    def eval_prompts(self, count: int, name: str = HELDOUT) -> list[Prompt]:
        """The first `count` of an evaluation set; 0: all. Raises UserError if there are fewer."""
        return [self._prompt(problem) for problem in self._eval_problems(count, name)]

    def _eval_problems(self, count: int, name: str) -> list[Problem]:
        if name in self._evaluated:
            return self._evaluated[name].first(count, HELDOUT_SEED)
        return self.source.heldout(count)

    def check_evaluation(self, count: int, name: str, longest: int | None) -> None:
        """Make the first `count` prompts of an evaluation set (0: all). Raises UserError.

        One of more than `longest` tokens (None: no limit) is refused unless task.long_prompts is
        drop: then it counts as wrong.
        """
        for problem in self._eval_problems(count, name):
            tokens = len(self._prompt(problem).token_ids)
            if longest is not None and tokens > longest and self._config.long_prompts != "drop":
                place = problem.where or f"the problem {short_repr(problem.question)}"
                raise UserError(
                    f"evaluation set {name}: {place}: the prompt has {tokens} tokens, and at most "
                    f"{longest} leave room for the response (engines.context_length, else the "
                    "model's; engines.max_total_tokens; the set's max_new_tokens): remove it, "
                    "change one of these, or have it counted as wrong by task.long_prompts: drop"
                )

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Training problems (None: no end), and up to `heldout` held-out ones."""
        return self.source.counts(heldout)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt or a response, as rewards get it."""
        skips = self._config.skip_special_tokens
        return response_text(self._tokenizer, token_ids, self.stop_token_ids, skip_special=skips)

    def summary(self) -> str:
        """The training data, and the first prompt as the template made it."""
        problem = self.source.train(0)
        if self._has_episodes:
            return self.source.summary()
        text = shown_text(self._prompts.text(problem))
        kind = "chat template" if self._prompts.chat else "no chat template"
        return (
            f"{self.source.summary()}\nfirst prompt, {len(self.prompt_ids(problem))} tokens "
            f"({kind}):\n{text}"
        )

    def check_lengths(self, longest: int, max_new_tokens: int) -> int:
        """Refuses or leaves out prompts that are too long: of a file any, else the first.

        Only what has more bytes than it may have tokens is tokenized, and where one refuses, of
        that so much that it takes seconds; the rest is looked at when it is admitted.
        """
        if self._has_episodes or self._config.long_prompts == "drop":
            return 0
        most = longest - max_new_tokens
        first = self.source.train(0)
        blank = replace(first, question="", messages=(), fields=dict.fromkeys(first.fields, ""))
        around = len(self._prompts.text(blank).encode()) + _SPECIAL_TOKENS
        suspects = self.source.problems_longer_than(most - around)
        if self._config.long_prompts == "filter":
            gone = [place for place, one in suspects if len(self.prompt_ids(one)) > most]
            if gone:
                self.source.exclude(gone)
            return len(gone)
        for _, problem in itertools.islice(suspects, _MOST_TOKENIZED):
            tokens = len(self.prompt_ids(problem))
            if tokens > most:
                raise UserError(
                    f"{problem.where}: the prompt has {tokens} tokens, which with "
                    f"sampling.max_new_tokens {max_new_tokens} is more than the {longest} that an "
                    "engine takes (engines.context_length, else the model's; "
                    "engines.max_total_tokens): shorten the prompt, lower the one or raise the "
                    "other, or set task.long_prompts: filter"
                )
        return 0

    def worked_examples(self, count: int, data: FileConfig | None = None) -> list[WorkedExample]:
        """`count` of the task's own, or all of `data` that are not held out (at most `count`)."""
        if data is None:
            return [self._example(*pair) for pair in self.source.worked(count)]
        rows = open_rows(data.path, data.split, "sft.data")
        bad: list[str] = []
        examples = list(itertools.islice(self._examples(rows, data, bad), count))
        if bad:
            report_bad_rows(f"sft.data {data.path}", bad, len(rows), self._config.bad_rows)
        if not examples:
            raise UserError(f"sft.data {data.path} holds only held-out problems")
        return examples

    def _examples(self, rows: Rows, data: FileConfig, bad: list[str]) -> Iterator[WorkedExample]:
        """The examples of rows that are not held out; what is wrong with a row goes to `bad`."""
        columns = Columns.of(data.layout, data.columns, self._config.prompt_template)
        elsewhere = frozenset(key for file in self._evaluated.values() for key in file.keys)
        share = self._config.heldout_share
        for index, row in enumerate(rows):
            where = rows.where(index)
            try:
                if isinstance(row, UserError):
                    raise row
                if "messages" in row and columns.response not in row:
                    messages = chat_messages(row["messages"], f"{where}, column 'messages'")
                    keys = self._keys(row, messages)
                else:
                    messages = ()
                    problem, response = columns.example(row, where)
                    keys = {problem.key}
                if keys & elsewhere or any(is_heldout_key(key, share) for key in keys):
                    continue
                if not messages:
                    example = self._example(problem, response)
                elif (chat := self._prompts.chat) is None:
                    raise UserError("chat messages need a model with a chat template")
                else:
                    found = row_tools(row, where)
                    tools = {"tools": found} if found else {}
                    example = chat.conversation(messages, self.stop_token_ids, where, **tools)
                for ids in (example.prompt_ids, example.response_ids):
                    check_vocabulary(ids, self._prompts.vocabulary, self._tokenizer)
                yield example
            except UserError as error:
                bad.append(str(error) if str(error).startswith(where) else f"{where}: {error}")

    def _keys(self, row: Mapping[str, Any], messages: tuple[Message, ...]) -> set[int]:
        """Keys of what a conversation asks; all of an environment open alike: its seed counts."""
        if self._config.kind == "seeds":
            return {seed_problem(row["seed"]).key} if "seed" in row else set()
        return asked_keys(messages)

    def prompt_ids(self, problem: Problem) -> IntArray:
        """The prompt's tokens: template, then the chat template when there is one."""
        return self._prompts.ids(problem)

    def messages(self, problem: Problem) -> Sequence[Message]:
        """The prompt as a conversation, without the chat template."""
        return self._prompts.messages(problem)

    def _prompt(self, problem: Problem) -> Prompt:
        payload = problem.payload
        if not self._has_episodes:
            return Prompt(self.prompt_ids(problem), self.source.name, payload, problem.priority)
        short_repr = list(self.messages(problem)) if payload["question"] else []
        payload = {**payload, "messages": short_repr, "chat": bool(problem.messages)}
        return Prompt(np.zeros(0, np.int32), self.source.name, payload, problem.priority)

    def _example(self, problem: Problem, response: str) -> WorkedExample:
        response_ids = self._prompts.encode(response, special_tokens=False)
        end = np.array([self._tokenizer.eos_token_id], dtype=np.int32)
        return WorkedExample(self.prompt_ids(problem), np.concatenate([response_ids, end]))


def shown_text(text: str) -> str:
    """`text` for a terminal: what cannot be printed escaped, and not too much of it."""
    most = _MOST_SHOWN
    kept = text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} characters more"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in kept)


def response_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    stop_token_ids: Collection[int],
    *,
    skip_special: bool = False,
) -> str:
    """Return tokens as text, without the stop and padding tokens at their end.

    Other special tokens, such as `<think>` where it is one, stay unless `skip_special` is true.
    """
    ids, ends = list(token_ids), {*stop_token_ids, tokenizer.pad_token_id}
    while ids and ids[-1] in ends:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special))


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
    """The tokenizer class that the directory names; empty if it names none."""
    file = Path(model_path) / "tokenizer_config.json"
    if not file.is_file():
        return ""
    return str(read_json_object(file, f"model.path: {file}").get("tokenizer_class", ""))


def stop_tokens(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response, ascending, of the tokenizer and two config files.

    SGLang ends at all of them. Raises UserError for one that is no token of the model.
    """
    vocabulary = vocabulary_of(model_path) or 1 << 31
    stops = {int(tokenizer.eos_token_id)}
    if max(stops) >= vocabulary:
        raise UserError(
            f"model.path {model_path!r}: the tokenizer's end-of-text token is {max(stops)}, and "
            f"config.json has vocab_size {vocabulary}: they are of different models"
        )
    for file in (Path(model_path) / name for name in ("generation_config.json", "config.json")):
        if not file.is_file():
            continue
        more = read_json_object(file, f"model.path: {file}").get("eos_token_id")
        if more is None:
            continue
        ids = more if isinstance(more, list) else [more]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise UserError(
                f"model.path: {file}: eos_token_id is {short_repr(more)}; it must be a token or a "
                f"list of tokens, from 0 to {vocabulary - 1}"
            )
        stops.update(ids)
    return tuple(sorted(stops))
