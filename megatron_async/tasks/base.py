"""Tasks: prompts in a fixed order, held-out prompts, worked answers, a scorer.

Invariants
- Prompts are a pure function of (settings, position): a run that is resumed at a position asks
  exactly the problems that an uninterrupted run would have asked.
- No problem is on both sides: whether a problem is held out follows from its own text
  (`is_heldout`) and from nothing else, so no seed, count or order can make training see it.
- A prompt's payload is JSON; together with the response's text it is all that a scorer needs. It is
  made by `row_payload`: whatever the source, a scorer finds question, answer and metadata there.
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
"""Number of a file and of a problem in it."""

Message = dict[str, Any]
"""A chat message: `role`, `content` (a text) and the other fields that its row has."""


@dataclass(frozen=True)
class Problem:
    """A question as text. `fields`: what a prompt template may name besides `question`.

    `messages`: a conversation that ends with the question; empty where the question is all.
    `template`: how the question is put, where `task.prompt_template` is not set; empty: as it is.
    `where`: the problem's file and line, for a refusal; empty where it comes from no file.
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
        """A 64-bit hash of what is asked, the same for the same text in any file."""
        earlier = [m["content"] for m in self.messages[:-1] if m["role"] != "system"]
        return question_key("\x1e".join([*earlier, self.question]))


def asked_keys(messages: tuple[Message, ...]) -> set[int]:
    """Return the keys of what a conversation asks: each question alone, and with all before it."""
    return {
        Problem(message["content"], {}, messages=asked).key
        for number, message in enumerate(messages, start=1)
        if message["role"] == "user"
        for asked in ((), messages[:number])
    }


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """A supervised example; `response_ids` ends with the end-of-text token.

    `trained`: which tokens of the response are learned; None: all, the end included.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    trained: BoolArray | None = None


class Task(Protocol):
    """Prompts and worked answers of one task, tokenized for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response (they are part of it)."""

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        """Training prompts `position` to `position + count - 1` of the task's fixed order."""

    def eval_prompts(self, count: int, name: str = HELDOUT) -> list[Prompt]:
        """The first `count` prompts of the evaluation set `name`, all different; 0: all it has."""

    def check_evaluation(self, count: int, name: str, longest: int | None) -> None:
        """Make the first `count` prompts of the evaluation set `name` (0: all) and refuse one of
        more than `longest` tokens, if it may not count as wrong. Raises UserError."""

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """The numbers of training problems (None: no end) and of held-out ones, of which at most
        `heldout` count."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt or a response, special tokens removed."""

    def summary(self) -> str:
        """The training data, and the first prompt as the templates made it."""

    def check_lengths(self, longest: int, max_new_tokens: int) -> int:
        """Leave out, and count, prompts that with `max_new_tokens` are longer than the
        `longest` tokens that an engine takes. Raises UserError where they may not be left out."""

    def worked_examples(self, count: int, data: FileConfig | None = None) -> list[WorkedExample]:
        """Supervised examples of training problems, or those of the file `data`."""


class Dataset(Protocol):
    """A chunk of problems with their scorer."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return problem `index`: `question`, `answer` and `metadata`."""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the score of `answer` to the problem `entry`; 1 is full score."""


class ProblemSource(Protocol):
    """A source of problems, before there is any tokenizer."""

    name: str

    def train(self, index: int) -> Problem:
        """Training problem `index` >= 0."""

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Problems whose texts have more bytes than `size`; the first where they have no end."""

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Ask no problem that `longer` gave one of these places. UserError where none can be."""

    def summary(self) -> str:
        """The data, in a sentence for the start of a run."""

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` different held-out problems. UserError if there are fewer."""

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """Return the counts as in `Task`."""

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Training problems with answers whose steps are written out. UserError if it has none."""


def row_payload(question: str, answer: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """The part of a row that a scorer reads: `answer` is empty where there is none, `metadata`
    holds the row's other columns (JSON)."""
    return {"question": question, "answer": answer, "metadata": metadata}


def stable_hash(*parts: object) -> int:
    """A 64-bit hash of the parts' text that is the same in every process and on every machine."""
    joined = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(joined.encode(), digest_size=8).digest(), "big")


def is_heldout(question: str, share: float) -> bool:
    """True when a problem belongs to evaluation, by its text alone, spaces and case aside."""
    return is_heldout_key(question_key(question), share)


def question_key(question: str) -> int:
    """A 64-bit hash of a question's text, spaces and case aside."""
    return stable_hash("held-out", " ".join(question.split()).casefold())


def is_heldout_key(key: int, share: float) -> bool:
    """`is_heldout` of the question with that key."""
    return key < share * _HASH_RANGE
