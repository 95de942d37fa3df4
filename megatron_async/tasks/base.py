"""Defines the interfaces `Task`, `ProblemSource` and `Dataset`, and splits off held-out problems.

A problem is held out when it is reserved for evaluation and never trained on.

Invariants
- Training prompts have a fixed endless order. Only the settings and the data files decide which
  prompt is at which position of it, so a run that is restored at a position continues with exactly
  the prompts that an uninterrupted run would have read.
- A problem is never both trained on and held out. `is_heldout` decides by a hash of the problem's
  own text and nothing else, so no seed, count or order can make training see a held-out problem.
- A prompt's payload is JSON. Together with the response's text, it is all that a scorer needs.
  `row_payload` makes the payload for every source, so that every payload contains the question, the
  reference answer and the metadata.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_async.config.data import FileConfig
from megatron_async.config.evaluation import HELDOUT
from megatron_async.trajectory.types import IntArray, Prompt

BoolArray = npt.NDArray[np.bool_]

_HASH_RANGE = 1 << 64


ProblemLocation = tuple[int, int]
"""Location of a problem: index of its file in the source, and index of the problem in that file."""

Message = dict[str, Any]
"""A chat message: `role`, `content` (a string), and the other fields that its row gives it."""


@dataclass(frozen=True)
class Problem:
    """A question as text, with everything needed to render its prompt and to score a response.

    Attributes:
        question: The text that is asked.
        payload: Data that a scorer reads; see `row_payload`.
        fields: Values by name, which a prompt template may use in addition to `question`.
        priority: Scheduling priority; problems with a higher priority go first.
        messages: A conversation that ends with the question; empty if there is only the question.
        template: The prompt template that is used unless `task.prompt_template` is set; empty to
            use the question unchanged.
        where: File and line (or row) of the problem, for error messages; empty if it is not from a
            file.
    """

    question: str
    payload: dict[str, Any]
    fields: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    messages: tuple[Message, ...] = ()
    template: str = ""
    where: str = field(default="", compare=False)

    @property
    def key(self) -> int:
        """64-bit hash of the question and the non-system messages before it.

        It identifies the problem: equal texts have equal keys, in whatever file they are.
        Whitespace and case do not matter.
        """
        earlier = [m["content"] for m in self.messages[:-1] if m["role"] != "system"]
        return question_key("\x1e".join([*earlier, self.question]))


def asked_keys(messages: tuple[Message, ...]) -> set[int]:
    """Return the keys (`Problem.key`) of all questions that the user asks in a conversation.

    Each user message contributes two keys: one for the message by itself, and one for the message
    together with all messages before it. A held-out problem may have either key.
    """
    return {
        Problem(message["content"], {}, messages=asked).key
        for number, message in enumerate(messages, start=1)
        if message["role"] == "user"
        for asked in ((), messages[:number])
    }


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """A tokenized prompt with the response to learn from it, for supervised fine-tuning.

    Attributes:
        prompt_ids: Token IDs of the prompt.
        response_ids: Token IDs of the response, which ends with an end-of-text token.
        trained: For each response token, whether it is trained on; None if all are.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    trained: BoolArray | None = None


class Task(Protocol):
    """Interface of a task: prompts and supervised examples, tokenized for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """IDs of the tokens that end a response. The stop token is part of the response."""

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        """Return the `count` training prompts from `position` on, in the task's fixed order."""

    def eval_prompts(self, count: int, name: str = HELDOUT) -> list[Prompt]:
        """Return the first `count` prompts of the evaluation set `name`, all of different problems.

        `count` 0 means all prompts that the set has.
        """

    def check_evaluation(self, count: int, name: str, longest: int | None) -> None:
        """Raise a UserError if a prompt of the evaluation set `name` cannot be made or is too long.

        A prompt that is too long is accepted if the settings say that it counts as answered wrong.

        Args:
            count: Number of prompts to check, from the first on; 0 for all.
            name: Name of the evaluation set.
            longest: Maximum length of a prompt in tokens; None for no limit.
        """

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Return the number of training problems, and of held-out problems up to `heldout`.

        The first number is None if training problems are generated endlessly.
        """

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens of a prompt or a response, as rewards receive it."""

    def summary(self) -> str:
        """Return a description of the training data that includes the first prompt as rendered."""

    def check_lengths(self, longest: int, max_new_tokens: int) -> int:
        """Remove the prompts that are too long to leave tokens for a response; return their number.

        A prompt is too long if it and `max_new_tokens` together exceed `longest`, the number of
        tokens that an engine accepts.

        Raises:
            UserError: If a prompt is too long and the settings or the kind of task do not allow its
                removal.
        """

    def worked_examples(self, count: int, data: FileConfig | None = None) -> list[WorkedExample]:
        """Return up to `count` supervised examples, from the file `data` if it is given.

        Without `data`, they are the worked answers that the task's problem source generates.
        """


class Dataset(Protocol):
    """Interface of a data set whose problems a program generates: problems by index, and a function
    that scores answers."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return problem `index` as a mapping with `question`, `answer` and `metadata`."""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the score of `answer` to the problem `entry`; 1 is the full score."""


class ProblemSource(Protocol):
    """Interface of a source of problems as text, independent of any tokenizer."""

    name: str

    def train(self, index: int) -> Problem:
        """Return training problem number `index`, counted from 0."""

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Yield each problem whose text has more than `size` bytes, together with its location.

        A source that generates problems endlessly yields its first problem only, whatever its size.
        """

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Remove problems from training and evaluation, given their locations.

        `problems_longer_than` returns such locations.

        Raises:
            UserError: If the source cannot remove problems.
        """

    def summary(self) -> str:
        """Return a one-line description of the data, which is shown when a run starts."""

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` different held-out problems; all of them if `count` is 0.

        Raises:
            UserError: If the source has fewer, or if all are requested and the source is endless.
        """

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Return the number of training problems, and of held-out problems up to `heldout`.

        The first number is None if training problems are generated endlessly.
        """

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Return `count` training problems, each with a response that writes out its solution.

        Raises:
            UserError: If the source has no such worked answers.
        """


def row_payload(question: str, answer: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON payload of a problem, which is what its scorer reads.

    Args:
        question: The question as text.
        answer: The reference answer; empty if there is none.
        metadata: The other columns of the problem's row.
    """
    return {"question": question, "answer": answer, "metadata": metadata}


def stable_hash(*parts: object) -> int:
    """Return a 64-bit hash of the text of `parts` that is the same on every machine."""
    joined = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(joined.encode(), digest_size=8).digest(), "big")


def is_heldout(question: str, share: float) -> bool:
    """Return whether a question is held out for evaluation, which its hash and `share` decide.

    A held-out question is never trained on. About the given share of all questions is held out. The
    decision depends on the text alone; whitespace and case do not matter.
    """
    return is_heldout_key(question_key(question), share)


def question_key(question: str) -> int:
    """Return a 64-bit hash of a question's text that ignores differences in whitespace and case."""
    return stable_hash("held-out", " ".join(question.split()).casefold())


def is_heldout_key(key: int, share: float) -> bool:
    """Return whether the question with the hash `key` is held out for evaluation.

    `key` is the result of `question_key`, and `share` the share of questions to hold out.
    """
    return key < share * _HASH_RANGE
