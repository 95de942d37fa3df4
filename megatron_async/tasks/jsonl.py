"""Scores answers to rows of files: exact match, or math-verify."""

from __future__ import annotations

from typing import Any, Final

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.answers import final_answer
from megatron_async.tasks.base import Judgement

CHECKERS: Final = ("exact", "math")


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
