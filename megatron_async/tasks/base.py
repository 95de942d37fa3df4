"""What a task is: prompts in a fixed order, held-out prompts, worked answers, a scorer.

Invariants
- Prompts are a pure function of (settings, position): a run that is resumed at a position asks
  exactly the problems that an uninterrupted run would have asked.
- No problem is on both sides: whether a problem is held out follows from its own text
  (`is_heldout`) and from nothing else, so no seed, count or order can make training see it.
- A prompt's payload is JSON; together with the response's text it is all that a scorer needs. It is
  made by `row_payload`: whatever the source, a scorer finds question, answer and metadata there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from megatron_async.trajectory.types import IntArray, Prompt

SCORER_FAULTS: Final = MappingProxyType(
    {
        "verifier_timeout": "scorer_timeouts",
        "verifier_crash": "scorer_crashes",
        "verifier_error": "scorer_errors",
        "stray_output": "scorer_stray_output",
    }
)
"""How a scorer can fail: the part of a score that counts it, the metric that adds it up."""

_HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class Problem:
    """A question as text. `fields`: what a prompt template may name besides `question`."""

    question: str
    payload: dict[str, Any]
    fields: dict[str, str] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """One supervised example; `response_ids` ends with the end-of-text token."""

    prompt_ids: IntArray
    response_ids: IntArray


@dataclass(frozen=True)
class Judgement:
    """A score of one response. `reward` is `None` when the scorer failed and that is not a 0.

    `detail` holds numbers for metrics: `score` (the scorer's own, 0-1), `answered` (an answer was
    found in the text), and one of `SCORER_FAULTS` where it happened. `seconds`: what it took the
    scorer, 0 = not measured.
    """

    reward: float | None
    detail: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Task(Protocol):
    """Prompts and worked answers of one task, tokenized for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response (they are part of it)."""
        ...

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        """Training prompts `position` to `position + count - 1` of the task's fixed order."""
        ...

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, all different."""
        ...

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """How many problems there are for training (None: no end), and held out, at most so many
        of the latter."""
        ...

    def check_lengths(self, longest: int, max_new_tokens: int) -> None:
        """Raises UserError for a prompt, as far as they are known beforehand, that with
        `max_new_tokens` is longer than the `longest` tokens that an engine takes."""
        ...

    def worked_examples(self, count: int, data: str = "") -> Sequence[WorkedExample]:
        """Supervised examples of training problems, or those of the JSONL file `data`."""
        ...


class ProblemSource(Protocol):
    """Where problems come from, before there is any tokenizer."""

    name: str

    def train(self, index: int) -> Problem:
        """Training problem `index` >= 0."""
        ...

    def listed(self) -> Sequence[tuple[str, Problem]]:
        """All problems, each with what a refusal calls it; none where they have no end."""
        ...

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` different held-out problems. UserError if there are fewer."""
        ...

    def counts(self, heldout: int) -> tuple[int | None, int]:
        """As in `Task`."""
        ...

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Training problems with answers whose steps are written out. UserError if it has none."""
        ...


class Scorer(Protocol):
    """Scores responses. May raise or hang: it runs in a process of its own (`verifier.py`)."""

    def score(self, payload: dict[str, Any], text: str) -> Judgement:
        """The score of a response's text, special tokens already removed."""
        ...


def row_payload(question: str, answer: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What a scorer reads of a row: `answer` is empty where there is none, `metadata` holds the
    row's other columns (JSON)."""
    return {"question": question, "answer": answer, "metadata": metadata}


def stable_hash(*parts: object) -> int:
    """A 64-bit hash of the parts' text that is the same in every process and on every machine."""
    joined = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(joined.encode(), digest_size=8).digest(), "big")


def is_heldout(question: str, share: float) -> bool:
    """Whether a problem belongs to evaluation: decided by its text alone, spaces and case aside."""
    normalised = " ".join(question.split()).casefold()
    return stable_hash("held-out", normalised) < share * _HASH_RANGE
