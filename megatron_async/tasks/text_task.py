"""Provides tasks of text problems: tokenized prompts, supervised examples and stop tokens.

Chat messages become text by the tokenizer's chat template. In supervised examples, only the tokens
that an assistant wrote are trained on.
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

# Largest number of special tokens that a tokenizer is assumed to put around a text, when
# `check_lengths` estimates how many tokens a prompt may have.
_SPECIAL_TOKENS = 8
# Largest number of prompts that `check_lengths` tokenizes with `task.long_prompts: refuse`, so that
# it takes only seconds.
_MAX_TOKENIZED = 2000
# Number of characters of a prompt that are shown at the start of a run.
_MAX_SHOWN = 2000
# Names that transformers 4 and 5 give to the same class: tokenizers that are completely described
# by `tokenizer.json`. They are loaded without AutoTokenizer, whose import is slow.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TextTask:
    """Task whose prompts and supervised examples are tokenized for one model; see `base.Task`.

    Args:
        config: The settings under `task`.
        source: The problems to train on, and those held out for evaluation.
        tokenizer: A transformers tokenizer.
        prompts: Renders problems as prompts.
        stop_token_ids: Tokens that end a response.
        evaluated: Evaluation sets that have their own files, by name.
        has_episodes: Whether an environment opens each episode. Then a prompt has no tokens, and
            its payload also has the prompt's `messages`, and as `chat` whether the row has messages
            instead of a text.
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
        """Return the `count` training prompts from `position` on, in the task's fixed order."""
        return [self._prompt(self.source.train(position + i)) for i in range(count)]

    def eval_prompts(self, count: int, name: str = HELDOUT) -> list[Prompt]:
        """Return the first `count` prompts of the evaluation set `name`; all if `count` is 0.

        Raises:
            UserError: If the set has fewer.
        """
        return [self._prompt(problem) for problem in self._eval_problems(count, name)]

    def _eval_problems(self, count: int, name: str) -> list[Problem]:
        """Return the first `count` problems of the evaluation set `name`; all if `count` is 0.

        Raises:
            UserError: If the set has fewer.
        """
        if name in self._evaluated:
            return self._evaluated[name].first(count, HELDOUT_SEED)
        return self.source.heldout(count)

    def check_evaluation(self, count: int, name: str, longest: int | None) -> None:
        """Raise a UserError if a prompt of the evaluation set `name` cannot be made or is too long.

        With `task.long_prompts: drop`, a prompt may be too long; it then counts as answered wrong.

        Args:
            count: Number of prompts to check, from the first on; 0 for all.
            name: Name of the evaluation set.
            longest: Maximum length of a prompt in tokens; None for no limit.
        """
        for problem in self._eval_problems(count, name):
            tokens = len(self._prompt(problem).token_ids)
            if longest is not None and tokens > longest and self._config.long_prompts != "drop":
                where = problem.where or f"the problem {short_repr(problem.question)}"
                raise UserError(
                    f"evaluation set {name}: {where}: the prompt has {tokens} tokens; at most "
                    f"{longest} leave enough tokens for the response (engines.context_length, else "
                    "the model's; engines.max_total_tokens; the set's max_new_tokens). Remove the "
                    "prompt, change one of these settings, or count the prompt as wrong with "
                    "task.long_prompts: drop."
                )

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Return the number of training problems, and of held-out problems up to `heldout`.

        The first number is None if training problems are generated endlessly.
        """
        return self.source.counts(heldout)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens of a prompt or a response, as rewards receive it."""
        skips = self._config.skip_special_tokens
        return response_text(self._tokenizer, token_ids, self.stop_token_ids, skip_special=skips)

    def summary(self) -> str:
        """Return a description of the training data that includes the first prompt as rendered."""
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
        """Remove the prompts that are too long to leave tokens for a response; return their number.

        A prompt is too long if it and `max_new_tokens` together exceed `longest`, the number of
        tokens that an engine accepts. Prompts are removed only with `task.long_prompts: filter`;
        with `refuse`, one such prompt raises an error; with `drop`, and for environments, nothing
        is checked. If the task generates problems endlessly, only the first is checked.

        To save time, only prompts with more bytes than they may have tokens are tokenized, since
        every token has at least one byte. With `refuse`, at most 2,000 of these are tokenized, so
        that the check takes seconds; the others are checked when the run reads them.

        Raises:
            UserError: If a prompt is too long and may not or cannot be removed.
        """
        if self._has_episodes or self._config.long_prompts == "drop":
            return 0
        most = longest - max_new_tokens
        first = self.source.train(0)
        blank = replace(first, question="", messages=(), fields=dict.fromkeys(first.fields, ""))
        around = len(self._prompts.text(blank).encode()) + _SPECIAL_TOKENS
        suspects = self.source.problems_longer_than(most - around)
        if self._config.long_prompts == "filter":
            removed = [place for place, one in suspects if len(self.prompt_ids(one)) > most]
            if removed:
                self.source.exclude(removed)
            return len(removed)
        for _, problem in itertools.islice(suspects, _MAX_TOKENIZED):
            tokens = len(self.prompt_ids(problem))
            if tokens > most:
                raise UserError(
                    f"{problem.where}: the prompt has {tokens} tokens, which with "
                    f"sampling.max_new_tokens {max_new_tokens} is more than the {longest} that an "
                    "engine accepts (engines.context_length, else the model's; "
                    "engines.max_total_tokens). Shorten the prompt, lower sampling.max_new_tokens, "
                    "raise the engine's limit, or set task.long_prompts: filter."
                )
        return 0

    def worked_examples(self, count: int, data: FileConfig | None = None) -> list[WorkedExample]:
        """Return up to `count` supervised examples, from the file `data` if it is given.

        Without `data`, they are the worked answers of the task's problem source, and there are
        exactly `count`. Rows of `data` that are held out for evaluation are left out.

        Raises:
            UserError: If the source has no worked answers, or `data` has bad rows or only held-out
                rows.
        """
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
        """Yield a supervised example for each row that is not held out for evaluation.

        Args:
            rows: The rows of a file.
            data: Columns of the file.
            bad: List to which the error message of each row that cannot be used is appended.
        """
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
        """Return the keys of all questions that a conversation asks (see `asked_keys`).

        With `task.kind: seeds`, all conversations may start with the same message, which therefore
        identifies no problem. The only key is then the key of the row's seed; a row without a seed
        has none.
        """
        if self._config.kind == "seeds":
            return {seed_problem(row["seed"]).key} if "seed" in row else set()
        return asked_keys(messages)

    def prompt_ids(self, problem: Problem) -> IntArray:
        """Return the token IDs of a problem's prompt, with prompt and chat templates applied."""
        return self._prompts.ids(problem)

    def messages(self, problem: Problem) -> Sequence[Message]:
        """Return a problem's prompt as chat messages, before the chat template is applied."""
        return self._prompts.messages(problem)

    def _prompt(self, problem: Problem) -> Prompt:
        """Return a problem as the `Prompt` that the scheduler receives.

        If an environment opens each episode, the prompt has no tokens, and its messages are in the
        payload.
        """
        payload = problem.payload
        if not self._has_episodes:
            return Prompt(self.prompt_ids(problem), self.source.name, payload, problem.priority)
        short_repr = list(self.messages(problem)) if payload["question"] else []
        payload = {**payload, "messages": short_repr, "chat": bool(problem.messages)}
        return Prompt(np.zeros(0, np.int32), self.source.name, payload, problem.priority)

    def _example(self, problem: Problem, response: str) -> WorkedExample:
        """Tokenize a problem and a response as a supervised example; end it with end-of-text."""
        response_ids = self._prompts.encode(response, special_tokens=False)
        end = np.array([self._tokenizer.eos_token_id], dtype=np.int32)
        return WorkedExample(self.prompt_ids(problem), np.concatenate([response_ids, end]))


