"""Prompts and answers from a user's JSONL file, scored by exact match or by math-verify.

Invariants
- Every refusal names the file and the line.
- Training runs through the file's training problems epoch by epoch, each in an order of its own
  that depends on `train_seed` and the epoch only.
- A problem that occurs twice in the file is on one side only (the side follows from its text).
"""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from megatron_async.config.files import parse_json
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError, shown
from megatron_async.tasks.answers import final_answer
from megatron_async.tasks.base import Judgement, Problem, is_heldout, row_payload, stable_hash

CHECKERS: Final = ("exact", "math")
_LARGEST_PRIORITY = 1_000_000


def read_jsonl(path: str, required: tuple[str, ...], setting: str) -> list[dict[str, str]]:
    """The lines of `path`, each an object with `required` texts (numbers are made texts).

    Blank lines are skipped. Raises UserError naming the setting, the file and the line.
    """
    return [_texts(row, required, where) for where, row in _objects(path, setting)]


def _objects(path: str, setting: str) -> list[tuple[str, dict[str, Any]]]:
    """(what a refusal names, object) of every line that is not blank; at least one."""
    try:
        # Only "\n" ends a line: JSON may hold U+2028 and U+0085 as they are.
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{setting} {path!r} cannot be read: {error}") from error
    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
    places = ((f"{setting} {path}, line {i}", line) for i, line in enumerate(lines, start=1))
    rows = [(where, _object(line, where)) for where, line in places if line.strip()]
    if not rows:
        raise UserError(f"{setting} {path} holds no lines")
    return rows


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode(), where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text (byte {error.start})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} must be an object, got {type(row).__name__}")
    return row


def _texts(row: dict[str, Any], required: tuple[str, ...], where: str) -> dict[str, str]:
    for key in required:
        value = row.get(key)
        infinite = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or infinite:
            raise UserError(f"{where}: `{key}` must be a text or a number, got {shown(value)}")
        if not str(value).strip():
            raise UserError(f"{where}: `{key}` is empty")
        if any("\ud800" <= c <= "\udfff" for c in str(value)):
            raise UserError(f"{where}: `{key}` holds half of a surrogate pair, got {shown(value)}")
    return {key: str(row[key]) for key in required}


def _problem(row: dict[str, Any], where: str) -> Problem:
    texts = _texts(row, ("prompt", "answer"), where)
    priority = row.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise UserError(f"{where}: `priority` must be a whole number, got {shown(priority)}")
    if abs(priority) > _LARGEST_PRIORITY:
        raise UserError(
            f"{where}: `priority` must be between -{_LARGEST_PRIORITY} and {_LARGEST_PRIORITY}, "
            f"got {shown(priority)}"
        )
    metadata = {k: v for k, v in row.items() if k not in ("prompt", "answer", "priority")}
    payload = row_payload(texts["prompt"], texts["answer"], metadata)
    return Problem(texts["prompt"], payload, priority=priority)


class JsonlProblems:
    """The problems of one file."""

    def __init__(self, config: TaskConfig) -> None:
        check_checker(config)
        self.name = f"jsonl:{config.name}"
        self._config = config
        rows = _objects(config.path, "task.path")
        self._listed = [(where, _problem(row, where)) for where, row in rows]
        problems = [problem for _, problem in self._listed]
        share = config.heldout_share
        self._train = [p for p in problems if not is_heldout(p.question, share)]
        self._heldout = list(
            {p.question: p for p in problems if is_heldout(p.question, share)}.values()
        )
        if not self._train:
            raise UserError(
                f"task.path {config.path} has no training problem left of {len(problems)} at "
                f"task.heldout_share {share}"
            )
        random.Random(stable_hash("held-out order", config.eval_seed)).shuffle(self._heldout)
        self._order = lru_cache(maxsize=2)(self._make_order)

    def listed(self) -> list[tuple[str, Problem]]:
        """All problems of both sides, each with its place in the file."""
        return self._listed

    def train(self, index: int) -> Problem:
        """Problem `index` of an endless run of shuffled epochs."""
        epoch, place = divmod(index, len(self._train))
        return self._train[self._order(epoch)[place]]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out problems. Raises UserError if there are fewer."""
        if len(self._heldout) < count:
            raise UserError(
                f"task.path {self._config.path} has only {len(self._heldout)} held-out problems "
                f"at task.heldout_share {self._config.heldout_share}, eval.prompts asks for {count}"
            )
        return self._heldout[:count]

    def counts(self, heldout: int) -> tuple[int, int]:
        """Training problems, and up to `heldout` held-out ones."""
        return len(self._train), min(heldout, len(self._heldout))

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """A file of prompts and answers has none."""
        raise UserError(
            f"task.path {self._config.path} holds no worked answers; set sft.data to a JSONL file "
            "with `prompt` and `response`"
        )

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(stable_hash("epoch", self._config.train_seed, epoch)).shuffle(order)
        return order


def worked_lines(path: str, heldout_share: float) -> Iterator[tuple[Problem, str]]:
    """(problem, response) of the lines of an SFT file that are not held out."""
    for row in read_jsonl(path, ("prompt", "response"), "sft.data"):
        if not is_heldout(row["prompt"], heldout_share):
            yield Problem(row["prompt"], {}), row["response"]


class JsonlScorer:
    """Compares the final answer with the file's: `exact` text, or `math` by math-verify."""

    def __init__(self, config: TaskConfig) -> None:
        check_checker(config)
        self._config = config

    def score(self, payload: dict[str, Any], text: str) -> Judgement:
        """1 when the answers agree, else 0. `math` may hang on hostile input (see `verifier`)."""
        answer = final_answer(text, self._config.answer_marker)
        if answer is None:
            return Judgement(0.0, {"score": 0.0, "answered": 0.0})
        agree = exactly_equal if self._config.name == "exact" else mathematically_equal
        score = float(agree(payload["answer"], answer))
        return Judgement(score, {"score": score, "answered": 1.0})


def exactly_equal(reference: str, answer: str) -> bool:
    """The same text, runs of blanks aside."""
    return " ".join(reference.split()) == " ".join(answer.split())


def mathematically_equal(reference: str, answer: str) -> bool:
    """Equal to math-verify, without its own limit (it needs `signal.alarm` of a main thread)."""
    from math_verify import parse, verify

    if exactly_equal(reference, answer):
        return True
    # In dollars both are read as LaTeX; a bare number is found either way.
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


def check_checker(config: TaskConfig) -> None:
    """Raises UserError unless `task.name` is a known checker."""
    if config.name not in CHECKERS:
        raise UserError(
            f"task.name {config.name!r} is not an answer checker of jsonl tasks; "
            f"it must be one of {', '.join(CHECKERS)}"
        )