def shown_text(text: str) -> str:
    """Return `text` for a terminal: unprintable characters escaped, cut after 2,000 characters."""
    most = _MAX_SHOWN
    kept = text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} characters more"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in kept)


def response_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    stop_token_ids: Collection[int],
    *,
    skip_special: bool = False,
) -> str:
    """Decode the tokens of a response, without the stop and padding tokens at their end.

    Other special tokens, such as `<think>` in some tokenizers, stay unless `skip_special` is true.
    """
    ids, ends = list(token_ids), {*stop_token_ids, tokenizer.pad_token_id}
    while ids and ids[-1] in ends:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special))


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer in a Hugging Face model folder; never download from a hub.

    Code in the folder is never executed; a tokenizer that needs such code is refused.

    Raises:
        UserError: If the tokenizer cannot be loaded or has no end-of-text token.
    """
    if _named_class(model_path) in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast as Reader
    else:
        from transformers import AutoTokenizer as Reader  # This import is slow: it imports torch.

    try:
        tokenizer = Reader.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged file may raise any exception
        raise UserError(f"model.path {model_path!r} has no readable tokenizer: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path {model_path!r}: the tokenizer has no end-of-text token")
    return tokenizer


def _named_class(model_path: str) -> str:
    """Return the tokenizer class that a model folder names; empty if it names none."""
    file = Path(model_path) / "tokenizer_config.json"
    if not file.is_file():
        return ""
    return str(read_json_object(file, f"model.path: {file}").get("tokenizer_class", ""))


def stop_tokens(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the IDs of all tokens that end a response, in ascending order.

    These are the tokenizer's end-of-text token and every `eos_token_id` in the model folder's
    `generation_config.json` and `config.json`. SGLang stops at all of them.

    Raises:
        UserError: If one of them is not a token of the model.
    """
    vocabulary = vocabulary_of(model_path) or 1 << 31
    stops = {int(tokenizer.eos_token_id)}
    if max(stops) >= vocabulary:
        raise UserError(
            f"model.path {model_path!r}: the tokenizer's end-of-text token is {max(stops)}, and "
            f"config.json has vocab_size {vocabulary}; they belong to different models"
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
